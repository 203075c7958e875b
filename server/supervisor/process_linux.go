package supervisor

import (
	"bufio"
	"errors"
	"fmt"
	"math"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// setProcess creates a process group, so that Ctrl-C in a terminal reaches only
// the bridge and a plugin's children can be killed with it, and ends the
// process with the thread that starts it. Nothing that the bridge was started
// with, or has open, is open in the process.
func setProcess(cmd *exec.Cmd, user *syscall.Credential) {
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL, Credential: user}
	_ = unix.CloseRange(3, math.MaxUint32, unix.CLOSE_RANGE_CLOEXEC) // Linux 5.11; Go's own files are set anyway
}

// noNewPrivileges keeps processes that the thread starts, and theirs, from
// getting rights by the mode or the capabilities of a file.
func noNewPrivileges() error { return unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) }

// limit bounds the private writable memory of a process, in bytes, and its open
// files; 0 is no bound. It leaves no core, which could hold secrets.
func limit(pid, memory, files int) (err error) {
	for _, l := range []struct{ resource, most int }{{unix.RLIMIT_DATA, memory}, {unix.RLIMIT_NOFILE, files}} {
		if l.most <= 0 {
			continue
		}
		var now unix.Rlimit
		if err := unix.Prlimit(pid, l.resource, nil, &now); err != nil {
			return err
		}
		most := min(uint64(l.most), now.Max) // only root may raise it
		err = errors.Join(err, unix.Prlimit(pid, l.resource, &unix.Rlimit{Cur: most, Max: most}, nil))
	}
	return errors.Join(err, unix.Prlimit(pid, unix.RLIMIT_CORE, &unix.Rlimit{}, nil))
}

// inForce returns what the kernel says of a process's rights, for display.
func inForce(pid int) (out []string) {
	f, err := os.Open(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return nil
	}
	defer f.Close()
	for lines := bufio.NewScanner(f); lines.Scan(); {
		name, value, _ := strings.Cut(lines.Text(), ":")
		fields := strings.Fields(value)
		switch {
		case len(fields) == 0:
		case name == "Uid":
			out = append(out, "user "+fields[0])
		case name == "NoNewPrivs" && fields[0] == "1":
			out = append(out, "no new privileges")
		}
	}
	f, err = os.Open(fmt.Sprintf("/proc/%d/limits", pid))
	if err != nil {
		return out
	}
	defer f.Close()
	for lines := bufio.NewScanner(f); lines.Scan(); {
		for _, l := range []struct {
			name, unit string
			format     func(int) string
		}{{"Max data size", "of memory", size}, {"Max open files", "open files", strconv.Itoa}} {
			if rest, ok := strings.CutPrefix(lines.Text(), l.name); ok && !strings.HasPrefix(strings.TrimSpace(rest), "unlimited") {
				value := strings.Fields(rest)[0]
				if n, err := strconv.Atoi(value); err == nil {
					value = l.format(n)
				}
				out = append(out, value+" "+l.unit)
			}
		}
	}
	return out
}

// size returns a number of bytes for people, exact if it is no whole MiB.
func size(n int) string {
	switch {
	case n > 0 && n%(1<<30) == 0:
		return fmt.Sprintf("%d GiB", n>>30)
	case n > 0 && n%(1<<20) == 0:
		return fmt.Sprintf("%d MiB", n>>20)
	}
	return fmt.Sprintf("%d bytes", n)
}
