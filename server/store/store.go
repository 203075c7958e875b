package store

import (
	"iter"
	"slices"
	"sync"
)

// Revision counts the changes that a store has seen. It starts at 0, grows by one per changed name and is meaningful within one
// process only; what lasts across restarts is a value's version.
type Revision uint64

// Value is what a store keeps: immutable, and told apart by its version. Equal versions of one name mean equal content.
type Value interface {
	Version() string
}

// Op is one step of a batch: Value becomes what the collection holds under Name or, with Remove, the name goes.
type Op[V Value] struct {
	Collection string
	Name       string
	Value      V
	Remove     bool
	// Changed is set by [Store.Apply]: the op changed something.
	Changed bool
}

// Change is a name that changed: its newest value or, with Removed, the fact that it is gone.
type Change[V Value] struct {
	Name     string
	Value    V
	Removed  bool
	Revision Revision
}

// DefaultTombstones is the number of tombstones that a collection keeps if [Options] does not say. A tombstone costs about 150
// bytes besides its name.
const DefaultTombstones = 100_000

// Options tune a store. The zero value works.
type Options struct {
	// Tombstones is the number of removed names that each collection remembers, [DefaultTombstones] if zero.
	Tombstones int
}

// Store keeps collections of values. See the package comment.
type Store[V Value] struct {
	tombstones int

	mu          sync.RWMutex
	revision    Revision                  // guarded by mu
	collections map[string]*collection[V] // guarded by mu
	changed     chan struct{}             // guarded by mu; closed and replaced at each batch that changes something
}

// entry is one name's place in its collection's log.
type entry[V Value] struct {
	Change[V]
	prev, next *entry[V]
	// the same, among tombstones only
	olderDead, newerDead *entry[V]
}

// collection is a map and its log; the store's mu guards it.
type collection[V Value] struct {
	entries    map[string]*entry[V] // tombstones included
	head, tail *entry[V]            // the log, oldest first
	oldestDead *entry[V]
	newestDead *entry[V]
	dead       int
	horizon    Revision // revision of the newest tombstone that was dropped
}

// New returns an empty store.
func New[V Value](o Options) *Store[V] {
	if o.Tombstones <= 0 {
		o.Tombstones = DefaultTombstones
	}
	return &Store[V]{
		tombstones:  o.Tombstones,
		collections: make(map[string]*collection[V]),
		changed:     make(chan struct{}),
	}
}

// Apply carries out a batch as one: no reader sees a part of it. An op that changes nothing (a value of the version that is there,
// which takes the place of the one that is, or the removal of what is not) costs no revision and wakes nobody. Apply returns the store's revision afterwards and the number
// of ops that changed something, which are marked as such in the batch.
func (s *Store[V]) Apply(batch []Op[V]) (rev Revision, changed int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for i := range batch {
		if batch[i].Changed = s.applyLocked(&batch[i]); batch[i].Changed {
			changed++
		}
	}
	if changed > 0 {
		close(s.changed)
		s.changed = make(chan struct{})
	}
	return s.revision, changed
}

func (s *Store[V]) applyLocked(op *Op[V]) bool {
	c := s.collections[op.Collection]
	if c == nil {
		if op.Remove {
			return false
		}
		c = &collection[V]{entries: make(map[string]*entry[V])}
		s.collections[op.Collection] = c
	}
	e := c.entries[op.Name]
	switch {
	case op.Remove && (e == nil || e.Removed):
		return false
	case op.Remove:
		var none V
		e.Value, e.Removed = none, true
		c.bury(e)
	case e == nil:
		e = &entry[V]{Change: Change[V]{Name: op.Name, Value: op.Value}}
		c.entries[op.Name] = e
	case e.Removed:
		c.unbury(e)
		e.Value, e.Removed = op.Value, false
	case e.Value.Version() == op.Value.Version():
		e.Value = op.Value // the same content, which may have come from elsewhere
		return false
	default:
		e.Value = op.Value
	}
	s.revision++
	e.Revision = s.revision
	c.toTail(e)
	for c.dead > s.tombstones {
		oldest := c.oldestDead
		c.horizon = oldest.Revision
		c.unbury(oldest)
		c.unlink(oldest)
		delete(c.entries, oldest.Name)
	}
	return true
}

