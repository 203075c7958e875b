//go:build unix && !linux

package testenv

import "testing"

// MountTmpfs skips the test: only Linux has the file system.
func MountTmpfs(t testing.TB, _ string) (dir string, remount func(readOnly bool)) {
	t.Helper()
	t.Skip("there is no tmpfs here")
	return "", nil
}
