package exec

import (
	osexec "os/exec"
	"syscall"
)

// setProcess creates a process group, so that what the program starts ends with
// it, and ends the program with the thread that starts it.
func setProcess(cmd *osexec.Cmd) {
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
}
