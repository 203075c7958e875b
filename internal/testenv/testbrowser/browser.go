// Package testbrowser gets a browser for tests of pages.
//
// Chromium is Debian's, installed with apt-get where it is absent (a minute, as
// root); axe comes from npm (seconds).
package testbrowser

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"

	"github.com/isthmus-mesh/isthmus/internal/testenv"
)

// Tool is Chromium as the distribution packages it: a browser needs its
// libraries, too. In the cache is a script that runs it.
var Tool = testenv.Tool{Name: "chromium", Program: "chromium", Version: func(string) (string, error) { return "system", nil }, Get: getChromium}

// AxeTool is axe-core, which finds what people with disabilities cannot use. It
// is a script for a page.
var AxeTool = testenv.Tool{Name: "axe-core", Program: "axe.min.js", Version: axeVersion, Get: getAxe}

func getChromium(ctx context.Context, _, path string) error {
	binary, err := exec.LookPath("chromium")
	if err != nil {
		install := exec.CommandContext(ctx, "apt-get", "install", "--yes", "--no-install-recommends", "chromium")
		install.Env = append(os.Environ(), "DEBIAN_FRONTEND=noninteractive")
		if err := testenv.RunQuiet(install); err != nil {
			return fmt.Errorf("install the package chromium (it needs root and a package index; apt-get update gets one): %w", err)
		}
		if binary, err = exec.LookPath("chromium"); err != nil {
			return err
		}
	}
	return os.WriteFile(path, fmt.Appendf(nil, "#!/bin/sh\nexec '%s' \"$@\"\n", binary), 0o755) //nolint:gosec // it is executed
}

// axeVersion reads the version that tools/axe/package.json names; the lock file
// beside it has the checksum.
func axeVersion(root string) (string, error) {
	text, err := os.ReadFile(filepath.Join(root, "tools", "axe", "package.json"))
	if err != nil {
		return "", err
	}
	var pinned struct{ Dependencies map[string]string }
	err = json.Unmarshal(text, &pinned)
	return pinned.Dependencies["axe-core"], err
}

// getAxe takes one file out of the package.
func getAxe(ctx context.Context, root, path string) error {
	npm := exec.CommandContext(ctx, "npm", "ci", "--ignore-scripts", "--no-audit", "--loglevel", "error")
	npm.Dir = filepath.Dir(path)
	if err := os.CopyFS(npm.Dir, os.DirFS(filepath.Join(root, "tools", "axe"))); err != nil {
		return err
	}
	if err := testenv.RunQuiet(npm); err != nil {
		return fmt.Errorf("get axe-core (it needs npm and its registry): %w", err)
	}
	script := filepath.Join(npm.Dir, "node_modules", "axe-core", "axe.min.js")
	if err := os.Chmod(script, 0o755); err != nil { //nolint:gosec // the cache holds executables
		return err
	}
	return os.Rename(script, path)
}
