// Package shapes lists what sinks receive of a collection, in a log per shape.
//
// An entry has a place in each log, 0 for none. A name that is removed retains
// its place, held by a tombstone: an entry that no shape shows. A collection
// whose resources do not depend on the shape has one log.
package shapes

import (
	"sync/atomic"

	"github.com/isthmus-mesh/isthmus/server/changelog"
	"github.com/isthmus-mesh/isthmus/server/encode"
)

// Places are the places of an entry, by shape.
type Places [encode.Workload + 1]changelog.Revision

// At returns the place in a shape for a reader that does not hold the lock of
// the logs. It is 0 while another entry of the name takes its place.
func (p *Places) At(s encode.Shape) changelog.Revision {
	return changelog.Revision(atomic.LoadUint64((*uint64)(&p[s])))
}

func (p *Places) set(s encode.Shape, at changelog.Revision) {
	atomic.StoreUint64((*uint64)(&p[s]), uint64(at))
}

// Set is a set of shapes, as bits.
type Set uint8

// Of returns the set of one shape.
func Of(s encode.Shape) Set { return 1 << s }

// Entry is what is listed under a name. The zero Entry is none.
type Entry[E any] interface {
	comparable
	// Shows reports whether sinks of a shape receive it: not if it is none, or
	// a tombstone.
	Shows(s encode.Shape) bool
	// Hash returns the hash of what they receive.
	Hash(s encode.Shape) encode.Hash
	// Places returns its places, which belong to the logs.
	Places() *Places
	// IsOfRegistry reports whether both are of one registry.
	IsOfRegistry(other E) bool
}

// Log is the log of a shape.
type Log[E Entry[E]] struct {
	changelog.Log[E]
	shape encode.Shape
}

// Logs are the logs of a collection.
type Logs[E Entry[E]] []*Log[E]

// New returns empty logs: one, or one per shape.
func New[E Entry[E]](perShape bool) Logs[E] {
	l := Logs[E]{{shape: encode.Inline}}
	if perShape {
		l = append(l, &Log[E]{shape: encode.Workload})
	}
	return l
}

// In returns the log of a shape.
func (l Logs[E]) In(s encode.Shape) *Log[E] { return l[min(int(s), len(l)-1)] }

// Len returns the number of names.
func (l Logs[E]) Len() (n int) {
	for _, log := range l {
		n = max(n, log.Len())
	}
	return n
}

// Enter lists a new entry in the logs that show it, each at the next revision.
func (l Logs[E]) Enter(e E, at *changelog.Revision) {
	for _, log := range l {
		if e.Shows(log.shape) {
			*at++
			log.enter(e, *at)
		}
	}
}

// enter lists an entry without a place.
func (l *Log[E]) enter(e E, at changelog.Revision) {
	l.Append(at, e, !e.Shows(l.shape))
	e.Places().set(l.shape, at)
}

// Move replaces the entry of a name, old by now, and returns the shapes in
// which that is a change, each at the next revision. Either may be none. The
// places of a removed name go to what tomb returns.
//
//	content    shown before   now
//	other      yes or no      yes     a change
//	any        yes            no      a removal
//	the same   yes            yes     no change; handed over if the registry is another
func (l Logs[E]) Move(old, now E, at *changelog.Revision, tomb func() E) (changed Set) {
	var none E
	holder := func() E {
		if now == none {
			return tomb()
		}
		return now
	}
	for _, log := range l {
		s := log.shape
		was, is, place := old.Shows(s), now.Shows(s), changelog.Revision(0)
		if old != none {
			place = old.Places()[s]
		}
		same := was == is && (!was || old.Hash(s) == now.Hash(s))
		switch {
		case !is && place == 0:
			continue
		case same && (!was || old.IsOfRegistry(now)):
			if to := holder(); to != old {
				log.Set(place, to)
				to.Places().set(s, place)
				old.Places().set(s, 0)
			}
			continue
		case same:
			*at++
			log.hand(old, now, *at)
		default:
			if place != 0 {
				log.Leave(place)
				old.Places().set(s, 0)
			}
			*at++
			log.enter(holder(), *at)
		}
		changed |= Of(s)
	}
	return changed
}

// hand moves a name to the end of the log, for an entry of the same content
// whose registry has another name. Both may be the same entry.
func (l *Log[E]) hand(old, with E, at changelog.Revision) {
	l.Hand(old.Places()[l.shape], at, with)
	old.Places().set(l.shape, 0)
	with.Places().set(l.shape, at)
}

// Republish moves the names of some entries to the end, as the name of their
// registry is another.
func (l Logs[E]) Republish(at *changelog.Revision, some func(E) bool) {
	for _, log := range l {
		var of []E
		for _, e := range log.All() {
			if some(e) {
				of = append(of, e)
			}
		}
		for _, e := range of {
			*at++
			log.hand(e, e, *at)
		}
	}
}

// Evict drops the oldest removals of each log until at most limit are retained,
// and calls f with each entry that has no place left.
func (l Logs[E]) Evict(limit int, f func(E)) {
	for _, log := range l {
		log.Log.Evict(limit, func(e E) {
			e.Places().set(log.shape, 0)
			if *e.Places() == (Places{}) {
				f(e)
			}
		})
	}
}

// Reset empties the logs. Each reader that has read anything before a revision
// is lost.
func (l Logs[E]) Reset(before changelog.Revision) {
	for _, log := range l {
		log.Log.Reset(before)
	}
}

// Grow makes room for n more names.
func (l Logs[E]) Grow(n int) {
	for _, log := range l {
		log.Log.Grow(n)
	}
}
