// Package testpython runs the adapter in Python of examples/adapter-python.
//
// Its Python packages come from PyPI (some seconds).
package testpython

import (
	"context"
	"crypto/sha256"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/isthmus-mesh/isthmus/internal/testenv"
)

// Tool is the Python environment of examples/adapter-python: the packages
// that it pins and the code of its protos.
var Tool = testenv.Tool{Name: "adapter-python", Program: "python", Version: pythonVersion, Get: getPython}

const pythonExample = "examples/adapter-python"

// pythonVersion changes with everything in the environment.
func pythonVersion(root string) (string, error) {
	sum := sha256.New()
	for _, file := range []string{pythonExample + "/setup", pythonExample + "/requirements.txt", "plugin/proto/isthmus/plugin/v1/adapter.proto"} {
		b, err := os.ReadFile(filepath.Join(root, filepath.FromSlash(file)))
		if err != nil {
			return "", err
		}
		fmt.Fprintf(sum, "%s %d\n%s", file, len(b), b)
	}
	api, err := testenv.PinnedVersion(filepath.Join(root, "go.mod"), "istio.io/api")
	return fmt.Sprintf("%x-%s", sum.Sum(nil)[:5], api), err
}

// getPython creates the environment at its final place, since it cannot be
// moved. The file at path is a script that runs its Python.
func getPython(ctx context.Context, root, path string) error {
	api, err := testenv.ModuleDir(ctx, root, "istio.io/api") // for its protos
	if err != nil {
		return err
	}
	venv := filepath.Join(filepath.Dir(filepath.Dir(path)), "venv")
	if err := testenv.RunQuiet(exec.CommandContext(ctx, filepath.Join(root, filepath.FromSlash(pythonExample), "setup"), venv, api)); err != nil {
		return fmt.Errorf("set up a Python environment (it needs python3 with the venv module, and PyPI the first time): %w", err)
	}
	return os.WriteFile(path, fmt.Appendf(nil, "#!/bin/sh\nexec '%s' \"$@\"\n", filepath.Join(venv, "bin", "python")), 0o755) //nolint:gosec // it is executed
}

// PythonAdapter creates a plugin directory that contains the Python example as
// the adapter json, and returns its path.
func PythonAdapter(t testing.TB) string {
	t.Helper()
	python := Tool.Binary(t)
	root, err := testenv.Root()
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	script := fmt.Sprintf("#!/bin/sh\nexec '%s' '%s'\n", python, filepath.Join(root, filepath.FromSlash(pythonExample), "adapter.py"))
	if err := os.WriteFile(filepath.Join(dir, "isthmus-adapter-json"), []byte(script), 0o755); err != nil { //nolint:gosec // it is executed
		t.Fatal(err)
	}
	return dir
}
