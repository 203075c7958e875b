package server

import (
	"context"
	"errors"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"

	"github.com/isthmus-mesh/isthmus/server/stream"
)

// streamOf is a stream of a sink that says nothing.
type streamOf struct {
	grpc.ServerStream
	ctx context.Context
}

func (s streamOf) Context() context.Context { return s.ctx }

// The streams of a listener that goes end one after the other, each with a
// reason; one whose sink went is not counted, and no new one is let in.
func TestStreamsLeaveOneByOne(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var l leaving
		var mu sync.Mutex
		var ends []time.Duration
		var began time.Time
		open := func(ctx context.Context, want error) {
			err := l.stream(nil, streamOf{ctx: ctx}, nil, func(_ any, ss grpc.ServerStream) error {
				<-ss.Context().Done()
				return ss.Context().Err()
			})
			mu.Lock()
			defer mu.Unlock()
			if !errors.Is(err, want) {
				t.Errorf("a stream ended with %v, want %v", err, want)
			}
			ends = append(ends, time.Since(began))
		}
		var all sync.WaitGroup
		gone, goes := context.WithCancel(t.Context())
		all.Go(func() { open(gone, context.Canceled) })
		for range 4 {
			all.Go(func() { open(t.Context(), stream.ErrListenerRemoved) })
		}
		synctest.Wait()
		goes()
		synctest.Wait()
		ends, began = nil, time.Now()
		l.begin(8 * time.Second)
		l.begin(0) // no effect
		open(t.Context(), stream.ErrListenerRemoved)
		all.Wait()
		if want := []time.Duration{0, 2 * time.Second, 4 * time.Second, 6 * time.Second, 8 * time.Second}; !slices.Equal(ends, want) {
			t.Errorf("streams ended after %v, want %v", ends, want)
		}
	})
}
