//go:build unix

package testenv

import (
	"fmt"
	"os"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"
)

// Patience is how long a test waits for something that takes a second on an idle machine. It bounds a hang; it is no
// statement about performance.
const Patience = 90 * time.Second

const pollInterval = 25 * time.Millisecond

// Eventually calls check until it reports true, at once and then a few dozen times a second. If it has not by the
// deadline, the test ends with what was waited for and what check saw last.
func Eventually(t testing.TB, deadline time.Duration, what string, check func() (seen string, ok bool)) {
	t.Helper()
	if seen, ok := poll(t, deadline, nil, check); !ok {
		t.Fatalf("waited %v for %s; saw instead: %s", deadline, what, seen)
	}
}

// poll is Eventually without the verdict. It also gives up when stop is closed.
func poll(t testing.TB, deadline time.Duration, stop <-chan struct{}, check func() (seen string, ok bool)) (seen string, ok bool) {
	t.Helper()
	expired := time.NewTimer(deadline)
	defer expired.Stop()
	tick := time.NewTicker(pollInterval)
	defer tick.Stop()
	for {
		if seen, ok = check(); ok {
			return seen, true
		}
		select {
		case <-tick.C:
		case <-stop:
			return seen, false
		case <-t.Context().Done():
			return seen, false
		case <-expired.C:
			return seen, false
		}
	}
}

// Running reports whether there is a process of that id which is more than an entry in its parent's table.
func Running(pid int) bool {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return runtime.GOOS != "linux" && syscall.Kill(pid, 0) == nil
	}
	_, state, _ := strings.Cut(string(stat), ") ")
	return !strings.HasPrefix(state, "Z") && !strings.HasPrefix(state, "X")
}

// WaitGone waits until none of the processes runs.
func WaitGone(t testing.TB, pids ...int) {
	t.Helper()
	Eventually(t, Patience, "the end of processes", func() (string, bool) {
		return fmt.Sprint(pids), !slices.ContainsFunc(pids, Running)
	})
}
