package supervisor

import (
	"os/exec"
	"syscall"

	"golang.org/x/sys/unix"
)

// setProcess creates a process group, so that Ctrl-C in a terminal reaches only
// the bridge and a plugin's children can be killed with it, and ends the
// process with the thread that starts it.
func setProcess(cmd *exec.Cmd) {
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
}

// limitMemory bounds the private writable memory of a process, in bytes.
func limitMemory(pid, limit int) error {
	l := unix.Rlimit{Cur: uint64(limit), Max: uint64(limit)}
	return unix.Prlimit(pid, unix.RLIMIT_DATA, &l, nil)
}
