package stream_test

import (
	"context"
	"errors"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/isthmus-mesh/isthmus/server/stream"
	"github.com/isthmus-mesh/isthmus/server/view"
)

// streamOf is a stream of a sink that says nothing.
type streamOf struct {
	grpc.ServerStream
	ctx context.Context
}

func (s streamOf) Context() context.Context { return s.ctx }

// quiet is a handler that waits for the end of its stream.
func quiet(_ any, ss grpc.ServerStream) error {
	<-ss.Context().Done()
	return ss.Context().Err()
}

// The streams of a listener that goes end one after the other, each with a
// reason; one whose sink went is not counted, and no new one is let in. Those
// of other listeners go on.
func TestListenerDrains(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, s := world(t)
		l, other := s.Listener("a"), s.Listener("b")
		var mu sync.Mutex
		var ends []time.Duration
		var began time.Time
		open := func(ctx context.Context, want error) {
			err := l.Stream(nil, streamOf{ctx: ctx}, nil, quiet)
			mu.Lock()
			defer mu.Unlock()
			if !errors.Is(err, want) {
				t.Errorf("a stream ended with %v, want %v", err, want)
			}
			ends = append(ends, time.Since(began))
		}
		var all, others sync.WaitGroup
		gone, goes := context.WithCancel(t.Context())
		all.Go(func() { open(gone, context.Canceled) })
		for range 4 {
			all.Go(func() { open(t.Context(), stream.ErrListenerRemoved) })
		}
		others.Go(func() {
			if err := other.Stream(nil, streamOf{ctx: t.Context()}, nil, quiet); !errors.Is(err, stream.ErrShutdown) {
				t.Errorf("a stream of another listener ended with %v", err)
			}
		})
		synctest.Wait()
		goes()
		synctest.Wait()
		ends, began = nil, time.Now()
		l.Drain(8 * time.Second)
		l.Drain(0) // no effect
		open(t.Context(), stream.ErrListenerRemoved)
		all.Wait()
		if want := []time.Duration{0, 2 * time.Second, 4 * time.Second, 6 * time.Second, 8 * time.Second}; !slices.Equal(ends, want) {
			t.Errorf("streams ended after %v, want %v", ends, want)
		}
		s.Drain(0)
		others.Wait()
	})
}

// admission lets everybody in.
type admission struct {
	who   string
	views func() ([]view.Filter, <-chan struct{})
}

func (a *admission) Identity() string                        { return a.who }
func (a *admission) Views() ([]view.Filter, <-chan struct{}) { return a.views() }

// A stream is found by its listener with what it was let in with, for as long
// as it is open. A sink learns why the bridge has ended it if that is a status,
// and otherwise what the handler says.
func TestRegister(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, s := world(t)
		l, other := s.Listener("a"), s.Listener("b")
		reason, odd := status.Error(codes.ResourceExhausted, "too much"), errors.New("odd")
		for _, tt := range []struct{ cause, want error }{{reason, reason}, {odd, context.Canceled}} {
			a, in := &admission{who: "me"}, make(chan *stream.Entry, 1)
			ended := make(chan error)
			go func() {
				ended <- l.Stream(nil, streamOf{ctx: t.Context()}, nil, func(srv any, ss grpc.ServerStream) error {
					e := stream.EntryOf(ss.Context())
					if who := e.Identity(); who != "" {
						t.Errorf("before it is let in it is %s", who)
					}
					e.SetAdmission(a)
					in <- e
					return quiet(srv, ss)
				})
			}()
			e := <-in
			if got := l.Admissions(); len(got) != 1 || got[0] != a || e.Identity() != "me" || len(other.Admissions()) != 0 {
				t.Errorf("the listener has %v, another %v; the sink is %q", got, other.Admissions(), e.Identity())
			}
			if s.Len() != 0 || len(s.Status()) != 0 {
				t.Error("a stream without a session has a status")
			}
			e.End(tt.cause)
			if err := <-ended; !errors.Is(err, tt.want) {
				t.Errorf("ended because of %v, the sink learns %v", tt.cause, err)
			}
			if got := l.Admissions(); len(got) != 0 {
				t.Errorf("%v are left", got)
			}
		}
		if e := stream.EntryOf(t.Context()); e != nil || e.Identity() != "" {
			t.Errorf("a context without a stream has %v", e)
		}
	})
}
