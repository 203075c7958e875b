package changelog

import (
	"iter"
	"maps"
	"sync/atomic"
)

// Index is a log that finds entries by name, and counts its own revisions. The
// zero Index is empty.
type Index[T any] struct {
	Log[T]
	Revision Revision // of the newest change
	places   map[string]Revision
	count    atomic.Int64
}

// IsEmpty reports whether no name is listed. It needs no lock.
func (x *Index[T]) IsEmpty() bool { return x.count.Load() == 0 }

// Names returns the names that are listed, removed ones included.
func (x *Index[T]) Names() iter.Seq[string] { return maps.Keys(x.places) }

// Find returns the entry of a name and whether the name is removed, if it is
// listed.
func (x *Index[T]) Find(name string) (e T, removed, listed bool) {
	at, listed := x.places[name]
	if listed {
		e, removed = x.Get(at)
	}
	return e, removed, listed
}

// Update replaces the entry of a listed name by one of the same content, which
// readers need not read.
func (x *Index[T]) Update(name string, e T) { x.Set(x.places[name], e) }

// Put lists a name with its newest entry, and evicts the oldest removals until
// at most limit are retained; nameOf returns the name of one.
func (x *Index[T]) Put(name string, e T, removed bool, limit int, nameOf func(T) string) {
	if at, listed := x.places[name]; listed {
		x.Leave(at)
	}
	if x.places == nil {
		x.places = make(map[string]Revision)
	}
	x.Revision++
	x.places[name] = x.Revision
	x.Append(x.Revision, e, removed)
	x.Evict(limit, func(e T) { delete(x.places, nameOf(e)) })
	x.count.Store(int64(len(x.places)))
}

// Clear empties the index. Each reader that has read anything is lost.
func (x *Index[T]) Clear() {
	x.Revision++
	x.Reset(x.Revision)
	clear(x.places)
	x.count.Store(0)
}
