package access

import (
	"cmp"
	"container/heap"
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
// the fewest turns goes first, and of those the one that has had least time.
// One that comes back after a while, or for the first time, counts as having
// had what the one had that was served last: it does not wait for what others
// have queued, nor does it catch up on what it left to them. Of networks that
// have had the same, the one that came last goes first, so that nobody queues
// before others by coming from many. One whose caller gives up counts as having
// had a moment, so that nobody goes first by giving up and coming back. Who
// asks without end waits for himself.
//
// A turn costs the logarithm of the number of networks. Those that wait are in
// lines by the turns that they have:
//
//	turns  due: had at most now   later: had more than now
//	0      newest first           least first, then newest
//	1      ...                    ...
//
// When now grows, the first of a later line may become due; it changes lines
// when its level is looked at. A network that neither has a turn nor waits is
// idle, and is remembered until now reaches what it has had, or nobody waits.
type Turns struct {
	each, waiting int // at most, of a network; 0 for any number

	mu sync.Mutex
	// guarded by mu
	slots, free int
	came        int           // callers so far
	now         time.Duration // what the network that was served last had had before
	of          map[string]*share
	levels      []*level // of those that wait, by the turns that they have
	idle        line     // least had first
}

// level is the networks that wait and have as many turns.
type level struct{ due, later line }

// share is what a network has had, and has.
type share struct {
	network string
	had     time.Duration
	going   int // turns
	queue   []waiter

	line *line // nil if the network is in none
	at   int   // in line
}

type waiter struct {
	came int
	turn chan struct{} // closed when it begins
}

// line is a heap of networks.
type line struct {
	all    []*share
	before func(a, b *share) bool
}

// Len implements [heap.Interface], as do the other methods.
func (l *line) Len() int           { return len(l.all) }
func (l *line) Less(i, j int) bool { return l.before(l.all[i], l.all[j]) }

func (l *line) Swap(i, j int) {
	l.all[i], l.all[j] = l.all[j], l.all[i]
	l.all[i].at, l.all[j].at = i, j
}

func (l *line) Push(x any) {
	s := x.(*share)
	s.line, s.at = l, len(l.all)
	l.all = append(l.all, s)
}

func (l *line) Pop() any {
	last := len(l.all) - 1
	s := l.all[last]
	l.all[last], l.all = nil, l.all[:last]
	s.line = nil
	return s
}

// first returns the network at the head of the line, nil if there is none.
func (l *line) first() *share {
	if len(l.all) == 0 {
		return nil
	}
	return l.all[0]
}

// newest and leastHad are the orders of lines.
func newest(a, b *share) bool   { return a.queue[0].came > b.queue[0].came }
func leastHad(a, b *share) bool { return a.had < b.had }

func leastThenNewest(a, b *share) bool { return a.had < b.had || a.had == b.had && newest(a, b) }

// NewTurns returns turns with so many slots, of which a network may have so
// many, and for which so many of its callers may wait; 0 is any number.
func NewTurns(slots, each, waiting int) *Turns {
	return &Turns{each: each, waiting: waiting, slots: slots, free: slots, of: make(map[string]*share), idle: line{before: leastHad}}
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
	p.t.update(p.s, func() { p.s.had += time.Since(p.began) })
	free := func() { p.t.update(nil, func() { p.t.free++ }) } // the network may be forgotten by then
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
	end := func() { p.t.update(p.s, func() { p.s.going-- }) }
	if p.rest > 0 {
		time.AfterFunc(p.rest, end)
	} else {
		end()
	}
}

// Enter waits for a turn of a network, until ctx ends.
func (t *Turns) Enter(ctx context.Context, network string) (*Pass, error) {
	s, w := t.enqueue(network)
	if s == nil {
		return nil, ErrTurns
	}
	select {
	case <-w.turn:
	case <-ctx.Done():
		left := false
		t.update(s, func() {
			var i int
			if i, left = slices.BinarySearchFunc(s.queue, w.came, func(other waiter, came int) int { return cmp.Compare(other.came, came) }); left {
				s.queue = slices.Delete(s.queue, i, i+1)
				s.had = max(s.had, t.now) + 1
			}
		})
		if !left { // it began meanwhile
			(&Pass{t: t, s: s, began: time.Now()}).Leave()
		}
		return nil, ctx.Err()
	}
	return &Pass{t: t, s: s, began: time.Now()}, nil
}

// enqueue adds a caller to the queue of a network. It returns nil if too many
// of the network wait.
func (t *Turns) enqueue(network string) (*share, waiter) {
	t.mu.Lock()
	defer t.mu.Unlock()
	s := t.of[network]
	if s == nil {
		s = &share{network: network, had: t.now}
	}
	if t.waiting > 0 && s.going+len(s.queue) > t.waiting {
		return nil, waiter{}
	}
	t.of[network] = s
	t.came++
	w := waiter{t.came, make(chan struct{})}
	s.queue = append(s.queue, w)
	t.placeLocked(s)
	t.beginLocked()
	return s, w
}

// update changes what a network has, if it is one's, and begins the turns that
// there is room for then.
func (t *Turns) update(s *share, change func()) {
	t.mu.Lock()
	defer t.mu.Unlock()
	change()
	t.placeLocked(s)
	t.beginLocked()
}

// placeLocked puts a network that has changed into the line that it belongs to.
func (t *Turns) placeLocked(s *share) {
	if s == nil {
		return
	}
	if s.line != nil {
		heap.Remove(s.line, s.at) // which compares the others only
	}
	waits := len(s.queue) > 0
	switch {
	case !waits && s.going == 0:
		heap.Push(&t.idle, s)
	case waits && (t.each == 0 || s.going < t.each):
		for len(t.levels) <= s.going {
			t.levels = append(t.levels, &level{line{before: newest}, line{before: leastThenNewest}})
		}
		if l := t.levels[s.going]; s.had <= t.now {
			heap.Push(&l.due, s)
		} else {
			heap.Push(&l.later, s)
		}
	}
}

// firstLocked returns the network that is to be served next, nil if none waits
// that may have a turn.
func (t *Turns) firstLocked() *share {
	for _, l := range t.levels {
		for s := l.later.first(); s != nil && s.had <= t.now; s = l.later.first() {
			heap.Push(&l.due, heap.Pop(&l.later))
		}
		if s := cmp.Or(l.due.first(), l.later.first()); s != nil {
			return s
		}
	}
	return nil
}

// beginLocked begins the turns that there is room for.
func (t *Turns) beginLocked() {
	for t.free > 0 {
		s := t.firstLocked()
		quiet := s == nil && t.free == t.slots
		for i := t.idle.first(); i != nil && (i.had <= t.now || quiet || t.idle.Len() > maxSpared); i = t.idle.first() {
			t.now = max(t.now, i.had) // nobody waits for it, or too many are remembered
			heap.Pop(&t.idle)
			delete(t.of, i.network)
		}
		if s == nil {
			return
		}
		t.free--
		t.now = max(t.now, s.had)
		close(s.queue[0].turn)
		s.had, s.going, s.queue = t.now, s.going+1, s.queue[1:]
		t.placeLocked(s)
	}
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
