//go:build !linux || !amd64

package supervisor_test

import "syscall"

// foreign is refused: only processes of amd64 are known to have such calls.
func foreign(_, _, _, _ uintptr) (uintptr, syscall.Errno) { return 0, syscall.EPERM }
