package changelog

import (
	"fmt"
	"iter"
	"slices"
	"sync"
)

// Revision counts the changes of one or several logs, from 1. Below 1<<62.
type Revision uint64

// Cursor is a reader's position. The zero Cursor is that of a reader that has
// read nothing.
type Cursor struct {
	// Revision is the revision up to which the reader has read everything.
	Revision Revision
	// Begun is the revision at which a reader from the zero Cursor began.
	// Earlier removals are not returned.
	Begun Revision
	// Lost reports that removals which the reader has not read were evicted. It
	// has to restart from the zero Cursor.
	Lost bool
	// Now is the revision at which the newest call of [Log.Follow] began to
	// read. What it yields beyond changed meanwhile.
	Now Revision

	begun bool     // not the zero Cursor
	whole Revision // up to which it read everything when it last came to the end
}

// At returns the cursor of a reader that has read everything up to a revision.
func At(r Revision) Cursor { return Cursor{Revision: r, begun: true, whole: r} }

// Begin returns the cursor of a reader that begins, as the zero Cursor does,
// and needs no removal up to a revision.
func Begin(now Revision) Cursor { return Cursor{Begun: now, begun: true} }

// HasBegun reports whether it is not the zero Cursor.
func (c *Cursor) HasBegun() bool { return c.begun }

// Change is the newest entry of a name, or its removal.
type Change[T any] struct {
	Entry    T
	Revision Revision
	Removed  bool
	// Handed reports that the reader has read this content under the name
	// before: only its owner is another; see [Log.Hand].
	Handed bool
}

// Log lists entries, which are names with what they have, in the order of their
// last change. The zero Log is empty.
type Log[T any] struct {
	slots []slot[T]
	live  int // present names
	dead  int // removed names that are retained
	// horizon is the revision of the newest evicted removal.
	horizon Revision
	// oldest is an index before which no removal is retained.
	oldest int
	// handed has the revision of the content of names that were handed over, by
	// their place.
	handed map[Revision]Revision
	chunks sync.Pool // of *[chunk]Change[T], for readers of more than a few changes
}

// slot is a place in a log.
type slot[T any] struct {
	key   uint64 // the revision, then the states as the lowest bits
	entry T
}

// States of a slot.
const (
	isRemoved = 1 << iota
	isEmpty

	stateBits = iota
)

func newSlot[T any](at Revision, e T, removed bool) slot[T] {
	s := slot[T]{key: uint64(at) << stateBits, entry: e}
	if removed {
		s.key |= isRemoved
	}
	return s
}

func (s *slot[T]) revision() Revision   { return Revision(s.key >> stateBits) }
func (s *slot[T]) is(state uint64) bool { return s.key&state != 0 }

// after returns the index of the first slot with a greater revision.
func (l *Log[T]) after(r Revision) int {
	low, high, key := 0, len(l.slots), uint64(r+1)<<stateBits
	for low < high {
		if middle := int(uint(low+high) >> 1); l.slots[middle].key < key {
			low = middle + 1
		} else {
			high = middle
		}
	}
	return low
}

// at returns the slot of a place.
func (l *Log[T]) at(place Revision) *slot[T] {
	if i := l.after(place) - 1; i >= 0 && l.slots[i].revision() == place && !l.slots[i].is(isEmpty) {
		return &l.slots[i]
	}
	panic(fmt.Sprintf("BUG: changelog: nothing is listed at revision %d", place))
}

// count adds n to live or dead, whichever counts the slot.
func (l *Log[T]) count(s *slot[T], n int) {
	if s.is(isRemoved) {
		l.dead += n
	} else {
		l.live += n
	}
}

// Len returns the number of names, without the removed ones.
func (l *Log[T]) Len() int { return l.live }

// Get returns the entry at a place, and whether its name is removed.
func (l *Log[T]) Get(place Revision) (e T, removed bool) {
	s := l.at(place)
	return s.entry, s.is(isRemoved)
}

// Set replaces the entry at a place by one of the same content, which readers
// need not read.
func (l *Log[T]) Set(place Revision, e T) { l.at(place).entry = e }

// Append lists an entry at a revision greater than that of any other. A removed
// one says that its name is gone.
func (l *Log[T]) Append(at Revision, e T, removed bool) {
	if len(l.slots) > 2*(l.live+l.dead)+64 {
		l.compact()
	}
	s := newSlot(at, e, removed)
	l.slots = append(l.slots, s)
	l.count(&s, 1)
}

// Leave empties a place, for a name that is listed anew or that nobody has
// read.
func (l *Log[T]) Leave(place Revision) {
	s := l.at(place)
	l.count(s, -1)
	delete(l.handed, place)
	*s = slot[T]{key: s.key | isEmpty}
}

