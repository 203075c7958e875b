//go:build !linux

package supervisor

import (
	"os/exec"
	"syscall"
)

// setProcess creates a process group, so that Ctrl-C in a terminal reaches only
// the bridge and a plugin's children can be killed with it. A plugin detects
// the end of the bridge only by its connection.
func setProcess(cmd *exec.Cmd) {
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
}

// limitMemory does nothing: this limit exists on Linux only.
func limitMemory(int, int) error { return nil }
