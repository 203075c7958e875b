package server

import (
	"context"
	"sync"
	"time"

	"google.golang.org/grpc"

	"github.com/isthmus-mesh/isthmus/server/stream"
)

// leaving ends the streams of one listener, spread over a time, so that sinks
// do not come to other listeners all at once.
type leaving struct {
	mu    sync.Mutex
	begun bool
	open  map[*leavingStream]context.CancelFunc
}

// leavingStream is a stream whose context can be ended.
type leavingStream struct {
	grpc.ServerStream
	ctx context.Context //nolint:containedctx // grpc.ServerStream has a context
}

// Context implements [grpc.ServerStream].
func (s *leavingStream) Context() context.Context { return s.ctx }

// stream is a gRPC interceptor that makes a stream end when it is its turn.
func (l *leaving) stream(srv any, ss grpc.ServerStream, _ *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
	ctx, end := context.WithCancel(ss.Context())
	defer end()
	s := &leavingStream{ss, ctx}
	if !l.enter(s, end) {
		return stream.ErrListenerRemoved
	}
	err := handler(srv, s)
	l.mu.Lock()
	delete(l.open, s)
	l.mu.Unlock()
	if ctx.Err() != nil && ss.Context().Err() == nil {
		return stream.ErrListenerRemoved
	}
	return err
}

func (l *leaving) enter(s *leavingStream, end context.CancelFunc) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.begun {
		return false
	}
	if l.open == nil {
		l.open = make(map[*leavingStream]context.CancelFunc)
	}
	l.open[s] = end
	return true
}

// begin refuses new streams and ends the existing ones, the last after the
// given time. It does not wait.
func (l *leaving) begin(over time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.begun {
		return
	}
	l.begun = true
	step := over / time.Duration(max(1, len(l.open)))
	n := 0
	for _, end := range l.open {
		n++
		time.AfterFunc(step*time.Duration(n), end)
	}
}
