//go:build unix

package testenv

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/prometheus/procfs"

	"github.com/isthmus-mesh/isthmus/internal/testwait"
)

// stopGrace bounds a graceful exit; then the process is killed.
const stopGrace = 15 * time.Second

// Process is one server with its output in a file. It may be restarted after it
// has ended.
type Process struct {
	t       testing.TB
	name    string
	logPath string
	Dir     string // its working directory, which exists as long as the process
	Data    string // the folder of what a server keeps
	Stdin   io.Reader

	launch func(testing.TB)      // see NewServer
	ready  func() (string, bool) // see NewServer
	run    atomic.Pointer[run]   // nil before the first start
}

// run is one execution of a process.
type run struct {
	cmd    *exec.Cmd
	exited chan struct{} // closed once err is set
	err    error
	ended  atomic.Bool // the test ended it deliberately
	from   int         // length of earlier output
}

// NewProcess prepares a process owned by the test. The test's end kills it, and
// logs the end of its output if the test failed. name identifies it within the
// test.
func NewProcess(t testing.TB, name string) *Process {
	t.Helper()
	p := &Process{t: t, name: name, logPath: UniquePath(t, name), Dir: t.TempDir()}
	t.Cleanup(func() {
		p.Kill()
		// Reported here, as a kill loses the exit status of a race.
		if strings.Contains(p.Output(), "WARNING: DATA RACE") {
			t.Errorf("%s: the race detector found a race", p.name)
		}
		if t.Failed() {
			t.Logf("---- %s (whole output: %s, kept with -artifacts)\n%s", p.name, p.logPath, p.tail(100))
		}
	})
	return p
}

// NewServer prepares a process that launch starts by [Process.Start], always on
// the same ports, and that serves once ready returns true.
func NewServer(t testing.TB, name string, launch func(testing.TB), ready func() (seen string, ok bool)) *Process {
	t.Helper()
	p := NewProcess(t, name)
	p.Data, p.launch, p.ready = t.TempDir(), launch, ready
	return p
}

// UniquePath returns the path of a new log in the artifact directory of a test.
func UniquePath(t testing.TB, name string) string {
	t.Helper()
	f, err := os.CreateTemp(t.ArtifactDir(), name+"-*.log")
	if err != nil {
		t.Fatalf("%s: create a file for its output: %v", name, err)
	}
	defer f.Close()
	return f.Name()
}

// Start runs binary. The file keeps the output of earlier runs. A nil env is
// the test's environment.
func (p *Process) Start(t testing.TB, env []string, binary string, args ...string) {
	t.Helper()
	out, err := os.OpenFile(p.logPath, os.O_APPEND|os.O_WRONLY, 0)
	if err != nil {
		t.Fatalf("%s: open the file for its output: %v", p.name, err)
	}
	defer out.Close() // the child has its own descriptor
	from := len(p.Output())
	fmt.Fprintf(out, "==== %s %s\n", binary, strings.Join(args, " "))
	cmd := exec.Command(binary, args...)
	cmd.Env = env
	cmd.Dir = p.Dir
	cmd.Stdin, cmd.Stdout, cmd.Stderr = p.Stdin, out, out
	OwnGroup(cmd)
	if err := StartCommand(cmd); err != nil {
		t.Fatalf("%s: start: %v", p.name, err)
	}
	r := &run{cmd: cmd, exited: make(chan struct{}), from: from}
	p.run.Store(r)
	// Owned by the process; ends with the child, which the test's cleanup kills
	// and waits for.
	go func() {
		r.err = cmd.Wait()
		close(r.exited)
	}()
}

// Exited returns a channel that is closed when the current run has ended.
func (p *Process) Exited() <-chan struct{} { return p.run.Load().exited }

// PID returns the process ID of the current run.
func (p *Process) PID() int { return p.run.Load().cmd.Process.Pid }

// MayEnd says that the current run may end by itself.
func (p *Process) MayEnd() { p.run.Load().ended.Store(true) }

// CPU returns the processor time of the current run, without children, on
// Linux; elsewhere it returns 0.
func (p *Process) CPU() time.Duration {
	proc, err := procfs.NewProc(p.PID())
	if err != nil {
		return 0
	}
	stat, err := proc.Stat()
	if err != nil {
		return 0
	}
	return time.Duration(stat.CPUTime() * float64(time.Second))
}

// Signal sends sig to the process and its children.
func (p *Process) Signal(sig syscall.Signal) {
	r := p.run.Load()
	if r == nil {
		return
	}
	if sig == syscall.SIGKILL || sig == syscall.SIGTERM {
		r.ended.Store(true)
	}
	select {
	case <-r.exited: // another process may have its id by now
		return
	default:
	}
	if err := syscall.Kill(-r.cmd.Process.Pid, sig); err != nil && !errors.Is(err, syscall.ESRCH) {
		p.t.Errorf("%s: signal %v: %v", p.name, sig, err)
	}
	// A thread stops when it runs next, and until then it may answer.
	if sig == syscall.SIGSTOP {
		if _, ok := testwait.Poll(p.t, 30*time.Second, r.exited, func() (string, bool) { return "", stopped(r.cmd.Process.Pid) }); !ok {
			p.t.Logf("%s: was told to stop, and goes on or has ended", p.name)
		}
	}
}

// Pause stops the process and its children without ending them.
func (p *Process) Pause() { p.Signal(syscall.SIGSTOP) }

// Continue lets them go on.
func (p *Process) Continue() { p.Signal(syscall.SIGCONT) }

// stopped reports whether all threads of a process are stopped, or gone.
func stopped(pid int) bool {
	threads, _ := procfs.AllThreads(pid)
	for _, thread := range threads {
		if stat, err := thread.Stat(); err == nil && !strings.Contains("TtZX", stat.State) {
			return false
		}
	}
	return true
}

