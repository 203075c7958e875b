package state

import (
	"maps"
	"slices"
	"sync"

	"github.com/isthmus-mesh/isthmus/server/state/record"
)

// book guards what readers read of the claims themselves, beside the logs. A
// writer, who holds DB.apply, reads it without the lock, and locks it for each
// single change only: what a reader gets is as it was committed last, so that
// it does not wait for the batch in progress.
//
//	batch      touch a   change a   touch b   change b   commit
//	reader of  a: before ...................................| a: now
type book struct {
	sync.RWMutex
	whole bool // a writer holds the lock for many changes; guarded by DB.apply
	// begun are the parts that the batch in progress has changed; guarded by
	// DB.apply.
	begun []interface{ commitLocked() }
}

// commit lets readers see what the batch in progress changed, and f changes.
func (b *book) commit(f func()) {
	b.change(func() {
		f()
		for _, part := range b.begun {
			part.commitLocked()
		}
	})
	b.begun = b.begun[:0]
}

// change calls f with the book locked.
func (b *book) change(f func()) {
	if !b.whole {
		b.Lock()
		defer b.Unlock()
	}
	f()
}

// changeAll calls f, which changes a lot of it, with the book locked.
func (b *book) changeAll(f func()) {
	if b.whole {
		f()
		return
	}
	b.Lock()
	b.whole = true
	defer func() {
		b.whole = false
		b.Unlock()
	}()
	f()
}

// names finds the claims on each name of a collection.
type names struct {
	book   *book
	index  map[string]*Record   // the first claim on each name
	before map[string]committed // of the names that the batch in progress touched
}

// committed is what the logs have of a name.
type committed struct {
	current *Record // see names.current
	head    *Record
	all     []*Record // nil if there is at most one
}

// begin retains what the logs have of a name that a batch is about to change.
// It is false if the batch has begun with the name before.
func (t *names) begin(name string) (current *Record, first bool) {
	if _, begun := t.before[name]; begun {
		return nil, false
	}
	c := t.lookup(name)
	if len(t.before) == 0 {
		t.book.begun = append(t.book.begun, t)
	}
	t.book.change(func() {
		if t.before == nil {
			t.before = make(map[string]committed)
		}
		t.before[name] = c
	})
	return c.current, true
}

// lookup returns what the index has of a name.
func (t *names) lookup(name string) committed {
	c := committed{current: t.current(name), head: t.index[name]}
	if c.head != nil && c.head.next != nil {
		c.all = claimsOn(c.head)
	}
	return c
}

// commitLocked lets readers see what the batch changed. The caller holds the
// book.
func (t *names) commitLocked() { t.before = emptied(t.before) }

// emptied returns an empty map in place of one, the same one if it is small.
func emptied[K comparable, V any](m map[K]V) map[K]V {
	if len(m) > 64 {
		return nil
	}
	clear(m)
	return m
}

// currentShared returns what the logs have of a name. The caller holds the book
// for reading.
func (t *names) currentShared(name string) *Record {
	if c, changing := t.before[name]; changing {
		return c.current
	}
	return t.current(name)
}

// claimsShared returns the committed claims on a name, without derived records.
// The caller holds the book for reading.
func (t *names) claimsShared(name string) []*Record {
	c, changing := t.before[name]
	if !changing {
		c = t.lookup(name)
	}
	if c.all == nil && c.head != nil {
		c.all = []*Record{c.head}
	}
	return slices.DeleteFunc(slices.Clone(c.all), func(r *Record) bool { return r.Is(record.Tombstone | record.Derived) })
}

// claimShared returns the committed claim of a registry on a name, nil if it
// has none. The caller holds the book for reading.
func (t *names) claimShared(name string, registry *Registry) *Record {
	for _, r := range t.claimsShared(name) {
		if r.isOf(registry) {
			return r
		}
	}
	return nil
}

// claim returns the claim of a registry on a name, nil if it has none.
func (t *names) claim(name string, registry *Registry) *Record {
	r := t.index[name]
	for r != nil && !r.isOf(registry) {
		r = r.next
	}
	return r
}

