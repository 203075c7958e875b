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
	"sync"
	"syscall"
	"time"
)

// process is a plugin's process: in a process group of its own, started by the host's thread, its output in the log.
type process struct {
	host *Host
	cmd  *exec.Cmd
	logs *logPump
	pid  int // 0 until the process was started

	handshake chan string   // has the first line of standard output, closed if there is none
	exited    chan struct{} // closed when the process ended; state is set before
	state     *os.ProcessState
	wg        sync.WaitGroup
}

// drainWithin is how long the output of a process that ended is read: a grandchild may hold it open.
const drainWithin = time.Second

func newProcess(host *Host, cmd *exec.Cmd, log *slog.Logger) *process {
	return &process{host: host, cmd: cmd, logs: newLogPump(log), handshake: make(chan string, 1), exited: make(chan struct{})}
}

// start starts the process.
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
	err = p.host.start(p.cmd)
	_, _ = outW.Close(), errW.Close()
	if err != nil {
		return errors.Join(err, outR.Close(), errR.Close())
	}
	p.pid = p.cmd.Process.Pid
	// These end with the process; wait waits for them.
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
		p.signalGroup(syscall.SIGKILL) // what it left behind
		deadline := time.Now().Add(drainWithin)
		_, _ = outR.SetReadDeadline(deadline), errR.SetReadDeadline(deadline)
		close(p.exited)
	})
	return nil
}

// copyStdout hands the first line over, which is the handshake, and logs the others.
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

// wait returns when the process and everything that was started for it ended.
func (p *process) wait() { p.wg.Wait() }

// signalGroup sends a signal to the process and what it started, if anything of it is there.
func (p *process) signalGroup(sig syscall.Signal) {
	if p.pid != 0 {
		_ = syscall.Kill(-p.pid, sig)
	}
}

// end ends the process: by SIGTERM, and by SIGKILL if that takes longer than within.
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

// exitError says how the process ended.
func (p *process) exitError() error {
	how := "unknown"
	if p.state != nil {
		how = p.state.String()
	}
	if last := p.logs.last(); last != "" {
		return fmt.Errorf("%w: %s; its last words: %s", ErrExited, how, last)
	}
	return fmt.Errorf("%w: %s", ErrExited, how)
}
