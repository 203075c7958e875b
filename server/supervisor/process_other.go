//go:build !linux

package supervisor

import (
	"errors"
	"io"
	"os"
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

// private makes a command execute a copy in a directory that only the bridge's
// user can write.
func private(cmd *exec.Cmd, dir string, from io.Reader) (*os.File, error) {
	f, err := os.CreateTemp(dir, "executable")
	if err != nil {
		return nil, err
	}
	_, err = io.Copy(f, from)
	err = errors.Join(err, f.Chmod(0o555), f.Close())
	if err == nil {
		f, err = os.Open(f.Name()) // one that is open for writing is not executed
	}
	cmd.Path = f.Name()
	return f, err
}

// filters returns 0: only Linux has them.
func filters(int) int { return 0 }
