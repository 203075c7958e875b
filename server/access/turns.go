package access

import (
	"cmp"
	"context"
	"errors"
	"net/netip"
	"slices"
	"sync"
	"time"
)

// ErrTurns is the error of a caller whose network waits for too much already.
var ErrTurns = errors.New("too much is under way for this address")

// Turns shares processor time fairly between networks, or other names of who
// causes the work: so many slots, and when one is free, the network that has
// had least time goes first. One that comes back after a while, or for the
// first time, counts as having had what the one had that was served last: it
// does not wait for what others have queued, nor does it catch up on what it
// left to them. Of networks that have had the same, the one that came last goes
// first, so that nobody queues before others by coming from many. Who asks
// without end waits for himself.
type Turns struct {
	each, waiting int // at most, of a network; 0 for any number

	mu sync.Mutex
	// guarded by mu
	slots, free int
	came        int           // callers so far
	now         time.Duration // what the network that was served last had had before
	of          map[string]*share
}

// share is what a network has had, and has.
type share struct {
	had   time.Duration
	going int // turns
	queue []waiter
}

type waiter struct {
	came int
	turn chan struct{} // closed when it begins
}

// NewTurns returns turns with so many slots, of which a network may have so
// many, and for which so many of its callers may wait; 0 is any number.
func NewTurns(slots, each, waiting int) *Turns {
	return &Turns{each: each, waiting: waiting, slots: slots, free: slots, of: make(map[string]*share)}
}

// Pass is the turn of one caller.
type Pass struct {
	t     *Turns
	s     *share
	began time.Time
	freed bool          // the slot is free, or will be
	rest  time.Duration // of the network, after the turn
}

// FreeAfter ends the work, and frees the slot for others after a while. The
// network keeps its turn until [Pass.Leave].
func (p *Pass) FreeAfter(d time.Duration) {
	if p.freed {
		return
	}
	p.freed = true
	p.t.update(func() { p.s.had += time.Since(p.began) })
	free := func() { p.t.update(func() { p.t.free++ }) }
	if d > 0 {
		time.AfterFunc(d, free)
	} else {
		free()
	}
}

// RestAfter has the network wait for so long after its turn.
func (p *Pass) RestAfter(d time.Duration) { p.rest = d }

// Leave ends the turn.
func (p *Pass) Leave() {
	p.FreeAfter(0)
	end := func() { p.t.update(func() { p.s.going-- }) }
	if p.rest > 0 {
		time.AfterFunc(p.rest, end)
	} else {
		end()
	}
}

// Enter waits for a turn of a network, until ctx ends.
func (t *Turns) Enter(ctx context.Context, network string) (*Pass, error) {
	w := waiter{turn: make(chan struct{})}
	var s *share
	full := false
	t.update(func() {
		if s = t.of[network]; s == nil {
			s = &share{had: t.now}
			t.of[network] = s
		}
		if full = t.waiting > 0 && s.going+len(s.queue) > t.waiting; !full {
			t.came++
			w.came = t.came
			s.queue = append(s.queue, w)
		}
	})
	if full {
		return nil, ErrTurns
	}
	select {
	case <-w.turn:
	case <-ctx.Done():
		left := false
		t.update(func() {
			n := len(s.queue)
			s.queue = slices.DeleteFunc(s.queue, func(other waiter) bool { return other == w })
			left = len(s.queue) < n
		})
		if !left { // it began meanwhile
			(&Pass{t: t, s: s, began: time.Now()}).Leave()
		}
		return nil, ctx.Err()
	}
	return &Pass{t: t, s: s, began: time.Now()}, nil
}

// update changes the state, and begins the turns that there is room for then.
func (t *Turns) update(change func()) {
	t.mu.Lock()
	defer t.mu.Unlock()
	change()
	for t.free > 0 {
		var first *share
		for network, s := range t.of {
			switch idle := len(s.queue) == 0; {
			case idle && s.going == 0 && (s.had <= t.now || t.free == t.slots):
				t.now = max(t.now, s.had) // nobody has waited for it
				delete(t.of, network)
			case !idle && (t.each == 0 || s.going < t.each) && (first == nil || t.before(s, first)):
				first = s
			}
		}
		if first == nil {
			return
		}
		t.free--
		t.now = max(t.now, first.had)
		first.had = t.now
		first.going++
		close(first.queue[0].turn)
		first.queue = first.queue[1:]
	}
}

// before reports whether a network goes before another. Both wait.
func (t *Turns) before(a, b *share) bool {
	return cmp.Or(cmp.Compare(a.going, b.going), cmp.Compare(max(a.had, t.now), max(b.had, t.now)), cmp.Compare(b.queue[0].came, a.queue[0].came)) < 0
}

// Network returns what bounds of one client are for: its address, or the /64
// that an address of IPv6 is in, as who has one has all of it.
func Network(a netip.Addr) netip.Prefix {
	a = a.Unmap().WithZone("")
	bits := a.BitLen()
	if a.Is6() {
		bits = 64
	}
	p, _ := a.Prefix(bits) // the zero value on a unix socket
	return p
}
