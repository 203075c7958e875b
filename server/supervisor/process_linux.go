package supervisor

import (
	"bufio"
	"errors"
	"fmt"
	"io"
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

// private makes a command execute a copy in memory, which is sealed. The
// process has it as descriptor 3, as the interpreter of a script opens it once
// more.
func private(cmd *exec.Cmd, _ string, from io.Reader) (*os.File, error) {
	fd, err := unix.MemfdCreate("plugin", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING|unix.MFD_EXEC)
	if errors.Is(err, unix.EINVAL) { // before Linux 6.3, where each is executable
		fd, err = unix.MemfdCreate("plugin", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	}
	if err != nil {
		return nil, fmt.Errorf("memfd_create: %w; if sysctl vm.memfd_noexec is 2, it has to be 1 at most", err)
	}
	f := os.NewFile(uintptr(fd), "memory")
	_, err = io.Copy(f, from)
	if err == nil {
		_, err = unix.FcntlInt(f.Fd(), unix.F_ADD_SEALS, unix.F_SEAL_SEAL|unix.F_SEAL_SHRINK|unix.F_SEAL_GROW|unix.F_SEAL_WRITE)
	}
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	cmd.Path, cmd.ExtraFiles = "/proc/self/fd/3", []*os.File{f}
	return f, nil
}

// filters returns how many filters of system calls a process has.
func filters(pid int) int {
	status, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	_, rest, _ := strings.Cut(string(status), "\nSeccomp_filters:")
	line, _, _ := strings.Cut(rest, "\n")
	n, _ := strconv.Atoi(strings.TrimSpace(line))
	return n
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
