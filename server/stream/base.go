package stream

import (
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/isthmus-mesh/isthmus/server/view"
)

// Protocol is what a protocol adds to the sessions of its streams. Its methods
// are called with [Base.Mu] held.
type Protocol interface {
	// Settle decides the profile when that is due. Otherwise it returns when it
	// is.
	Settle(now time.Time) (due time.Time)
	// Header encodes a response without its resources.
	Header(sub *Subscription, r view.Response) []byte
	// Large counts a response that is larger than [Base.Limit], and logs the
	// first one of the stream.
	Large(sub *Subscription, first bool)
}

// Base is the part of a session that all protocols share. It implements
// [Session], but for Take.
type Base struct {
	Protocol Protocol
	Name     string   // of the protocol, or of its variant
	Labels   []string // of metrics, besides the profile
	Metrics  *Metrics
	Entry    *Entry // nil in tests
	Wake     Waker
	Interval func(size int) time.Duration // between full responses

	Mu sync.Mutex // guards the fields below, as Status runs concurrently

	Log     *slog.Logger
	View    *view.View
	Subs    []*Subscription          // in the order of service
	Of      map[string]*Subscription // by name
	Profile *Profile                 // nil until first decided
	Limit   int                      // size of the largest response that the sink accepts, 0 for none
	warned  bool                     // about a response beyond the limit
}

// Subscribe adds a subscription, or begins the one of that name anew. The label
// is that of its metrics, from a bounded set.
func (b *Base) Subscribe(name, label string, profiled bool, o view.Options) *Subscription {
	sub := b.Of[name]
	if sub == nil {
		sub = &Subscription{Name: name}
		b.Of[name], b.Subs = sub, append(b.Subs, sub)
	}
	sub.Reopen(view.NewSubscription(b.View, o))
	sub.label, sub.Profiled = label, profiled
	b.count(sub)
	return sub
}

// count sets the labels of a subscription, as far as they are known.
func (b *Base) count(sub *Subscription) {
	if b.Profile != nil || !sub.Profiled {
		b.Metrics.Count(sub, sub.label, b.labels()...)
		sub.OnAck(b.Name, b.Metrics.Acked)
	}
}

func (b *Base) labels() []string {
	profile := "undecided"
	if b.Profile != nil {
		profile = b.Profile.Name
	}
	return append(slices.Clone(b.Labels), profile)
}

// Decide sets the profile, and reports whether it is another one.
func (b *Base) Decide(p *Profile) bool {
	if p == b.Profile {
		return false
	}
	if b.Profile != nil {
		b.Metrics.Sinks.WithLabelValues(b.labels()...).Dec()
	}
	b.Profile = p
	b.Metrics.Sinks.WithLabelValues(b.labels()...).Inc()
	for _, sub := range b.Subs {
		b.count(sub)
	}
	return true
}

// Next implements [Session].
func (b *Base) Next(now time.Time) (m *Message, wait time.Duration, err error) {
	b.Mu.Lock()
	defer b.Mu.Unlock()
	settled := b.Protocol.Settle(now)
	for _, sub := range b.Subs {
		if sub.Paused || sub.State() == view.Sent {
			continue
		}
		due := sub.Due(now)
		if sub.Profiled && !settled.IsZero() {
			due = settled
		}
		if !due.IsZero() {
			wait = sooner(wait, due.Sub(now))
			continue
		}
		if !sub.Retry.IsZero() {
			if now.Before(sub.Retry) {
				wait = sooner(wait, sub.Retry.Sub(now))
			} else {
				sub.Again()
			}
		}
		revision := uint64(b.View.Revision())
		r, ok, err := sub.Next()
		if errors.Is(err, view.ErrResume) {
			err = fmt.Errorf("collection %s: %w", sub.Name, err)
		}
		if err != nil {
			return nil, 0, err
		}
		if !ok {
			sub.Idle(revision)
			continue
		}
		m := sub.Respond(&r, b.Protocol.Header(sub, r), b.Interval, now, b.Log)
		if sub.Oversize(b.Limit) {
			b.Protocol.Large(sub, !b.warned)
			b.warned = true
		}
		return m, 0, nil
	}
	return nil, wait, nil
}

// sooner returns the shorter of two waits, of which 0 is none.
func sooner(a, b time.Duration) time.Duration {
	if a == 0 {
		return max(b, 1)
	}
	return min(a, max(b, 1))
}

// SetView implements [Session].
func (b *Base) SetView(v *view.View) {
	b.Mu.Lock()
	defer b.Mu.Unlock()
	b.View = v
	for _, sub := range b.Subs {
		sub.SetView(v)
	}
}

// Selective implements [Session].
func (b *Base) Selective() bool {
	b.Mu.Lock()
	defer b.Mu.Unlock()
	return len(b.Subs) > 0 && !slices.ContainsFunc(b.Subs, func(sub *Subscription) bool { return !sub.Narrowed() })
}

// Retained implements [Session].
func (b *Base) Retained() (bytes int) {
	b.Mu.Lock()
	defer b.Mu.Unlock()
	for _, sub := range b.Subs {
		bytes += sub.Retained()
	}
	return bytes
}

// Room implements [Session].
func (b *Base) Room() (size int, shared bool) {
	b.Mu.Lock()
	defer b.Mu.Unlock()
	own := false
	for _, sub := range b.Subs {
		if !sub.Paused {
			n, pages := sub.Room()
			size, own = max(size, n), own || n > 0 && !pages
		}
	}
	return size, !own
}

// Troubled implements [Session].
func (b *Base) Troubled() (from time.Time) {
	for _, sub := range b.Subs {
		from = Earlier(from, sub.Troubled(b.Limit))
	}
	return from
}

// Close implements [Session].
func (b *Base) Close(_ time.Time, err error) {
	b.Mu.Lock()
	defer b.Mu.Unlock()
	for _, sub := range b.Subs {
		sub.Close()
	}
	if b.Profile != nil {
		b.Metrics.Sinks.WithLabelValues(b.labels()...).Dec()
	}
	LogEnd(b.Log, err)
}

// Status implements [Session].
func (b *Base) Status(st *Status) {
	b.Mu.Lock()
	defer b.Mu.Unlock()
	st.Protocol, st.Shows = b.Name, b.View.Shows()
	if b.Profile != nil {
		st.Profile, st.Shape = b.Profile.Name, b.Profile.Form.Shape.String()
	}
	revision := uint64(b.View.Revision())
	st.Subscriptions = make([]SubscriptionStatus, len(b.Subs))
	for i, sub := range b.Subs {
		sent, acked := sub.Times()
		st.Subscriptions[i] = SubscriptionStatus{TypeURL: sub.Name, Status: sub.Status(), SentAt: sent, AckedAt: acked, Lag: sub.Lag(revision), Oversize: sub.Oversize(b.Limit)}
	}
}

// Waker implements [Session].
func (b *Base) Waker() Waker { return b.Wake }
