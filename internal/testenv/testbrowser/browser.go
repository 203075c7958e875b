package testbrowser

import (
	"archive/tar"
	"compress/gzip"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

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

// axePackage pins the package and the checksum of its file.
const axePackage = "tools/axe/package.txt"

func readAxe(root string) (version, sum string, err error) {
	b, err := os.ReadFile(filepath.Join(root, filepath.FromSlash(axePackage)))
	if err != nil {
		return "", "", err
	}
	fields := strings.Fields(string(b))
	if len(fields) != 3 || fields[0] != "axe-core" || !strings.HasPrefix(fields[2], "sha256:") {
		return "", "", fmt.Errorf("%s must be: axe-core VERSION sha256:SUM", axePackage)
	}
	return fields[1], strings.TrimPrefix(fields[2], "sha256:"), nil
}

func axeVersion(root string) (string, error) {
	version, _, err := readAxe(root)
	return version, err
}

// getAxe takes one file out of the package.
func getAxe(ctx context.Context, root, path string) error {
	version, want, err := readAxe(root)
	if err != nil {
		return err
	}
	pack := exec.CommandContext(ctx, "npm", "pack", "--ignore-scripts", "--loglevel", "error", "axe-core@"+version)
	pack.Dir = filepath.Dir(path)
	if err := testenv.RunQuiet(pack); err != nil {
		return fmt.Errorf("get axe-core (it needs npm and its registry): %w", err)
	}
	archive := filepath.Join(filepath.Dir(path), "axe-core-"+version+".tgz")
	b, err := os.ReadFile(archive)
	if err != nil {
		return err
	}
	if sum := sha256.Sum256(b); hex.EncodeToString(sum[:]) != want {
		return fmt.Errorf("axe-core %s has the checksum %x, and %s says %s", version, sum, axePackage, want)
	}
	unzipped, err := gzip.NewReader(strings.NewReader(string(b)))
	if err != nil {
		return err
	}
	files := tar.NewReader(unzipped)
	for {
		f, err := files.Next()
		if errors.Is(err, io.EOF) {
			return fmt.Errorf("axe-core %s has no axe.min.js", version)
		}
		if err != nil {
			return err
		}
		if f.Name != "package/axe.min.js" {
			continue
		}
		script, err := io.ReadAll(files)
		if err != nil {
			return err
		}
		return os.WriteFile(path, script, 0o755) //nolint:gosec // the cache holds executables
	}
}

// Get returns the paths of Chromium and of axe-core's script.
func Get(t testing.TB) (chromium, axe string) {
	t.Helper()
	return Tool.Binary(t), AxeTool.Binary(t)
}
