//go:build !linux

package supervisor

import (
	"os/exec"
	"syscall"
)

// setProcess gives the process a group of its own, so that a terminal's Ctrl-C reaches the bridge only and everything that the
// plugin starts can be killed with it. A plugin notices the end of its host by the end of the connection only.
func setProcess(cmd *exec.Cmd) {
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
}
