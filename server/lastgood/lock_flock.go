//go:build linux || darwin || freebsd || netbsd || openbsd || dragonfly

package lastgood

import (
	"errors"
	"os"
	"syscall"
)

// lock acquires an advisory lock on an open file, released when the process
// ends. It returns false if another process has the lock.
func lock(f *os.File) (bool, error) {
	err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
	if errors.Is(err, syscall.EWOULDBLOCK) {
		return false, nil
	}
	return err == nil, err
}
