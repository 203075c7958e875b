package zookeeper

import (
	"context"
	"fmt"
	"testing"
	"testing/synctest"
	"time"
)

// TestBusyIsNotSilent shows that the time that a message takes to be applied is
// none in which the server was silent.
func TestBusyIsNotSilent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancelCause(t.Context())
		s := &session{timeout: time.Second, ping: time.Second / 3, ctx: ctx, cancel: cancel, in: make(chan message), out: make(chan []byte, maxInFlight+2)}
		const messages = 30
		// Ends with the last message, or with ctx.
		s.wg.Go(func() {
			for range messages {
				select {
				case s.in <- message{}:
				case <-ctx.Done():
					return
				}
			}
		})
		n := 0
		err := s.receive(ctx, func(message) (bool, error) {
			time.Sleep(3 * time.Second)
			n++
			return n == messages, nil
		})
		cancel(nil)
		s.wg.Wait()
		if err != nil {
			t.Errorf("after %d of %d messages, all of which were there in time: %v", n, messages, err)
		}
	})
}

// TestFirstListingWaits shows that the first listing waits for a node that an
// event has queued before the list that names it arrived.
func TestFirstListingWaits(t *testing.T) {
	c := DefaultConfig
	s := &session{out: make(chan []byte, maxInFlight+2)}
	tree, _ := listed(t, nil, "")
	r := newReading(newLayout(c), s, tree, true)
	instance := place{kind: kindInstance, name: "shop", id: "1"}
	r.refresh(instance, false)
	r.refresh(instance, true)
	if r.listed() {
		t.Fatal("the listing is complete, although an instance in it was not read")
	}
	r.send()
	if len(r.flight) != 1 {
		t.Fatalf("%d reads are sent, want 1", len(r.flight))
	}
	for xid := range r.flight {
		if err := r.take(message{xid: xid, code: codeNoNode}); err != nil {
			t.Fatal(err)
		}
	}
	if !r.listed() {
		t.Error("the listing is not complete, although everything is read")
	}
}

// TestNothingIsReadTwice shows that a node is read once, whoever asks for it.
func TestNothingIsReadTwice(t *testing.T) {
	r := newReading(newLayout(DefaultConfig), &session{out: make(chan []byte, maxInFlight+2)}, newTree(DefaultConfig, nil, nil), true)
	for i := range 5 {
		for _, first := range []bool{false, true, true} {
			r.add(read{opGetData, fmt.Sprint("/services/shop/", i)}, first)
		}
	}
	if len(r.queue) != 5 || r.first != 5 {
		t.Errorf("%d reads are queued, %d of which are waited for; want 5 and 5", len(r.queue), r.first)
	}
}
