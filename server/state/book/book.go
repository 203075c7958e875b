// Package book lets readers see a batch as a whole, or nothing of it.
//
// A [Book] guards what readers read. The writer, of which there is one at a
// time, reads it without the lock, and locks it for each single change only.
// Before it changes a key it calls [Draft.Begin]: from then on a reader gets
// what the key had, until [Book.Commit]. So readers do not wait for the batch
// in progress.
//
//	writer     begin a   change a   begin b   change b   commit
//	reader of  a: before ...................................| a: now
package book

import (
	"maps"
	"slices"
	"sync"
)

// Book is the lock of drafts. Readers lock it for reading.
type Book struct {
	sync.RWMutex
	whole bool                          // the writer holds the lock for many changes; the writer's
	begun []interface{ commitLocked() } // what the batch in progress has changed; the writer's
}

// Commit lets readers see what the batch in progress changed.
func (b *Book) Commit() {
	b.Change(func() {
		for _, part := range b.begun {
			part.commitLocked()
		}
	})
	b.begun = b.begun[:0]
}

// Reset forgets that a batch is in progress, as its drafts are replaced.
func (b *Book) Reset() { b.begun = nil }

// Change calls f with the book locked.
func (b *Book) Change(f func()) {
	if !b.whole {
		b.Lock()
		defer b.Unlock()
	}
	f()
}

// ChangeAll calls f, which changes a lot, with the book locked.
func (b *Book) ChangeAll(f func()) {
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

// Draft has what readers see of the keys that the batch in progress changes.
type Draft[K comparable, V any] struct {
	book   *Book
	before map[K]V
}

// NewDraft returns a draft without changes.
func NewDraft[K comparable, V any](b *Book) Draft[K, V] { return Draft[K, V]{book: b} }

// Has reports whether the batch in progress has begun with a key.
func (d *Draft[K, V]) Has(key K) bool {
	_, begun := d.before[key]
	return begun
}

// Begin retains what readers see of a key that a batch is about to change, and
// has not begun with.
func (d *Draft[K, V]) Begin(key K, before V) {
	if len(d.before) == 0 {
		d.book.begun = append(d.book.begun, d)
	}
	d.book.Change(func() {
		if d.before == nil {
			d.before = make(map[K]V)
		}
		d.before[key] = before
	})
}

// Shared returns what was committed of a key, false if that is what there is
// now. The caller holds the book for reading.
func (d *Draft[K, V]) Shared(key K) (V, bool) {
	v, changing := d.before[key]
	return v, changing
}

// Begun returns the number of keys that the batch in progress has changed.
func (d *Draft[K, V]) Begun() int { return len(d.before) }

// commitLocked lets readers see what the batch changed. The map is retained if
// it is small.
func (d *Draft[K, V]) commitLocked() {
	if len(d.before) > 64 {
		d.before = nil
	}
	clear(d.before)
}

// Map is a map that readers see as it was committed last. Its values are
// immutable.
type Map[K comparable, V any] struct {
	Draft[K, V]
	// Now is what the writer sees.
	Now map[K]V
}

// NewMap returns an empty map.
func NewMap[K comparable, V any](b *Book) *Map[K, V] {
	return &Map[K, V]{NewDraft[K, V](b), make(map[K]V)}
}

// Set sets the value of a key.
func (m *Map[K, V]) Set(key K, value V) { m.change(key, func() { m.Now[key] = value }) }

// Remove removes a key.
func (m *Map[K, V]) Remove(key K) { m.change(key, func() { delete(m.Now, key) }) }

func (m *Map[K, V]) change(key K, f func()) {
	if !m.book.whole && !m.Has(key) {
		m.Begin(key, m.Now[key])
	}
	m.book.Change(f)
}

// Shared returns the committed value of a key, the zero V if it has none. The
// caller holds the book for reading.
func (m *Map[K, V]) Shared(key K) V {
	if v, changing := m.Draft.Shared(key); changing {
		return v
	}
	return m.Now[key]
}

// Keys returns all keys, as the batch in progress has them. The caller holds
// the book for reading.
func (m *Map[K, V]) Keys() []K { return slices.Collect(maps.Keys(m.Now)) }
