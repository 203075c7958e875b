package exec

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	osexec "os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"time"
)

const (
	// maxLine bounds a line of standard output, in bytes. The rest of a longer
	// one is dropped.
	maxLine = 64 << 20
	// maxLogged bounds a line of standard error in the log, in bytes.
	maxLogged = 4 << 10
	// maxWords bounds the last line that is shown with a failure, in bytes.
	maxWords = 300
	// endWithin is how long the program may take to end after SIGTERM. The
	// adapter itself has five seconds.
	endWithin = 2 * time.Second
	// drainWithin bounds the reading of output after the program ended: what it
	// started may hold the pipe open.
	drainWithin = time.Second
)

var errLineTooLong = fmt.Errorf("it is longer than %d MiB", maxLine>>20)

// errSilent is the cause of the end of a program that printed nothing for too
// long.
var errSilent = errors.New("it is silent")

// program is a program that is run, once or again.
type program struct {
	command []string
	env     []string
	dir     string
	silence time.Duration // 0: not bounded
	log     *slog.Logger
}

// run starts the program and passes each line of its standard output to take,
// without its end; err is errLineTooLong for the beginning of one that is cut
// off. It ends the program's process group when ctx ends, and returns after the
// program and all goroutines ended: nil if the exit code was 0.
func (p *program) run(ctx context.Context, started func(pid int), take func(line []byte, err error)) error {
	path, err := lookUp(p.command[0], p.env, p.dir)
	if err != nil {
		return err
	}
	cmd := osexec.Command(path, p.command[1:]...) //nolint:noctx // its process group is ended below
	cmd.Args[0] = p.command[0]
	cmd.Env, cmd.Dir = p.env, p.dir
	setProcess(cmd)
	stdout, stdoutW, err := os.Pipe()
	if err != nil {
		return err
	}
	defer stdout.Close()
	stderr, stderrW, err := os.Pipe()
	if err != nil {
		return errors.Join(err, stdoutW.Close())
	}
	defer stderr.Close()
	// The program's end of standard input ends with the adapter, however that
	// ends, so that a program can notice it.
	stdinR, stdin, err := os.Pipe()
	if err != nil {
		return errors.Join(err, stdoutW.Close(), stderrW.Close())
	}
	defer stdin.Close()
	cmd.Stdin, cmd.Stdout, cmd.Stderr = stdinR, stdoutW, stderrW

	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var wg sync.WaitGroup
	begun := make(chan error)
	exited := make(chan error, 1)
	// Ends with the program. On Linux the program ends with the thread that
	// started it, so the thread stays until then.
	wg.Go(func() {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := cmd.Start()
		_, _, _ = stdinR.Close(), stdoutW.Close(), stderrW.Close()
		begun <- err
		if err != nil {
			return
		}
		err = cmd.Wait()
		_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) // what it started
		deadline := time.Now().Add(drainWithin)
		_, _ = stdout.SetReadDeadline(deadline), stderr.SetReadDeadline(deadline)
		exited <- err
	})
	if err := <-begun; err != nil {
		wg.Wait()
		return err
	}
	started(cmd.Process.Pid)

	words := ""
	// Both end with the program's output. What was started in the program's
	// name and lives on is cut off by the deadlines above.
	wg.Go(func() { words = p.logLines(stderr) })
	read := make(chan struct{})
	wg.Go(func() {
		defer close(read)
		p.readLines(stdout, take, func() { cancel(errSilent) })
	})
	select {
	case <-ctx.Done():
	case <-read: // its output ended, so it is of no more use
	case err := <-exited:
		exited <- err
	}
	err = p.end(cmd.Process.Pid, exited, ctx.Err() == nil)
	wg.Wait()
	if cause := context.Cause(ctx); errors.Is(cause, errSilent) {
		err = fmt.Errorf("it printed nothing for %v (silence) and was ended", p.silence)
	}
	if err != nil && words != "" {
		return fmt.Errorf("%w; its last words: %s", err, words)
	}
	return err
}

// end ends the program's process group, with SIGTERM and then SIGKILL, and
// returns how the program ended. A program that is about to end by itself gets
// the time to do so first.
func (p *program) end(pid int, exited <-chan error, byItself bool) error {
	type step struct {
		signal syscall.Signal
		within time.Duration
	}
	steps := []step{{syscall.SIGTERM, endWithin}, {syscall.SIGKILL, endWithin}}
	if byItself {
		steps = append([]step{{0, endWithin / 4}}, steps...)
	}
	timer := time.NewTimer(0)
	defer timer.Stop()
	for _, s := range steps {
		select {
		case err := <-exited:
			return err
		default:
		}
		if s.signal == syscall.SIGKILL {
			p.log.Warn("the program does not end; it is killed", slog.Duration("within", endWithin))
		}
		_ = syscall.Kill(-pid, s.signal)
		timer.Reset(s.within)
		select {
		case err := <-exited:
			return err
		case <-timer.C:
		}
	}
	return <-exited
}

// readLines passes on the lines of r, and calls silent if there was none for
// too long.
func (p *program) readLines(r io.Reader, take func(line []byte, err error), silent func()) {
	if p.silence > 0 {
		timer := time.AfterFunc(p.silence, silent)
		defer timer.Stop()
		each := take
		take = func(line []byte, err error) {
			timer.Reset(p.silence)
			each(line, err)
		}
	}
	eachLine(r, maxLine, take)
}

// eachLine passes on the lines of r until its end or an error. What is behind
// the last line end is a line too.
func eachLine(r io.Reader, most int, take func(line []byte, err error)) {
	b := bufio.NewReaderSize(r, 64<<10)
	var long []byte // a line that does not fit into b
	var tooLong error
	for {
		part, err := b.ReadSlice('\n')
		ended := err == nil
		if ended {
			part = part[:len(part)-1]
		}
		if keep := most - len(long); len(part) > keep {
			part, tooLong = part[:keep], errLineTooLong
		}
		if errors.Is(err, bufio.ErrBufferFull) {
			long = append(long, part...)
			continue
		}
		line := part
		if long != nil {
			line = append(long, part...)
		}
		if len(line) > 0 || ended {
			take(bytes.TrimSuffix(line, []byte("\r")), tooLong)
		}
		if !ended {
			return
		}
		long, tooLong = nil, nil
	}
}

// logLines logs the lines of standard error, and returns the last one.
func (p *program) logLines(r io.Reader) (last string) {
	eachLine(r, maxLogged, func(line []byte, _ error) {
		text := strings.TrimSpace(strings.ToValidUTF8(string(line), "\uFFFD"))
		if text == "" {
			return
		}
		last = text[:min(len(text), maxWords)]
		p.log.Info("the program writes", slog.String("line", text))
	})
	return strings.ToValidUTF8(last, "")
}

// lookUp returns the path of the program.
func lookUp(name string, env []string, dir string) (string, error) {
	if strings.ContainsRune(name, '/') {
		return name, nil // relative to dir
	}
	path := usualPath
	for _, v := range env {
		if value, ok := strings.CutPrefix(v, "PATH="); ok {
			path = value
		}
	}
	for _, d := range filepath.SplitList(path) {
		if d == "" {
			d = "."
		}
		if !filepath.IsAbs(d) {
			d = filepath.Join(dir, d)
		}
		file := filepath.Join(d, name)
		if info, err := os.Stat(file); err == nil && !info.IsDir() && info.Mode()&0o111 != 0 {
			return filepath.Abs(file)
		}
	}
	return "", fmt.Errorf("there is no program %q in %s; write its path, or set PATH in env", name, path)
}
