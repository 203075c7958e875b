package supervisor

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"regexp"
	"strconv"
	"sync"
	"syscall"
	"time"
)

// process is a plugin's process, in a process group for it alone. The host's
// thread starts it; its output is logged.
type process struct {
	host *Host
	cmd  *exec.Cmd
	logs *logPump
	pid  int // 0 until the process started

	memory int                 // Spec.Memory
	files  int                 // Spec.OpenFiles
	user   *syscall.Credential // nil: the bridge's own

	handshake chan string   // receives the first line of standard output; closed if there is none
	exited    chan struct{} // closed after the process ended; state is set before
	state     *os.ProcessState
	wg        sync.WaitGroup
}

// drainWithin bounds the reading of output after the process ended: a
// grandchild may hold the pipe open.
const drainWithin = time.Second

func newProcess(host *Host, cmd *exec.Cmd, log *slog.Logger) *process {
	return &process{host: host, cmd: cmd, logs: newLogPump(log), handshake: make(chan string, 1), exited: make(chan struct{})}
}

func (p *process) start() error {
	outR, outW, err := os.Pipe()
	if err != nil {
		return err
	}
	errR, errW, err := os.Pipe()
	if err != nil {
		return errors.Join(err, outR.Close(), outW.Close())
	}
	p.cmd.Stdin, p.cmd.Stdout, p.cmd.Stderr = nil, outW, errW
	err = p.host.start(p.cmd, p.user)
	_, _ = outW.Close(), errW.Close()
	if err != nil {
		return errors.Join(err, outR.Close(), errR.Close())
	}
	p.pid = p.cmd.Process.Pid
	if err := limit(p.pid, p.memory, p.files); err != nil {
		p.logs.log.Warn("the memory or the open files of the plugin's process cannot be bounded", "err", err)
	}
	// These goroutines end with the process; wait waits for them.
	p.wg.Go(func() {
		defer outR.Close()
		p.copyStdout(outR)
	})
	p.wg.Go(func() {
		defer errR.Close()
		p.logs.copy(errR, "stderr")
	})
	p.wg.Go(func() {
		_ = p.cmd.Wait()
		p.state = p.cmd.ProcessState
		p.signalGroup(syscall.SIGKILL) // remaining children
		deadline := time.Now().Add(drainWithin)
		_, _ = outR.SetReadDeadline(deadline), errR.SetReadDeadline(deadline)
		close(p.exited)
	})
	return nil
}

// copyStdout passes on the first line, the handshake, and logs the others.
func (p *process) copyStdout(r io.Reader) {
	defer close(p.handshake)
	br := bufio.NewReaderSize(r, maxLine)
	line, err := br.ReadSlice('\n')
	if err != nil && !errors.Is(err, bufio.ErrBufferFull) {
		p.logs.copy(bytes.NewReader(line), "stdout")
		return
	}
	p.handshake <- string(line)
	p.logs.copy(br, "stdout")
}

// wait returns after the process and all its goroutines ended.
func (p *process) wait() { p.wg.Wait() }

// signalGroup sends a signal to the process group, if any of it is left.
func (p *process) signalGroup(sig syscall.Signal) {
	if p.pid != 0 {
		_ = syscall.Kill(-p.pid, sig)
	}
}

// end sends SIGTERM, then SIGKILL if the process does not end within the given
// time.
func (p *process) end(within time.Duration) {
	if p.pid == 0 {
		return
	}
	select {
	case <-p.exited:
		return
	default:
	}
	_ = p.cmd.Process.Signal(syscall.SIGTERM)
	timer := time.NewTimer(within)
	defer timer.Stop()
	select {
	case <-p.exited:
		return
	case <-timer.C:
	}
	p.logs.log.Warn("the plugin does not end; it is killed", "within", within)
	p.signalGroup(syscall.SIGKILL)
	<-p.exited
}

// exitError describes how the process ended.
func (p *process) exitError() error {
	how := "unknown"
	if p.state != nil {
		how = p.state.String()
	}
	last := p.logs.last()
	if last != "" {
		how += "; its last words: " + last
	}
	if p.memory > 0 && outOfMemory.MatchString(last) {
		how += fmt.Sprintf("; limits.plugin_memory allows %d bytes: raise it, or select less in the registry's config", p.memory)
	}
	return fmt.Errorf("%w: %s", ErrExited, how)
}

// memoryEnv makes a plugin's Go runtime collect garbage at nine tenths of the
// memory limit, unless the operator set GOMEMLIMIT.
func memoryEnv(limit int) []string {
	if _, set := os.LookupEnv("GOMEMLIMIT"); set || limit == 0 {
		return nil
	}
	return []string{"GOMEMLIMIT=" + strconv.Itoa(limit/10*9)}
}

// outOfMemory matches the output of a process whose allocation failed: that of
// the Go runtime (malloc.go) and of others.
var outOfMemory = regexp.MustCompile(`(?i)out of memory|cannot allocate memory|failed to (create|allocate)|MemoryError`)
