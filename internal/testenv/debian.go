package testenv

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// DebianTool is a tool of the Debian packages in tools/FOLDER/packages, which
// are unpacked and not installed. The version in the cache is that of the list:
// Debian serves only the newest revision of a package. The binary is a script
// that runs the program at path within the packages with their libraries.
func DebianTool(folder, binary, program string) Tool {
	list := func(root string) ([]byte, error) {
		return os.ReadFile(filepath.Join(root, "tools", folder, "packages"))
	}
	return Tool{
		Name: folder, Program: binary,
		Version: func(root string) (string, error) {
			text, err := list(root)
			sum := sha256.Sum256(text)
			return "debian-" + hex.EncodeToString(sum[:5]), err
		},
		Get: func(ctx context.Context, root, path string) error {
			text, err := list(root)
			if err != nil {
				return err
			}
			var packages []string
			for line := range strings.Lines(string(text)) {
				if name := strings.TrimSpace(line); name != "" && !strings.HasPrefix(name, "#") {
					packages = append(packages, name)
				}
			}
			tmp, final := filepath.Dir(path), filepath.Dir(filepath.Dir(path))
			download := func() error {
				cmd := exec.CommandContext(ctx, "apt-get", append([]string{"download"}, packages...)...)
				cmd.Dir = tmp
				return RunQuiet(cmd)
			}
			if err := download(); err != nil {
				// The lists of packages are absent or outdated.
				if err := RunQuiet(exec.CommandContext(ctx, "apt-get", "update")); err != nil {
					return fmt.Errorf("%w\n(it needs Debian, and root)", err)
				}
				if err := download(); err != nil {
					return err
				}
			}
			files, err := filepath.Glob(filepath.Join(tmp, "*.deb"))
			if err != nil {
				return err
			}
			for _, file := range files {
				if err := RunQuiet(exec.CommandContext(ctx, "dpkg-deb", "-x", file, filepath.Join(tmp, "root"))); err != nil {
					return err
				}
			}
			libraries, err := filepath.Glob(filepath.Join(tmp, "root", "usr", "lib", "*-linux-gnu*"))
			if err != nil {
				return err
			}
			library := ""
			if len(libraries) > 0 {
				library = "/usr/lib/" + filepath.Base(libraries[0])
			}
			// iptables is chosen by a link that only an installation makes.
			for _, name := range []string{"iptables", "ip6tables"} {
				multi := filepath.Join(tmp, "root", "usr", "sbin", "xtables-legacy-multi")
				if isExecutable(multi) {
					if err := os.Symlink(filepath.Base(multi), filepath.Join(filepath.Dir(multi), name)); err != nil {
						return err
					}
				}
			}
			if err := os.RemoveAll(filepath.Join(final, "root")); err != nil {
				return err
			}
			if err := os.Rename(filepath.Join(tmp, "root"), filepath.Join(final, "root")); err != nil {
				return err
			}
			script := fmt.Sprintf(`#!/bin/sh
root=$(cd "$(dirname "$0")" && pwd)/root
export PATH="$root/usr/sbin:$root/usr/bin:$PATH"
export LD_LIBRARY_PATH="$root%[1]s:$root%[2]s:$root%[1]s/systemd" XTABLES_LIBDIR="$root%[1]s/xtables"
exec "$root%[3]s" "$@"
`, library, strings.TrimPrefix(library, "/usr"), program)
			return os.WriteFile(path, []byte(script), 0o755) //nolint:gosec // a program
		},
	}
}
