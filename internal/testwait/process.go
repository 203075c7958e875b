//go:build unix

package testwait

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

// Running reports whether a process with this id is running; a zombie is not.
func Running(pid int) bool {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return runtime.GOOS != "linux" && syscall.Kill(pid, 0) == nil
	}
	_, state, _ := strings.Cut(string(stat), ") ")
	return !strings.HasPrefix(state, "Z") && !strings.HasPrefix(state, "X")
}

// Gone waits until none of the processes is running. An id of 0, which is no
// process's, fails the test.
func Gone(t testing.TB, deadline time.Duration, pids ...int) {
	t.Helper()
	if len(pids) == 0 || slices.Min(pids) <= 0 {
		t.Fatalf("process ids %v", pids)
	}
	Eventually(t, deadline, "the end of processes", func() (string, bool) {
		return fmt.Sprint(pids), !slices.ContainsFunc(pids, Running)
	})
}
