//go:build unix && !linux

package testenv

import (
	"os/exec"
	"syscall"
)

// ownGroup puts the process into a new process group. Only Linux can also tie
// its life to the test process.
func ownGroup(cmd *exec.Cmd) { cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} }

func start(cmd *exec.Cmd) error { return cmd.Start() }