// current returns the record in the logs under a name: the served one, a
// tombstone, or nil.
func (t *names) current(name string) *Record {
	r := t.index[name]
	for r != nil && !r.marked(isServed) && !r.Is(record.Tombstone) {
		r = r.next
	}
	return r
}

// put adds a claim, in place of one of the same registry.
func (t *names) put(c *Record) {
	t.insert(c, func(r *Record) bool {
		return !r.Is(record.Tombstone|record.Derived) && r.kind.registry.order < c.kind.registry.order
	})
}

// putDerived adds a derived record after all claims on its name.
func (t *names) putDerived(c *Record) {
	t.insert(c, func(r *Record) bool { return !r.Is(record.Tombstone) && (!r.Is(record.Derived) || r.Sum() < c.Sum()) })
}

// bury appends a tombstone to the claims on a name of which none is served.
func (t *names) bury(tomb *Record) { t.insert(tomb, func(*Record) bool { return true }) }

// insert adds a record to the claims on its name after those that precede it,
// in place of one of the same registry.
func (t *names) insert(c *Record, precedes func(*Record) bool) {
	name := c.Name()
	var before *Record
	r := t.index[name]
	for r != nil && precedes(r) {
		before, r = r, r.next
	}
	c.next = r
	if r != nil && r.isOf(c.kind.registry) && c.isOf(c.kind.registry) {
		c.next = r.next
		c.mark(isServed, r.marked(isServed))
		c.mark(isShadowed, r.marked(isShadowed))
	}
	if before != nil {
		before.next = c // the name is touched, so that nobody reads it
		return
	}
	t.book.change(func() { t.index[name] = c })
}

// drop removes a record from the claims on its name, and the name with the last
// one.
func (t *names) drop(c *Record) {
	name := c.Name()
	t.book.change(func() {
		if t.index[name] != c {
			for r := t.index[name]; r != nil; r = r.next {
				if r.next == c {
					r.next = c.next
					return
				}
			}
			return
		}
		if c.next == nil {
			delete(t.index, name)
		} else {
			t.index[c.next.Name()] = c.next // so that the key does not retain c's buffer
		}
	})
}

// relink replaces the claims on a name, in the given order.
func (t *names) relink(name string, claims []*Record) {
	t.book.change(func() {
		for n, c := range claims {
			if c.next = nil; n+1 < len(claims) {
				c.next = claims[n+1]
			}
		}
		t.index[name] = claims[0]
	})
}

// claimsOn returns the claims on a name, including a tombstone if there is one.
func claimsOn(head *Record) []*Record {
	var all []*Record
	for ; head != nil; head = head.next {
		all = append(all, head)
	}
	return all
}

// draft is a map that a batch changes while readers see what was committed
// last. Its values are immutable.
type draft[K comparable, V any] struct {
	book   *book
	now    map[K]V
	before map[K]V // of the keys that the batch in progress changed; the zero V if there was none
}

func newDraft[K comparable, V any](b *book) draft[K, V] {
	return draft[K, V]{book: b, now: make(map[K]V)}
}

func (m *draft[K, V]) set(key K, value V) {
	m.change(key, func() { m.now[key] = value })
}

func (m *draft[K, V]) remove(key K) {
	m.change(key, func() { delete(m.now, key) })
}

func (m *draft[K, V]) change(key K, f func()) {
	m.book.change(func() {
		if _, changing := m.before[key]; !changing && !m.book.whole {
			if m.before == nil {
				m.before = make(map[K]V)
			}
			if len(m.before) == 0 {
				m.book.begun = append(m.book.begun, m)
			}
			m.before[key] = m.now[key]
		}
		f()
	})
}

// shared returns the committed value of a key. The caller holds the book for
// reading.
func (m *draft[K, V]) shared(key K) V {
	if v, changing := m.before[key]; changing {
		return v
	}
	return m.now[key]
}

// commitLocked lets readers see what the batch changed. The caller holds the
// book.
func (m *draft[K, V]) commitLocked() { m.before = emptied(m.before) }

// keys returns all keys, as the batch in progress has them. The caller holds
// the book for reading.
func (m *draft[K, V]) keys() []K { return slices.Collect(maps.Keys(m.now)) }
