package state

import (
	"slices"

	"github.com/isthmus-mesh/isthmus/plugin/collection"
)

// lineOfShadow is a name that is kept back since the batch.
type lineOfShadow struct {
	record *Record
	owner  *Registry
}

// eligible reports whether the record would be served if no other registry came
// first. The instances of a service that is kept back would not be.
func (r *Record) eligible() bool {
	return !r.is(isTombstone) && (!r.isInstance() || !r.of.keptBack)
}

// settle finds out which claim on a name is served, and who is kept back.
func (b *batch) settle(t *table, name string) {
	d := b.db
	var owner *Record
	for c := t.index[name]; c != nil; c = c.next {
		if c.eligible() {
			owner = c
			break
		}
	}
	for c := t.index[name]; c != nil; c = c.next {
		if c.is(isTombstone) {
			continue
		}
		shadowed := c != owner && c.eligible()
		r := d.registries[c.registry]
		if d.setServed(c, c == owner) || c.marked(isShadowed) != shadowed {
			if r != b.r && !slices.Contains(b.others, r) {
				b.others = append(b.others, r)
			}
		}
		if d.setShadowed(c, shadowed) && shadowed {
			b.fresh = append(b.fresh, lineOfShadow{c, d.registries[owner.registry]})
		}
		if c.parts != nil && c.of.keptBack != shadowed {
			c.of.keptBack = shadowed
			c.of.each(func(i *Record) { b.touch(d.tables[collection.WorkloadEntry], i.Name()) })
		}
	}
}

// setServed counts a claim as served, or no longer, and reports whether that is
// news.
func (d *DB) setServed(c *Record, on bool) bool {
	return d.setCounted(c, isServed, on, func(r *Registry, n int) { r.served[c.Collection()] += n })
}

// setShadowed counts a claim as kept back, or no longer, and reports whether
// that is news.
func (d *DB) setShadowed(c *Record, on bool) bool {
	return d.setCounted(c, isShadowed, on, func(r *Registry, n int) { r.shadowed += n })
}

func (d *DB) setCounted(c *Record, m marks, on bool, count func(r *Registry, n int)) bool {
	if c.marked(m) == on {
		return false
	}
	c.mark(m, on)
	n := 1
	if !on {
		n = -1
	}
	count(d.registries[c.registry], n)
	return true
}

// tellShadowed shows what the batch did to other registries, and logs what is
// kept back since.
func (b *batch) tellShadowed() {
	for _, l := range b.fresh {
		r := b.db.registries[l.record.registry]
		if r.line() {
			r.log.Warn("another registry owns the name; kept back", "collection", l.record.Collection(), "name", l.record.Name(), "owner", l.owner.name)
		}
	}
	b.db.metrics.setServed(b.r)
	for _, r := range b.others {
		b.db.metrics.setServed(r)
		r.countProblems()
		r.summarize(false)
	}
}
