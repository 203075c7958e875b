//go:build unix && !linux

package testenv

import (
	"os/exec"
	"syscall"
)

// OwnGroup puts the process into a new process group. Only Linux can also tie
// its life to the test process.
func OwnGroup(cmd *exec.Cmd) { cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} }

// StartCommand starts cmd.
func StartCommand(cmd *exec.Cmd) error { return cmd.Start() }
