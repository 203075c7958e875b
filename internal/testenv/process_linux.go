package testenv

import (
	"os/exec"
	"runtime"
	"sync"
	"syscall"
)

// OwnGroup puts the process into a new process group, and has the kernel kill
// it if the test process ends without cleanup (a timeout, an interrupt).
func OwnGroup(cmd *exec.Cmd) {
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
}

var starter = sync.OnceValue(func() chan func() {
	calls := make(chan func())
	// Owned by the process and ended with it. Linux sends the parent-death
	// signal when the starting *thread* ends (prctl(2), PR_SET_PDEATHSIG), so
	// one permanent thread starts all processes.
	go startAll(calls)
	return calls
})

// startAll has a name of its own for the tests that look for goroutines.
func startAll(calls <-chan func()) {
	runtime.LockOSThread()
	for call := range calls {
		call()
	}
}

// StartCommand starts cmd from a thread that lives as long as the test process.
func StartCommand(cmd *exec.Cmd) error {
	done := make(chan error, 1)
	starter() <- func() { done <- cmd.Start() }
	return <-done
}
