package main

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"syscall"
)

// output is standard output or standard error. When nobody can read it any more, for its pipe or terminal is closed, the
// program ends, in good order as at SIGTERM: its plugins must end, too.
type output struct {
	to   io.Writer
	gone func()
}

// Write implements [io.Writer].
func (o output) Write(b []byte) (int, error) {
	n, err := o.to.Write(b)
	if errors.Is(err, syscall.EPIPE) || errors.Is(err, syscall.EIO) {
		o.gone()
	}
	return n, err
}

// keepBrokenPipes makes writing to a closed pipe an error and not the end of the program.
func keepBrokenPipes() {
	signal.Notify(make(chan os.Signal, 1), syscall.SIGPIPE) // nobody needs to read it; os/signal does not wait
}

// ignoreHangup makes SIGHUP a line in the log, until stop is called.
func ignoreHangup(log *slog.Logger) (stop func()) {
	hangup := make(chan os.Signal, 1)
	signal.Notify(hangup, syscall.SIGHUP)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	// Owned by the caller; ends with stop.
	go func() {
		defer close(done)
		for {
			select {
			case <-hangup:
				log.Warn("SIGHUP is ignored: the configuration cannot be reloaded; restart the bridge instead")
			case <-ctx.Done():
				return
			}
		}
	}()
	return func() {
		signal.Stop(hangup)
		cancel()
		<-done
	}
}

// endAtHangup returns a context that SIGHUP ends, too: of a command whose user may close the terminal. After nohup(1) it does not.
func endAtHangup(ctx context.Context) (context.Context, context.CancelFunc) {
	if signal.Ignored(syscall.SIGHUP) {
		return context.WithCancel(ctx)
	}
	return signal.NotifyContext(ctx, syscall.SIGHUP)
}
