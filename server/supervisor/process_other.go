//go:build !linux

package supervisor

import (
	"os/exec"
	"syscall"
)

// setProcess creates a process group, so that Ctrl-C in a terminal reaches only
// the bridge and a plugin's children can be killed with it. A plugin detects
// the end of the bridge only by its connection.
func setProcess(cmd *exec.Cmd, user *syscall.Credential) {
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Credential: user}
}

// noNewPrivileges does nothing: only Linux has that.
func noNewPrivileges() error { return nil }

// limit does nothing: these limits exist on Linux only.
func limit(int, int, int) error { return nil }

// inForce returns nothing: only Linux says it.
func inForce(int) []string { return nil }
