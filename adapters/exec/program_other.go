//go:build !linux

package exec

import (
	osexec "os/exec"
	"syscall"
)

// setProcess creates a process group, so that what the program starts ends with
// it. If the adapter is killed, the program notices it by the end of its
// standard input only.
func setProcess(cmd *osexec.Cmd) {
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
}
