package suite

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"sync"
	"syscall"
	"time"

	"google.golang.org/grpc"

	pluginv1 "github.com/isthmus-mesh/isthmus/plugin/proto/isthmus/plugin/v1"
	"github.com/isthmus-mesh/isthmus/plugin/wire"
)

// process is a plugin started without go-plugin's client, which would hide its
// output, connection and exit.
type process struct {
	cmd    *exec.Cmd
	dir    string
	stdout *os.File
	conn   *grpc.ClientConn
	api    pluginv1.AdapterServiceClient
	exited chan struct{}
	err    error // exit error; set before exited is closed

	output sync.WaitGroup
	mu     sync.Mutex
	extra  []byte // standard output after the handshake; guarded by mu
	stderr []byte // the beginning of standard error; guarded by mu
}

const (
	// startWithin bounds the time until the handshake.
	startWithin = 10 * time.Second
	// endWithin bounds the time until exit.
	endWithin = 10 * time.Second
	// maxOutput bounds the retained output, in bytes.
	maxOutput = 64 << 10
)

// launch starts the plugin with the environment that a host sets, given a
// directory for the socket, or with nil as if started by hand.
func launch(cfg Config, environ func(dir string) []string) (*process, *bufio.Reader, error) {
	dir, err := os.MkdirTemp("/tmp", "isthmus-test")
	if err != nil {
		return nil, nil, err
	}
	p := &process{dir: dir, exited: make(chan struct{})}
	p.cmd = exec.Command(cfg.Command[0], cfg.Command[1:]...) //nolint:gosec,noctx // the test's author names it; stop ends it
	p.cmd.Env = append(os.Environ(), cfg.Env...)
	if environ != nil {
		p.cmd.Env = append(p.cmd.Env, environ(dir)...)
	}
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	stdout, out, err := os.Pipe()
	if err != nil {
		return nil, nil, errors.Join(err, os.RemoveAll(dir))
	}
	stderr, errOut, err := os.Pipe()
	if err != nil {
		return nil, nil, errors.Join(err, os.RemoveAll(dir))
	}
	p.cmd.Stdout, p.cmd.Stderr = out, errOut
	err = p.cmd.Start()
	_, _ = out.Close(), errOut.Close()
	if err != nil {
		return nil, nil, errors.Join(fmt.Errorf("%w: %w", ErrNoProcess, err), os.RemoveAll(dir))
	}
	lines := bufio.NewReader(stdout)
	// Both end with the process; stop waits for them.
	p.output.Go(func() {
		defer stderr.Close()
		_, _ = io.Copy(writer(func(b []byte) {
			p.stderr = append(p.stderr, b[:min(len(b), maxOutput-min(maxOutput, len(p.stderr)))]...)
		}, &p.mu), stderr)
	})
	p.output.Go(func() {
		err := p.cmd.Wait()
		p.err = err
		close(p.exited)
	})
	p.output.Go(func() {
		<-p.exited
		deadline := time.Now().Add(time.Second)
		_, _ = stdout.SetReadDeadline(deadline), stderr.SetReadDeadline(deadline)
	})
	p.stdout = stdout
	return p, lines, nil
}

// writerFunc is an io.Writer.
type writerFunc func(b []byte) (int, error)

func (f writerFunc) Write(b []byte) (int, error) { return f(b) }

func writer(f func(b []byte), mu *sync.Mutex) io.Writer {
	return writerFunc(func(b []byte) (int, error) {
		mu.Lock()
		defer mu.Unlock()
		f(b)
		return len(b), nil
	})
}

// start starts the plugin and connects to it, as a host does.
func start(ctx context.Context, cfg Config) (*process, error) {
	cert, certPEM, err := wire.NewCertificate()
	if err != nil {
		return nil, err
	}
	p, lines, err := launch(cfg, func(dir string) []string {
		return append(wire.Environ(dir, certPEM), wire.LogLevelKey+"=debug")
	})
	if err != nil {
		return nil, err
	}
	late := time.AfterFunc(startWithin, func() { _ = p.stdout.SetReadDeadline(time.Now()) })
	cancelled := context.AfterFunc(ctx, func() { _ = p.stdout.SetReadDeadline(time.Now()) })
	line, err := lines.ReadString('\n')
	late.Stop()
	cancelled()
	// Ends with the process; stop waits for it.
	p.output.Go(func() {
		_, _ = io.Copy(writer(func(b []byte) { p.extra = append(p.extra, b[:min(len(b), maxOutput-min(maxOutput, len(p.extra)))]...) }, &p.mu), lines)
	})
	if err != nil {
		reason := fmt.Errorf("no handshake on standard output within %v: %w", startWithin, err)
		if errors.Is(err, io.EOF) {
			reason = errors.New("standard output ended without a handshake")
		}
		return nil, p.fail(fmt.Errorf("%w: %w", ErrNoHandshake, reason))
	}
	if err := p.connect(ctx, line, cert); err != nil {
		return nil, p.fail(fmt.Errorf("%w: %w", ErrNoHandshake, err))
	}
	return p, nil
}

// connect connects according to the handshake.
func (p *process) connect(ctx context.Context, line string, cert tls.Certificate) error {
	endpoint, err := wire.ParseHandshake(line)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, answerWithin)
	defer cancel()
	if p.conn, err = endpoint.Dial(ctx, cert); err != nil {
		return fmt.Errorf("connect: %w", err)
	}
	p.api = pluginv1.NewAdapterServiceClient(p.conn)
	return nil
}

// fail stops the process and adds the beginning of its standard error to an
// error, unless that is nil.
func (p *process) fail(err error) error {
	stopped := p.stop()
	if out := p.errors(); out != "" && err != nil {
		err = fmt.Errorf("%w; standard error: %s", err, out)
	}
	return errors.Join(err, stopped)
}

// hangUp closes the connection, as the exit of a host does.
func (p *process) hangUp() error {
	if p.conn == nil {
		return nil
	}
	err := p.conn.Close()
	p.conn = nil
	return err
}

// awaitEnd waits for the process to exit by itself.
func (p *process) awaitEnd(ctx context.Context, after string) error {
	timer := time.NewTimer(endWithin)
	defer timer.Stop()
	select {
	case <-p.exited:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-timer.C:
		return fmt.Errorf("the process still runs %v after %s", endWithin, after)
	}
}

// stop ends the process and releases all resources.
func (p *process) stop() error {
	err := p.hangUp()
	_ = syscall.Kill(-p.cmd.Process.Pid, syscall.SIGKILL)
	<-p.exited
	p.output.Wait()
	return errors.Join(err, os.RemoveAll(p.dir))
}

// stray returns the standard output after the handshake.
func (p *process) stray() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return string(p.extra)
}

// errors returns the beginning of standard error.
func (p *process) errors() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return string(bytes.TrimSpace(p.stderr[:min(len(p.stderr), 1000)]))
}
