package state

import (
	"slices"

	"github.com/isthmus-mesh/isthmus/plugin/collection"
	"github.com/isthmus-mesh/isthmus/server/state/conflict"
	"github.com/isthmus-mesh/isthmus/server/state/record"
)

// lineOfShadow is a claim that the batch shadowed, with the owner of the name.
type lineOfShadow struct {
	record *Record
	owner  *Registry
}

// eligible reports whether the record would be served if its registry had
// precedence. Instances of a service that is not served are not eligible.
func (r *Record) eligible() bool {
	return !r.Is(record.Tombstone) && (!r.IsInstance() || r.Is(record.Derived) || !r.of.aside && !r.of.isReplaced())
}

// settle selects the served claim on a name and marks the shadowed ones. For
// ServiceEntries it applies the result of [batch.decide].
func (b *batch) settle(t *table, name string) {
	d := b.db
	isEntry := t.name == collection.ServiceEntry
	aside := func(c *Record) bool { return isEntry && d.verdictOf(c).IsAside() }
	var owner *Record
	for c := t.Head(name); c != nil; c = c.next {
		if c.eligible() && !aside(c) {
			owner = c
			break
		}
	}
	for c := t.Head(name); c != nil; c = c.next {
		if c.Is(record.Tombstone) {
			continue
		}
		shadowed := c != owner && c.eligible() && !c.Is(record.Derived)
		if isEntry {
			v := d.verdictOf(c)
			shadowed = v != nil && v.Outcome == conflict.Shadowed
		}
		r := c.kind.registry
		if d.setServed(c, c == owner) || c.marked(isShadowed) != shadowed {
			b.concern(r)
		}
		if d.setShadowed(c, shadowed) && shadowed && owner != nil && owner.kind.registry != r {
			b.fresh = append(b.fresh, lineOfShadow{c, owner.kind.registry})
		}
		if c.parts != nil && c.of.aside != aside(c) {
			c.of.aside = !c.of.aside
			c.of.each(func(i *Record) { b.touch(d.tables[collection.WorkloadEntry], i.Name()) })
		}
	}
}

// concern notes a registry whose counts the batch changes.
func (b *batch) concern(r *Registry) {
	if r != b.r && !slices.Contains(b.others, r) {
		b.others = append(b.others, r)
	}
}

// setServed marks a claim as served, and reports whether that is a change.
func (d *DB) setServed(c *Record, on bool) bool {
	return c.count(isServed, on, func(r *Registry, n int) { r.served[c.Collection()] += n })
}

// setShadowed marks a claim as shadowed, and reports whether that is a change.
func (d *DB) setShadowed(c *Record, on bool) bool {
	return c.count(isShadowed, on, func(r *Registry, n int) { r.shadowed += n })
}

// count marks a claim, and adds the change to a count of its registry.
func (r *Record) count(m marks, on bool, add func(r *Registry, n int)) bool {
	switch {
	case r.marked(m) == on:
		return false
	case on:
		add(r.kind.registry, 1)
	default:
		add(r.kind.registry, -1)
	}
	r.mark(m, on)
	return true
}

// tellShadowed updates the counters of other registries and logs newly shadowed
// claims.
func (b *batch) tellShadowed() {
	for _, l := range b.fresh {
		r := l.record.kind.registry
		if v := b.db.verdictOf(l.record); l.record.Collection() == collection.ServiceEntry && v != nil && v.Host != "" {
			continue // logged by tellHosts
		}
		if r.line() {
			r.log.Warn("another registry owns the name; shadowed", "collection", l.record.Collection(), "name", l.record.Name(), "owner", l.owner.name)
		}
	}
	b.tellHosts()
	for _, r := range b.others {
		r.summarize(false)
	}
}
