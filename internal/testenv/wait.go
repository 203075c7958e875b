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

// Patience is how long a test waits for something that takes a second on an idle machine. It bounds a hang; it is no
// statement about performance.
const Patience = 90 * time.Second

// Eventually is [testwait.Eventually].
func Eventually(t testing.TB, deadline time.Duration, what string, check func() (seen string, ok bool)) {
	t.Helper()
	testwait.Eventually(t, deadline, what, check)
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
