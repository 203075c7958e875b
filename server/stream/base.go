package stream

import (
	"sync"
	"time"

	"github.com/isthmus-mesh/isthmus/server/view"
)

// Subscribed is the subscription type of a protocol. It embeds a
// [Subscription].
type Subscribed interface {
	Core() *Subscription
	Room() (size int, shared bool)
}

// Base is the part of a session that concerns all of its subscriptions alike.
type Base[S Subscribed] struct {
	Mu    sync.Mutex // guards the fields below, as Status runs concurrently
	View  *view.View
	Subs  []S // in the order of service
	Limit int // size of the largest response that the sink accepts, 0 for none
}

// SetView implements [Session].
func (b *Base[S]) SetView(v *view.View) {
	b.Mu.Lock()
	defer b.Mu.Unlock()
	b.View = v
	for _, sub := range b.Subs {
		sub.Core().SetView(v)
	}
}

// Retained implements [Session].
func (b *Base[S]) Retained() (bytes int) {
	b.Mu.Lock()
	defer b.Mu.Unlock()
	for _, sub := range b.Subs {
		bytes += sub.Core().Retained()
	}
	return bytes
}

// Room implements [Session].
func (b *Base[S]) Room() (size int, shared bool) {
	b.Mu.Lock()
	defer b.Mu.Unlock()
	own := false
	for _, sub := range b.Subs {
		if !sub.Core().Paused {
			n, pages := sub.Room()
			size, own = max(size, n), own || n > 0 && !pages
		}
	}
	return size, !own
}

// Troubled implements [Session].
func (b *Base[S]) Troubled() (from time.Time) {
	for _, sub := range b.Subs {
		from = Earlier(from, sub.Core().Troubled(b.Limit))
	}
	return from
}
