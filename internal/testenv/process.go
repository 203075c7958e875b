//go:build unix

package testenv

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

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

	mu  sync.Mutex
	run *run // nil before the first start
}

// run is one execution of a process.
type run struct {
	cmd    *exec.Cmd
	exited chan struct{} // closed once err is set
	err    error
	ended  bool // the test ended it deliberately; guarded by process.mu
	from   int  // length of earlier output
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
	cmd.Stdout, cmd.Stderr = out, out
	OwnGroup(cmd)
	if err := StartCommand(cmd); err != nil {
		t.Fatalf("%s: start: %v", p.name, err)
	}
	r := &run{cmd: cmd, exited: make(chan struct{}), from: from}
	p.mu.Lock()
	p.run = r
	p.mu.Unlock()
	// Owned by the process; ends with the child, which the test's cleanup kills
	// and waits for.
	go func() {
		r.err = cmd.Wait()
		close(r.exited)
	}()
}

// Exited returns a channel that is closed when the current run has ended.
func (p *Process) Exited() <-chan struct{} {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.run.exited
}

// CPU returns the processor time of the current run, without children, on
// Linux; elsewhere it returns 0.
func (p *Process) CPU() time.Duration {
	p.mu.Lock()
	pid := p.run.cmd.Process.Pid
	p.mu.Unlock()
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0
	}
	// The name of the program is in parentheses; the times are the 12th and
	// 13th field after it, in hundredths of a second.
	fields := strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:]))
	user, _ := strconv.Atoi(fields[11])
	system, _ := strconv.Atoi(fields[12])
	return time.Duration(user+system) * 10 * time.Millisecond
}

// Signal sends sig to the process and its children.
func (p *Process) Signal(sig syscall.Signal) {
	p.mu.Lock()
	r := p.run
	if r != nil && (sig == syscall.SIGKILL || sig == syscall.SIGTERM) {
		r.ended = true
	}
	p.mu.Unlock()
	if r == nil {
		return
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
	threads, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", pid))
	for _, thread := range threads {
		stat, err := os.ReadFile(thread)
		if err != nil {
			continue
		}
		// PID (NAME) STATE ...; a name may have parentheses.
		if i := bytes.LastIndexByte(stat, ')'); i < 0 || i+2 >= len(stat) || !bytes.ContainsRune([]byte("TtZX"), rune(stat[i+2])) {
			return false
		}
	}
	return true
}

// Kill kills the process and waits for it. If the process had already ended,
// the test fails.
func (p *Process) Kill() {
	p.mu.Lock()
	r := p.run
	p.mu.Unlock()
	if r == nil {
		return
	}
	p.reportUnexpectedExit(r)
	p.Signal(syscall.SIGKILL)
	<-r.exited
}

// KillAlone kills the process without its children, and waits for it.
func (p *Process) KillAlone() {
	p.mu.Lock()
	r := p.run
	p.mu.Unlock()
	p.reportUnexpectedExit(r)
	p.mu.Lock()
	r.ended = true
	p.mu.Unlock()
	if err := r.cmd.Process.Kill(); err != nil && !errors.Is(err, os.ErrProcessDone) {
		p.t.Errorf("%s: kill: %v", p.name, err)
	}
	<-r.exited
}

// Terminate asks the process to exit, waits for it, and returns how it ended.
// If it does not exit in time it is killed, and terminate returns an error.
func (p *Process) Terminate() error {
	p.mu.Lock()
	r := p.run
	p.mu.Unlock()
	if r == nil {
		return nil
	}
	p.reportUnexpectedExit(r)
	p.Signal(syscall.SIGTERM)
	grace := time.NewTimer(stopGrace)
	defer grace.Stop()
	select {
	case <-r.exited:
		return r.err
	case <-grace.C:
		p.Signal(syscall.SIGKILL)
		<-r.exited
		return fmt.Errorf("%s: still running %v after SIGTERM, killed", p.name, stopGrace)
	}
}

func (p *Process) reportUnexpectedExit(r *run) {
	select {
	case <-r.exited:
	default:
		return
	}
	p.mu.Lock()
	expected := r.ended
	r.ended = true
	p.mu.Unlock()
	if !expected {
		p.t.Errorf("%s ended by itself: %v", p.name, exitText(r.err))
	}
}

func exitText(err error) string {
	if err == nil {
		return "exit status 0"
	}
	return err.Error()
}

// WaitReady waits until check returns true. It returns an error with the end of
// the output if the process ends first, or is not ready in time.
func (p *Process) WaitReady(t testing.TB, check func() (seen string, ok bool)) error {
	t.Helper()
	exited := p.Exited()
	seen, ok := testwait.Poll(t, Patience, exited, check)
	if ok {
		return nil
	}
	select {
	case <-exited:
		return fmt.Errorf("%s ended before it was ready: %s\n%s", p.name, exitText(p.run.err), p.tail(40))
	default:
		return fmt.Errorf("%s not ready after %v; saw: %s\n%s", p.name, Patience, seen, p.tail(40))
	}
}

// StartReady starts the process by calling launch. It retries if a port was in
// use, or if the process timed out during its start.
func (p *Process) StartReady(t testing.TB, launch func(), check func() (seen string, ok bool)) {
	t.Helper()
	const attempts = 5
	for attempt := 1; ; attempt++ {
		launch()
		err := p.WaitReady(t, check)
		if err == nil {
			p.keepClasses(t)
			return
		}
		// Nacos waits too briefly for its own database on a busy machine.
		slow := strings.Contains(p.Since(), "Login timeout exceeded")
		clash := slow || strings.Contains(p.Since(), "address already in use")
		if !clash || attempt == attempts {
			p.mu.Lock()
			p.run.ended = true // reported here, not again at cleanup
			p.mu.Unlock()
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

// Since returns the output of the current run.
func (p *Process) Since() string {
	p.mu.Lock()
	from := p.run.from
	p.mu.Unlock()
	return p.Output()[from:]
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

// MayEnd says that the current run may end by itself.
func (p *Process) MayEnd() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.run.ended = true
}

// PID returns the process ID of the current run.
func (p *Process) PID() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.run.cmd.Process.Pid
}
