package supervisor

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/hashicorp/go-plugin/runner"
)

// process is a plugin's process. It implements go-plugin's runner.Runner, for what its own runner lacks: a parent thread that
// lives on, a process group, an end that does not wait for grandchildren, and log lines that are parsed with care.
type process struct {
	host *Host
	cmd  *exec.Cmd
	logs *logPump

	stdout io.ReadCloser // what go-plugin reads: the first line
	stderr io.ReadCloser // what go-plugin reads: nothing, until the end

	started func(pid int) // called when the process was started; may be nil

	pid    atomic.Int64 // 0 until the process was started
	killed atomic.Bool  // Kill came, maybe while the process was being started

	exited chan struct{} // closed when the process ended; state is set before
	state  *os.ProcessState
	wg     sync.WaitGroup
}

var _ runner.Runner = (*process)(nil)

// drainWithin is how long the output of a process that ended is read: a grandchild may hold it open.
const drainWithin = time.Second

func newProcess(host *Host, cmd *exec.Cmd, log *slog.Logger) *process {
	return &process{host: host, cmd: cmd, logs: newLogPump(log), exited: make(chan struct{})}
}

// Start implements runner.Runner.
func (p *process) Start(context.Context) error {
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
	p.pid.Store(int64(p.cmd.Process.Pid))
	if p.started != nil {
		p.started(p.cmd.Process.Pid)
	}
	if p.killed.Load() {
		p.signalGroup(syscall.SIGKILL)
	}

	firstLine, toGoPlugin := io.Pipe()
	nothing, atEnd := io.Pipe()
	p.stdout, p.stderr = firstLine, nothing
	// These end with the process; wait waits for them.
	p.wg.Go(func() {
		defer outR.Close()
		p.copyStdout(outR, toGoPlugin)
	})
	p.wg.Go(func() {
		defer errR.Close()
		p.logs.copy(errR, "stderr")
		_ = atEnd.Close()
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

// copyStdout passes the first line on, which is the handshake, and logs the others.
func (p *process) copyStdout(r io.Reader, w *io.PipeWriter) {
	br := bufio.NewReaderSize(r, maxLine)
	line, err := br.ReadSlice('\n')
	if len(line) > 0 {
		_, _ = w.Write(firstLine(line))
	}
	_ = w.Close()
	if err == nil || errors.Is(err, bufio.ErrBufferFull) {
		p.logs.copy(br, "stdout")
	}
}

// maxHandshake is the longest handshake, in bytes. It has a certificate in it.
const maxHandshake = 8 << 10

// firstLine returns what go-plugin is to see of the first line. It repeats one that is no handshake in its error, whatever the length.
func firstLine(line []byte) []byte {
	if len(line) <= maxHandshake && bytes.Count(line, []byte("|")) >= 3 {
		return line
	}
	return []byte(clip(strings.TrimRight(strings.ToValidUTF8(string(line), "\uFFFD"), "\r\n"), maxLast) + "\n")
}

// wait returns when the process and everything that was started for it ended.
func (p *process) wait() { p.wg.Wait() }

// Wait implements runner.AttachedRunner.
func (p *process) Wait(ctx context.Context) error {
	select {
	case <-p.exited:
		if p.state == nil || p.state.Success() {
			return nil
		}
		return errors.New(p.state.String())
	case <-ctx.Done():
		return ctx.Err()
	}
}

// Kill implements runner.AttachedRunner.
func (p *process) Kill(context.Context) error {
	p.killed.Store(true)
	p.signalGroup(syscall.SIGKILL)
	return nil
}

// signalGroup sends a signal to the process and what it started, if anything of it is there.
func (p *process) signalGroup(sig syscall.Signal) {
	if pid := int(p.pid.Load()); pid != 0 {
		_ = syscall.Kill(-pid, sig)
	}
}

// end ends the process: by SIGTERM, and by SIGKILL if that takes longer than within.
func (p *process) end(within time.Duration) {
	if p.pid.Load() == 0 {
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

// Stdout implements runner.Runner.
func (p *process) Stdout() io.ReadCloser { return p.stdout }

// Stderr implements runner.Runner.
func (p *process) Stderr() io.ReadCloser { return p.stderr }

// Name implements runner.Runner.
func (p *process) Name() string { return p.cmd.Path }

// ID implements runner.AttachedRunner.
func (p *process) ID() string {
	if p.pid.Load() == 0 {
		return ""
	}
	return strconv.FormatInt(p.pid.Load(), 10)
}

// Diagnose implements runner.Runner.
func (p *process) Diagnose(context.Context) string {
	return "the first line on its standard output must be go-plugin's handshake; is this an adapter, and built for this machine?"
}

// PluginToHost implements runner.AddrTranslator.
func (p *process) PluginToHost(network, addr string) (string, string, error) {
	return network, addr, nil
}

// HostToPlugin implements runner.AddrTranslator.
func (p *process) HostToPlugin(network, addr string) (string, string, error) {
	return network, addr, nil
}