// toTail moves e, which may be new, to the tail of the log.
func (c *collection[V]) toTail(e *entry[V]) {
	if c.tail == e {
		return
	}
	if e.prev != nil || e.next != nil {
		c.unlink(e)
	}
	e.prev = c.tail
	if c.tail != nil {
		c.tail.next = e
	} else {
		c.head = e
	}
	c.tail = e
}

func (c *collection[V]) unlink(e *entry[V]) {
	if e.prev != nil {
		e.prev.next = e.next
	} else {
		c.head = e.next
	}
	if e.next != nil {
		e.next.prev = e.prev
	} else {
		c.tail = e.prev
	}
	e.prev, e.next = nil, nil
}

func (c *collection[V]) bury(e *entry[V]) {
	c.dead++
	e.olderDead = c.newestDead
	if c.newestDead != nil {
		c.newestDead.newerDead = e
	} else {
		c.oldestDead = e
	}
	c.newestDead = e
}

func (c *collection[V]) unbury(e *entry[V]) {
	c.dead--
	if e.olderDead != nil {
		e.olderDead.newerDead = e.newerDead
	} else {
		c.oldestDead = e.newerDead
	}
	if e.newerDead != nil {
		e.newerDead.olderDead = e.olderDead
	} else {
		c.newestDead = e.olderDead
	}
	e.olderDead, e.newerDead = nil, nil
}

// Since returns the names of a collection that changed after rev, oldest change first, and the revision up to which the answer
// is complete: the cursor for the next call. A name that changed several times is there once, with its newest value. With ok =
// false removals between rev and now are no longer known, and the reader must start again from [Store.All].
func (s *Store[V]) Since(coll string, rev Revision) (changes []Change[V], now Revision, ok bool) {
	s.mu.RLock()
	defer s.mu.RUnlock()
	c := s.collections[coll]
	if c == nil {
		return nil, s.revision, true
	}
	if rev < c.horizon {
		return nil, s.revision, false
	}
	n := 0
	first := c.tail
	for e := c.tail; e != nil && e.Revision > rev; e = e.prev {
		first = e
		n++
	}
	if n == 0 {
		return nil, s.revision, true
	}
	changes = make([]Change[V], 0, n)
	for e := first; e != nil; e = e.next {
		changes = append(changes, e.Change)
	}
	return changes, s.revision, true
}

// All returns what a collection holds, as of the returned revision, in the order of last change, without tombstones. The sequence
// is a snapshot: it may be ranged over at leisure and more than once. A reader that stops at some change may go on with
// [Store.Since] from that change's revision.
func (s *Store[V]) All(coll string) (iter.Seq[Change[V]], Revision) {
	s.mu.RLock()
	defer s.mu.RUnlock()
	c := s.collections[coll]
	if c == nil {
		return func(func(Change[V]) bool) {}, s.revision
	}
	live := make([]Change[V], 0, len(c.entries)-c.dead)
	for e := c.head; e != nil; e = e.next {
		if !e.Removed {
			live = append(live, e.Change)
		}
	}
	return slices.Values(live), s.revision
}

// Get returns what a collection holds under name.
func (s *Store[V]) Get(coll, name string) (v V, ok bool) {
	s.mu.RLock()
	defer s.mu.RUnlock()
	if c := s.collections[coll]; c != nil {
		if e := c.entries[name]; e != nil && !e.Removed {
			return e.Value, true
		}
	}
	return v, false
}

// Len returns the number of names that a collection holds.
func (s *Store[V]) Len(coll string) int {
	s.mu.RLock()
	defer s.mu.RUnlock()
	if c := s.collections[coll]; c != nil {
		return len(c.entries) - c.dead
	}
	return 0
}

// Collections returns the number of names that each non-empty collection holds.
func (s *Store[V]) Collections() map[string]int {
	s.mu.RLock()
	defer s.mu.RUnlock()
	sizes := make(map[string]int, len(s.collections))
	for name, c := range s.collections {
		if n := len(c.entries) - c.dead; n > 0 {
			sizes[name] = n
		}
	}
	return sizes
}

// Revision returns the store's revision.
func (s *Store[V]) Revision() Revision {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return s.revision
}

// Changed returns a channel that is closed at the next batch that changes something in any collection. Take the channel first and
// look at the store second.
func (s *Store[V]) Changed() <-chan struct{} {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return s.changed
}

// Wake closes the channel of [Store.Changed] although nothing changed, for whoever waits for more than the content.
func (s *Store[V]) Wake() {
	s.mu.Lock()
	defer s.mu.Unlock()
	close(s.changed)
	s.changed = make(chan struct{})
}