// Hand moves a name to the end, for an entry of the same content with another
// owner. Readers who print the owner, or select by it, read a change; the
// others may skip it as [Change.Handed]. The place is left, and at is the new
// one.
func (l *Log[T]) Hand(place, at Revision, e T) {
	content, again := l.handed[place]
	if !again {
		content = place
	}
	l.Leave(place)
	l.Append(at, e, false)
	if l.handed == nil {
		l.handed = make(map[Revision]Revision)
	}
	l.handed[at] = content
}

// compact drops the empty slots.
func (l *Log[T]) compact() {
	full := make([]slot[T], 0, l.live+l.dead+(l.live+l.dead)/4+64)
	oldest := 0
	for i := range l.slots {
		if i == l.oldest {
			oldest = len(full)
		}
		if !l.slots[i].is(isEmpty) {
			full = append(full, l.slots[i])
		}
	}
	l.slots, l.oldest = full, min(oldest, len(full))
}

// Evict drops the oldest removals until at most limit are retained, and calls f
// with each; f does not call the log.
func (l *Log[T]) Evict(limit int, f func(T)) {
	for ; l.dead > limit; l.oldest++ {
		if s := &l.slots[l.oldest]; s.is(isRemoved) && !s.is(isEmpty) {
			e := s.entry
			l.horizon = s.revision()
			l.Leave(l.horizon)
			f(e)
		}
	}
}

// Reset empties the log. Each reader that has read anything before a revision
// is lost.
func (l *Log[T]) Reset(before Revision) {
	l.slots, l.live, l.dead, l.oldest, l.handed, l.horizon = nil, 0, 0, 0, nil, before
}

// Grow makes room for n more entries.
func (l *Log[T]) Grow(n int) { l.slots = slices.Grow(l.slots, n) }

// All returns the entries that are not removed, oldest change first, with their
// places. The log must not be changed in the meantime.
func (l *Log[T]) All() iter.Seq2[Revision, T] {
	return func(yield func(Revision, T) bool) {
		for i := range l.slots {
			if s := &l.slots[i]; !s.is(isEmpty) && !s.is(isRemoved) && !yield(s.revision(), s.entry) {
				return
			}
		}
	}
}

// chunk is the number of changes that are read under one lock. No lock is held
// between two chunks.
const chunk = 256

// few is the size of a reader's first chunk, which is on its stack. Most reads
// return a change or two, and thousands of streams read on goroutines of their
// own, which keep a stack as large as they have once needed.
const few = 8

// Follow yields the changes after a cursor, oldest first, and advances the
// cursor. A name that changed several times occurs once, with its newest entry.
// From the zero Cursor that is everything. Lock guards the log and its current
// revision, now; it is held while a chunk is read, not while yield runs. So
// writers are not blocked, and their changes follow in the same call.
//
// A reader that stops resumes from its cursor, after the last change it
// received; at the end it has read everything up to its cursor.
func (l *Log[T]) Follow(lock sync.Locker, now *Revision, c *Cursor, yield func(Change[T]) bool) {
	var first [few]Change[T]
	var more *[chunk]Change[T]
	c.Now = 0
	defer func() {
		if more != nil {
			clear(more[:])
			l.chunks.Put(more)
		}
	}()
	for buf := first[:0]; ; buf = more[:0] {
		changes, at := l.read(lock, now, c, buf)
		if c.Lost {
			return
		}
		for i := range changes {
			c.Revision = changes[i].Revision
			if changes[i].Removed && c.Revision <= c.Begun {
				continue
			}
			if !yield(changes[i]) {
				return
			}
		}
		if len(changes) < cap(buf) {
			c.Revision = max(c.Revision, at)
			c.whole = c.Revision
			return
		}
		clear(changes) // releases the entries that the reader has handled
		if more == nil {
			if more, _ = l.chunks.Get().(*[chunk]Change[T]); more == nil {
				more = new([chunk]Change[T])
			}
		}
	}
}

// read returns the next changes, as many as fit in buf, and the current
// revision. Fewer than fit are complete up to it.
func (l *Log[T]) read(lock sync.Locker, now *Revision, c *Cursor, buf []Change[T]) ([]Change[T], Revision) {
	lock.Lock()
	defer lock.Unlock()
	if c.Now == 0 {
		c.Now = *now
	}
	if !c.begun {
		c.begun, c.Begun = true, *now
	}
	if l.horizon > max(c.Revision, c.Begun) {
		c.Lost = true
		return nil, 0
	}
	from := l.slots[l.after(c.Revision):]
	for i := range from {
		s := &from[i]
		if s.is(isEmpty) {
			continue
		}
		change := Change[T]{Entry: s.entry, Revision: s.revision(), Removed: s.is(isRemoved)}
		content, handed := l.handed[change.Revision]
		change.Handed = handed && content <= c.whole // after it the content may have moved past the reader
		if buf = append(buf, change); len(buf) == cap(buf) {
			break
		}
	}
	return buf, *now
}
