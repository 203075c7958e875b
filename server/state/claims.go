package state

import (
	"iter"
	"slices"
	"strings"

	"github.com/isthmus-mesh/isthmus/server/changelog"
	"github.com/isthmus-mesh/isthmus/server/encode"
	"github.com/isthmus-mesh/isthmus/server/state/record"
	"github.com/isthmus-mesh/isthmus/server/state/saved"
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
	served, aside Cursor
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
		c.aside = At(t.asides.Revision)
	}
	return c
}

// ClaimsRevision returns a number that increases with each change of any claim.
func (d *DB) ClaimsRevision() Revision {
	d.mu.RLock()
	defer d.mu.RUnlock()
	sum := d.revision
	for _, t := range d.tables {
		sum += t.asides.Revision
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
		if !c.aside.HasBegun() { // before the log of what is served is read
			d.mu.RLock()
			c.aside = changelog.Begin(t.asides.Revision)
			d.mu.RUnlock()
		}
		for change := range d.Changes(Kind{coll, encode.Workload}, &c.served) {
			claims := Claims{Name: change.Name}
			if all, known := d.asideClaims(t, change.Name); known {
				claims.Records = all
			} else if !change.Removed && !change.Record.Is(record.Derived) {
				claims.Records = []*Record{change.Record}
			}
			if !yield(claims) {
				return
			}
		}
		if !c.served.Lost {
			t.asides.Follow(d.mu.RLocker(), &t.asides.Revision, &c.aside, func(of changelog.Change[Claims]) bool { return yield(of.Entry) })
		}
		c.Lost = c.served.Lost || c.aside.Lost
	}
}

// asideClaims returns all claims on a name if asides has it.
func (d *DB) asideClaims(t *table, name string) ([]*Record, bool) {
	if t.asides.IsEmpty() {
		return nil, false
	}
	d.mu.RLock()
	defer d.mu.RUnlock()
	claims, _, known := t.asides.Find(name)
	return claims.Records, known
}

// AppendSaved appends the claims in the form that [DB.ParseSaved] reads. The
// function registry returns the number of a record's registry.
func (c Claims) AppendSaved(b []byte, coll string, registry func(*Record) int) []byte {
	if len(c.Records) == 0 {
		it := saved.Item{Kind: saved.Removal, Collection: coll, Name: c.Name}
		return it.Append(b)
	}
	for n, r := range c.Records {
		it := r.saved(registry(r), n > 0)
		b = it.Append(b)
	}
	return b
}

// updateAsidesLocked updates asides with the claims on a name that a batch
// changed. The caller holds apply and mu.
func (d *DB) updateAsidesLocked(t *table, name string) {
	was, wasServed, known := t.asides.Find(name)
	head := t.Head(name)
	if !known && (head == nil || head.next == nil && (head.marked(isServed) || head.Is(record.Tombstone))) {
		return
	}
	now, served := Claims{Name: was.Name}, true
	for r := head; r != nil; r = r.next {
		if r.isClaim() {
			now.Records = append(now.Records, r)
			served = served && r.marked(isServed)
		}
	}
	switch {
	case known && served == wasServed && slices.EqualFunc(was.Records, now.Records, (*Record).isSavedLike):
		t.asides.Update(now.Name, now)
		return
	case !known && served:
		return // one claim, and derived records that are not served
	case !known:
		now.Name = strings.Clone(name)
	}
	t.asides.Put(now.Name, now, served, d.options.Tombstones, func(c Claims) string { return c.Name })
}

// isSavedLike reports whether both are saved in the same form.
func (r *Record) isSavedLike(s *Record) bool {
	return r == s || r.kind == s.kind && r.Sum() == s.Sum() && r.of == s.of && (r.parts == nil) == (s.parts == nil)
}
