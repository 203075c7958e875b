package supervisor

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/isthmus-mesh/isthmus/plugin/wire"
)

// Host holds what the plugins of a bridge share: the directory of their
// sockets, and the thread that starts them.
type Host struct {
	dir    string
	lock   *os.File // of dir; held until the process ends
	limits limits

	requests chan spawnRequest
	closed   chan struct{}
	once     sync.Once
	thread   sync.WaitGroup
}

type spawnRequest struct {
	cmd  *exec.Cmd
	done chan error // capacity one
}

const (
	hostDirPrefix = "isthmus-"
	lockName      = "lock"
	// maxBase bounds the path of the base directory, in bytes. A socket's path
	// is limited to 104 bytes (108 on Linux); the names below the base need up
	// to 60.
	maxBase = 44
)

// NewHost creates the directory for sockets under base and removes those of
// hosts that have ended. An empty base means the system's directory for
// temporary files, or /tmp if that path is too long. The caller must call
// [Host.Close].
func NewHost(base string, log *slog.Logger) (*Host, error) {
	if base == "" {
		base = os.TempDir()
		if len(base) > maxBase {
			base = "/tmp"
		}
	}
	if len(base) > maxBase {
		return nil, fmt.Errorf("directory %s for the sockets of plugins: its path is %d bytes long, at most %d leave room for a socket's name; use a shorter one",
			base, len(base), maxBase)
	}
	if err := wire.NoCore(); err != nil { // configurations with secrets pass through
		log.Warn("the process may leave a core file", "err", err)
	}
	sweep(base, log)
	dir, lock, err := makeDir(base)
	if err != nil {
		return nil, fmt.Errorf("directory for the sockets of plugins: %w", err)
	}
	h := &Host{dir: dir, lock: lock, limits: defaultLimits, requests: make(chan spawnRequest), closed: make(chan struct{})}
	// Ended by Close.
	h.thread.Go(h.spawnThread)
	return h, nil
}

// Close removes the directory and ends the thread, and with it every remaining
// plugin.
func (h *Host) Close() error {
	h.once.Do(func() { close(h.closed) })
	h.thread.Wait()
	return errors.Join(os.RemoveAll(h.dir), h.lock.Close())
}

// spawnThread starts processes from one thread that lives as long as the host,
// because PR_SET_PDEATHSIG (prctl(2)) refers to the parent's thread. The thread
// is never unlocked, so that the Go runtime does not reuse it.
func (h *Host) spawnThread() {
	runtime.LockOSThread()
	privileges := noNewPrivileges()
	for {
		select {
		case r := <-h.requests:
			if privileges != nil {
				r.done <- fmt.Errorf("no new privileges: %w", privileges)
				continue
			}
			r.done <- r.cmd.Start()
		case <-h.closed:
			return
		}
	}
}

var errHostClosed = errors.New("the host is closed")

func (h *Host) start(cmd *exec.Cmd, user *syscall.Credential) error {
	setProcess(cmd, user)
	r := spawnRequest{cmd, make(chan error, 1)}
	select {
	case h.requests <- r:
		return <-r.done
	case <-h.closed:
		return errHostClosed
	}
}

// makeDir creates a directory and locks it. Another host's sweep may remove the
// directory before it is locked, so makeDir retries.
func makeDir(base string) (dir string, lock *os.File, err error) {
	for range 100 {
		if dir, err = os.MkdirTemp(base, hostDirPrefix); err != nil {
			return "", nil, err
		}
		if lock, err = lockDir(dir, os.O_CREATE); err == nil {
			return dir, lock, nil
		}
		_ = os.RemoveAll(dir)
	}
	return "", nil, err
}

func lockDir(dir string, flag int) (*os.File, error) {
	f, err := os.OpenFile(filepath.Join(dir, lockName), os.O_RDWR|flag, 0o600)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	// Another host's sweep may remove the file between open and lock; the lock
	// is then on an unlinked file.
	mine, err := f.Stat()
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	if there, err := os.Stat(f.Name()); err != nil || !os.SameFile(mine, there) {
		return nil, errors.Join(errSwept, err, f.Close())
	}
	return f, nil
}

var errSwept = errors.New("another bridge removed the directory while it was made")

// sweep removes the directories of hosts that have ended: their locks are free.
func sweep(base string, log *slog.Logger) {
	entries, err := os.ReadDir(base)
	if err != nil {
		return
	}
	for _, e := range entries {
		dir := filepath.Join(base, e.Name())
		if !e.IsDir() || !strings.HasPrefix(e.Name(), hostDirPrefix) {
			continue
		}
		f, err := lockDir(dir, 0)
		if err != nil {
			continue // not a host's, not locked yet, in use, or another user's
		}
		if err := os.RemoveAll(dir); err != nil {
			log.Warn("the socket directory of a bridge that is gone cannot be removed", "dir", dir, "err", err)
		} else {
			log.Debug("removed the socket directory of a bridge that is gone", "dir", dir)
		}
		_ = f.Close()
	}
}
