package testenv

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
)

// DebianTool is a tool of the Debian packages in tools/FOLDER/packages, which
// are unpacked and not installed. The version in the cache is that of the list:
// Debian serves only the newest revision of a package. The binary is a script
// that runs the program at path within the packages with their libraries.
func DebianTool(folder, binary, program string) Tool {
	list := func(root string) string { return filepath.Join(root, "tools", folder, "packages") }
	return Tool{
		Name: folder, Program: binary,
		Version: func(root string) (string, error) {
			text, err := os.ReadFile(list(root))
			sum := sha256.Sum256(text)
			return "debian-" + hex.EncodeToString(sum[:5]), err
		},
		Get: func(ctx context.Context, root, path string) error {
			unpack := exec.CommandContext(ctx, "sh", "-ec", `
root=$1
set -- $(grep -v '^#' "$2")
rm -rf "$root"
apt-get download "$@" || { apt-get update && apt-get download "$@"; } # the lists are absent or outdated
for package in *.deb; do dpkg-deb -x "$package" "$root"; done
# iptables is chosen by a link that only an installation makes.
if [ -x "$root/usr/sbin/xtables-legacy-multi" ]; then
  for name in iptables ip6tables; do ln -s xtables-legacy-multi "$root/usr/sbin/$name"; done
fi`, "sh", filepath.Join(filepath.Dir(filepath.Dir(path)), "root"), list(root))
			unpack.Dir = filepath.Dir(path)
			if err := RunQuiet(unpack); err != nil {
				return fmt.Errorf("%w\n(it needs Debian, and root)", err)
			}
			script := `#!/bin/sh
root=$(cd "$(dirname "$0")" && pwd)/root
library=$(cd "$root/usr/lib" && echo *-linux-gnu*)
export PATH="$root/usr/sbin:$root/usr/bin:$PATH" XTABLES_LIBDIR="$root/usr/lib/$library/xtables"
export LD_LIBRARY_PATH="$root/usr/lib/$library:$root/lib/$library:$root/usr/lib/$library/systemd"
exec "$root` + program + `" "$@"
`
			return os.WriteFile(path, []byte(script), 0o755) //nolint:gosec // a program
		},
	}
}
