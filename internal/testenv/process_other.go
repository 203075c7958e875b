//go:build unix && !linux

package testenv

import (
	"os/exec"
	"syscall"
)

// ownGroup puts the process into a group of its own. Only Linux can also tie its life to the test process's.
func ownGroup(cmd *exec.Cmd) { cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} }

func start(cmd *exec.Cmd) error { return cmd.Start() }
