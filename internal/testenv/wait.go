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

	"github.com/isthmus-mesh/isthmus/internal/testwait"
)

// Patience bounds waits for what takes a second on an idle machine. It detects
// a hang and states nothing about performance.
const Patience = 90 * time.Second

// Eventually is [testwait.Eventually].
func Eventually(t testing.TB, deadline time.Duration, what string, check func() (seen string, ok bool)) {
	t.Helper()
	testwait.Eventually(t, deadline, what, check)
}

// Running reports whether a process with this id is running; a zombie is not.
func Running(pid int) bool {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return runtime.GOOS != "linux" && syscall.Kill(pid, 0) == nil
	}
	_, state, _ := strings.Cut(string(stat), ") ")
	return !strings.HasPrefix(state, "Z") && !strings.HasPrefix(state, "X")
}

// WaitGone waits until none of the processes is running.
func WaitGone(t testing.TB, pids ...int) {
	t.Helper()
	Eventually(t, Patience, "the end of processes", func() (string, bool) {
		return fmt.Sprint(pids), !slices.ContainsFunc(pids, Running)
	})
}
