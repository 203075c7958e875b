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

	"golang.org/x/sys/unix"
)

// Host is what the plugins of one bridge share: a directory for their sockets, and the thread that starts them.
type Host struct {
	dir    string
	lock   *os.File // of dir; held as long as the process lives
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
	// maxBase is the longest path, in bytes, of the directory in which a host's own is made. A socket's path may be 104
	// bytes long (108 on Linux); the names below it take up to 60.
	maxBase = 44
)

// NewHost makes the directory for sockets under base ("" means the system's directory for temporary files, or /tmp if that
// is too long), after it has removed those of hosts that are gone. [Host.Close] must be called at the end.
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
	sweep(base, log)
	dir, lock, err := makeDir(base)
	if err != nil {
		return nil, fmt.Errorf("directory for the sockets of plugins: %w", err)
	}
	h := &Host{dir: dir, lock: lock, limits: defaultLimits, requests: make(chan spawnRequest), closed: make(chan struct{})}
	// Owned by the host; Close ends it.
	h.thread.Go(h.spawnThread)
	return h, nil
}

// Close ends the thread, and with it every plugin that is still there, and removes the directory.
func (h *Host) Close() error {
	h.once.Do(func() { close(h.closed) })
	h.thread.Wait()
	return errors.Join(os.RemoveAll(h.dir), h.lock.Close())
}

// spawnThread starts processes from one thread that lives as long as the host: the signal that a plugin gets at its parent's
// death is sent at the death of the parent's thread (prctl(2), PR_SET_PDEATHSIG). The thread is never unlocked, so that the Go
// runtime does not reuse it.
func (h *Host) spawnThread() {
	runtime.LockOSThread()
	for {
		select {
		case r := <-h.requests:
			r.done <- r.cmd.Start()
		case <-h.closed:
			return
		}
	}
}

var errHostClosed = errors.New("the host is closed")

// start starts a process.
func (h *Host) start(cmd *exec.Cmd) error {
	setProcess(cmd)
	r := spawnRequest{cmd, make(chan error, 1)}
	select {
	case h.requests <- r:
		return <-r.done
	case <-h.closed:
		return errHostClosed
	}
}

// makeDir makes a directory and locks it. Another host's sweep may take the directory for abandoned before it is locked, so there
// are several attempts.
func makeDir(base string) (dir string, lock *os.File, err error) {
	for range 5 {
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
	// Between its opening and its locking another host's sweep may have locked
	// and removed the file: then the lock is on a file that nobody else sees.
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

// sweep removes the directories of hosts that are gone: nobody holds their lock.
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
			continue // not ours or about to be, in use, or of another user
		}
		if err := os.RemoveAll(dir); err != nil {
			log.Warn("the socket directory of a bridge that is gone cannot be removed", "dir", dir, "err", err)
		} else {
			log.Debug("removed the socket directory of a bridge that is gone", "dir", dir)
		}
		_ = f.Close()
	}
}
