package testenv

import (
	"syscall"
	"testing"
)

// MountTmpfs mounts a file system of its own on a new directory until the end
// of the test, with options such as "size=16m". It takes the rights of root;
// without them the test is skipped.
func MountTmpfs(t testing.TB, options string) (dir string, remount func(readOnly bool)) {
	t.Helper()
	dir = t.TempDir()
	if err := syscall.Mount("tmpfs", dir, "tmpfs", 0, options); err != nil {
		t.Skipf("mount a tmpfs, which takes the rights of root: %v", err)
	}
	t.Cleanup(func() {
		if err := syscall.Unmount(dir, syscall.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	return dir, func(readOnly bool) {
		t.Helper()
		flags := uintptr(syscall.MS_REMOUNT)
		if readOnly {
			flags |= syscall.MS_RDONLY
		}
		if err := syscall.Mount("tmpfs", dir, "tmpfs", flags, options); err != nil {
			t.Fatal(err)
		}
	}
}
