package state

import (
	"iter"
	"slices"
	"strings"
	"sync/atomic"

	"github.com/isthmus-mesh/isthmus/server/encode"
)

// Claims are all claims on one name, in order of precedence. Whether they are
// served, and how, follows from the claims of all registries, their order and
// the rules for conflicts.
type Claims struct {
	Name    string
	Records []*Record // none if the name is removed
}

// ClaimsCursor is a position in the claims of a collection. The zero
// ClaimsCursor is that of a reader that has read nothing.
type ClaimsCursor struct {
	served Cursor
	aside  Revision // of asides
	begun  Revision // of asides, where a reader from the zero ClaimsCursor began
	// Lost reports that the reader has to restart from the zero ClaimsCursor.
	Lost bool
}

// ClaimsNow returns the cursor of a reader that has read all claims of a
// collection.
func (d *DB) ClaimsNow(coll string) ClaimsCursor {
	d.mu.RLock()
	defer d.mu.RUnlock()
	c := ClaimsCursor{served: At(d.revision)}
	if t := d.tables[coll]; t != nil {
		c.aside = t.asides.revision
	}
	return c
}

// ClaimsRevision returns a number that increases with each change of any claim.
func (d *DB) ClaimsRevision() Revision {
	d.mu.RLock()
	defer d.mu.RUnlock()
	sum := d.revision
	for _, t := range d.tables {
		sum += t.asides.revision
	}
	return sum
}

// Claims returns the names of a collection whose claims changed after a cursor,
// and advances the cursor like [DB.Changes]. A name may occur twice; the last
// occurrence is the newest.
//
// It reads the log of what is served, and the log of the names whose claims are
// others. Of a name that moves from one to the other in the meantime, the
// claims are complete in both.
func (d *DB) Claims(coll string, c *ClaimsCursor) iter.Seq[Claims] {
	return func(yield func(Claims) bool) {
		t := d.tables[coll]
		if t == nil {
			return
		}
		if !c.served.begun {
			d.mu.RLock()
			c.begun = t.asides.revision
			d.mu.RUnlock()
		}
		for change := range d.Changes(Kind{coll, encode.Workload}, &c.served) {
			claims := Claims{Name: change.Name}
			if all, known := d.asideClaims(t, change.Name); known {
				claims.Records = all
			} else if !change.Removed && !change.Record.is(isDerived) {
				claims.Records = []*Record{change.Record}
			}
			if !yield(claims) {
				return
			}
		}
		if c.Lost = c.served.Lost; c.Lost {
			return
		}
		var buf [chunk]Claims
		for {
			names := d.readAsides(t, c, buf[:0])
			for _, claims := range names {
				if !yield(claims) {
					return
				}
			}
			if len(names) < chunk {
				return
			}
		}
	}
}

// asideClaims returns all claims on a name if asides has it.
func (d *DB) asideClaims(t *table, name string) ([]*Record, bool) {
	if t.asides.count.Load() == 0 {
		return nil, false
	}
	d.mu.RLock()
	defer d.mu.RUnlock()
	e := t.asides.names[name]
	if e == nil {
		return nil, false
	}
	return e.claims, true
}

func (d *DB) readAsides(t *table, c *ClaimsCursor, buf []Claims) []Claims {
	d.mu.RLock()
	defer d.mu.RUnlock()
	a := &t.asides
	if a.horizon > max(c.aside, c.begun) {
		c.Lost = true
		return nil
	}
	first, _ := slices.BinarySearchFunc(a.slots, c.aside+1, func(s asideSlot, r Revision) int { return int(s.revision) - int(r) })
	for _, s := range a.slots[first:] {
		c.aside = s.revision
		if s.of.revision != s.revision {
			continue // changed again
		}
		if buf = append(buf, Claims{s.of.name, s.of.claims}); len(buf) == cap(buf) {
			return buf
		}
	}
	c.aside = a.revision
	return buf
}

// AppendSaved appends the claims in the form that [DB.ParseSaved] reads. The
// function registry returns the number of a record's registry.
func (c Claims) AppendSaved(b []byte, coll string, registry func(*Record) int) []byte {
	if len(c.Records) == 0 {
		return appendRemoved(b, coll, c.Name)
	}
	for n, r := range c.Records {
		b = r.appendSaved(b, registry(r), n > 0)
	}
	return b
}

// asides lists the names of a collection that have a claim which is not what
// sinks receive under the name: it is kept back, or merged into another. Sinks
// see nothing of it. DB.mu guards it.
type asides struct {
	names    map[string]*aside
	slots    []asideSlot  // in order of the last change; outdated ones included
	revision Revision     // counts changes
	past     int          // names that have no such claim any more
	horizon  Revision     // of the newest one of these that was evicted
	count    atomic.Int64 // of names
}

// aside has all claims on a name.
type aside struct {
	name     string
	claims   []*Record // immutable
	past     bool      // the claims are what is served
	revision Revision
}

type asideSlot struct {
	revision Revision
	of       *aside
}

// updateAsidesLocked updates asides with the claims on a name that a batch
// changed. The caller holds apply and mu.
func (d *DB) updateAsidesLocked(t *table, name string) {
	a := &t.asides
	head := t.index[name]
	simple := head == nil || head.next == nil && (head.marked(isServed) || head.is(isTombstone))
	if simple && len(a.names) == 0 {
		return
	}
	e := a.names[name]
	if simple && e == nil {
		return
	}
	var claims []*Record
	past := true
	for r := head; r != nil; r = r.next {
		if r.is(isTombstone) || r.is(isDerived) {
			continue
		}
		claims = append(claims, r)
		past = past && r.marked(isServed)
	}
	if e == nil {
		if past {
			return // one claim, and derived records that are not served
		}
		if a.names == nil {
			a.names = make(map[string]*aside)
		}
		e = &aside{name: strings.Clone(name)}
		a.names[e.name] = e
		a.count.Store(int64(len(a.names)))
	}
	changed := e.revision == 0 || !slices.EqualFunc(e.claims, claims, (*Record).isSavedLike)
	if e.past != past {
		e.past = past
		a.past += one(past)
	}
	e.claims = claims
	if !changed {
		return
	}
	a.revision++
	e.revision = a.revision
	if len(a.slots) > 2*len(a.names)+64 {
		a.slots = slices.DeleteFunc(a.slots, func(s asideSlot) bool { return s.of.revision != s.revision })
	}
	a.slots = append(a.slots, asideSlot{a.revision, e})
	if a.past > d.options.Tombstones {
		a.forget(d.options.Tombstones / 2)
	}
}

// isSavedLike reports whether both are saved in the same form.
func (r *Record) isSavedLike(s *Record) bool {
	return r == s || r.kind == s.kind && r.hash == s.hash && r.of == s.of && (r.parts == nil) == (s.parts == nil)
}

// forget evicts the oldest names whose claims are what is served, until at most
// limit are left.
func (a *asides) forget(limit int) {
	a.slots = slices.DeleteFunc(a.slots, func(s asideSlot) bool {
		switch {
		case s.of.revision != s.revision:
			return true
		case !s.of.past || a.past <= limit:
			return false
		}
		a.past--
		a.horizon = s.revision
		delete(a.names, s.of.name)
		return true
	})
	a.count.Store(int64(len(a.names)))
}
