package main

import (
	"context"
	"errors"
	"io"
	"os"
	"os/signal"
	"syscall"
)

// output is standard output or standard error. If its pipe or terminal is
// closed, the program shuts down as on SIGTERM, so that its plugins exit too.
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

// keepBrokenPipes makes writing to a closed pipe return an error instead of
// ending the program.
func keepBrokenPipes() {
	signal.Notify(make(chan os.Signal, 1), syscall.SIGPIPE) // never read; os/signal does not block
}

// endAtHangup returns a context that also ends on SIGHUP, for commands whose
// user may close the terminal. After nohup(1) it does not.
func endAtHangup(ctx context.Context) (context.Context, context.CancelFunc) {
	if signal.Ignored(syscall.SIGHUP) {
		return context.WithCancel(ctx)
	}
	return signal.NotifyContext(ctx, syscall.SIGHUP)
}