// Kill kills the process and waits for it. If the process had already ended,
// the test fails.
func (p *Process) Kill() {
	if r := p.run.Load(); r != nil {
		p.reportUnexpectedExit(r)
		p.Signal(syscall.SIGKILL)
		<-r.exited
	}
}

// KillAlone kills the process without its children, and waits for it.
func (p *Process) KillAlone() {
	r := p.run.Load()
	p.reportUnexpectedExit(r)
	r.ended.Store(true)
	if err := r.cmd.Process.Kill(); err != nil && !errors.Is(err, os.ErrProcessDone) {
		p.t.Errorf("%s: kill: %v", p.name, err)
	}
	<-r.exited
}

// Terminate asks the process to exit, waits for it, and returns how it ended.
// If it does not exit in time it is killed, and terminate returns an error.
func (p *Process) Terminate() error {
	r := p.run.Load()
	if r == nil {
		return nil
	}
	p.reportUnexpectedExit(r)
	p.Signal(syscall.SIGTERM)
	select {
	case <-r.exited:
		return r.err
	case <-time.After(stopGrace):
		p.Signal(syscall.SIGKILL)
		<-r.exited
		return fmt.Errorf("%s: still running %v after SIGTERM, killed", p.name, stopGrace)
	}
}

// Stop is Terminate for a program whose exit status does not matter, as that of
// Java, which is that of the signal.
func (p *Process) Stop() { _ = p.Terminate() }

func (p *Process) reportUnexpectedExit(r *run) {
	select {
	case <-r.exited:
		if !r.ended.Swap(true) {
			p.t.Errorf("%s ended by itself: %v", p.name, r.cmd.ProcessState)
		}
	default:
	}
}

// TryReady waits until check returns true. It returns an error with the end of
// the output if the process ends first, or is not ready in time.
func (p *Process) TryReady(t testing.TB, check func() (seen string, ok bool)) error {
	t.Helper()
	r := p.run.Load()
	seen, ok := testwait.Poll(t, Patience, r.exited, check)
	if ok {
		return nil
	}
	select {
	case <-r.exited:
		return fmt.Errorf("%s ended before it was ready: %v\n%s", p.name, r.cmd.ProcessState, p.tail(40))
	default:
		return fmt.Errorf("%s not ready after %v; saw: %s\n%s", p.name, Patience, seen, p.tail(40))
	}
}

// Await is TryReady, but an error ends the test.
func (p *Process) Await(t testing.TB, check func() (seen string, ok bool)) {
	t.Helper()
	if err := p.TryReady(t, check); err != nil {
		t.Fatal(err)
	}
}

// WaitReady waits until a server serves.
func (p *Process) WaitReady(t testing.TB) {
	t.Helper()
	p.Await(t, p.ready)
}

// Launch kills a server if it runs, and starts it on the same ports.
func (p *Process) Launch(t testing.TB) {
	t.Helper()
	p.Kill()
	p.launch(t)
}

// Restart is Launch, and waits until the server serves.
func (p *Process) Restart(t testing.TB) {
	t.Helper()
	p.Launch(t)
	p.WaitReady(t)
}

// RestartEmpty is Restart without what the server has kept, as after a
// replacement of its machine.
func (p *Process) RestartEmpty(t testing.TB) {
	t.Helper()
	p.Kill()
	if err := os.RemoveAll(p.Data); err != nil {
		t.Fatalf("%s: remove its data: %v", p.name, err)
	}
	p.Restart(t)
}

// Serve has a server choose its ports, and starts it as [Process.StartReady]
// does.
func (p *Process) Serve(t testing.TB, choosePorts func(testing.TB)) {
	t.Helper()
	p.StartReady(t, func() { choosePorts(t); p.launch(t) }, p.ready)
}

// StartReady starts the process by calling launch. It retries if a port was in
// use, or if the process timed out during its start.
func (p *Process) StartReady(t testing.TB, launch func(), check func() (seen string, ok bool)) {
	t.Helper()
	const attempts = 5
	for attempt := 1; ; attempt++ {
		launch()
		err := p.TryReady(t, check)
		if err == nil {
			p.keepClasses(t)
			return
		}
		// Nacos waits too briefly for its own database on a busy machine.
		slow := strings.Contains(p.Log(), "Login timeout exceeded")
		clash := slow || strings.Contains(p.Log(), "address already in use")
		if !clash || attempt == attempts {
			p.MayEnd() // reported here, not again at cleanup
			t.Fatal(err)
		}
		t.Logf("%s: another start, as the machine was too busy (%t), or a port was taken by another process", p.name, slow)
		p.Signal(syscall.SIGKILL)
		<-p.Exited()
	}
}

// Output returns what all runs have written.
func (p *Process) Output() string {
	b, err := os.ReadFile(p.logPath)
	if err != nil {
		p.t.Errorf("%s: read its output: %v", p.name, err)
	}
	return string(b)
}

// Log returns the output of the current run.
func (p *Process) Log() string {
	return p.Output()[p.run.Load().from:]
}

// tail returns the last n lines of the output.
func (p *Process) tail(n int) string {
	lines := strings.Split(strings.TrimRight(p.Output(), "\n"), "\n")
	if cut := len(lines) - n; cut > 0 {
		lines = append([]string{fmt.Sprintf("(%d lines before)", cut)}, lines[cut:]...)
	}
	return strings.Join(lines, "\n")
}

// WriteFile writes a file to the process's directory and returns its path.
func (p *Process) WriteFile(t testing.TB, name, content string) string {
	t.Helper()
	path := filepath.Join(p.Dir, name)
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
		t.Fatalf("%s: %v", p.name, err)
	}
	return path
}
