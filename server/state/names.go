package state

import (
	"cmp"
	"iter"
	"slices"

	"github.com/isthmus-mesh/isthmus/server/state/names"
	"github.com/isthmus-mesh/isthmus/server/state/record"
)

func newNames(d *DB) *names.Names[*Record] {
	return names.New(&d.book, names.Of[*Record]{
		Name: (*Record).Name, Next: func(r *Record) **Record { return &r.next }, Compare: precedence,
		Replaces: func(r, old *Record) bool { return old.isOf(r.kind.registry) && r.isClaim() },
		IsListed: func(r *Record) bool { return r.marked(isServed) || r.Is(record.Tombstone) },
	})
}

// precedence orders the records of one name: by registry, then derived records,
// then the tombstone.
func precedence(a, b *Record) int {
	rank := func(r *Record) int {
		switch {
		case r.Is(record.Tombstone):
			return 2
		case r.Is(record.Derived):
			return 1
		}
		return 0
	}
	of := rank(a)
	if c := of - rank(b); c != 0 || of == 2 {
		return c
	}
	if of == 1 {
		return cmp.Compare(a.Sum(), b.Sum())
	}
	return cmp.Compare(a.kind.registry.order, b.kind.registry.order)
}

// claim returns the claim of a registry on a name, nil if it has none.
func (t *table) claim(name string, registry *Registry) *Record {
	r := t.Head(name)
	for r != nil && !r.isOf(registry) {
		r = r.next
	}
	return r
}

// claimsShared returns the committed claims on a name, without derived records.
// The caller holds the book for reading.
func (t *table) claimsShared(name string) []*Record {
	return slices.DeleteFunc(t.Shared(name), func(r *Record) bool { return !r.isClaim() })
}

// claimShared returns the committed claim of a registry on a name, nil if it
// has none. The caller holds the book for reading.
func (t *table) claimShared(name string, registry *Registry) *Record {
	for _, r := range t.Shared(name) {
		if r.isOf(registry) {
			return r
		}
	}
	return nil
}

// services yields all ServiceEntries of services.
func (t *table) services() iter.Seq[*Record] {
	return func(yield func(*Record) bool) {
		for c := range t.All() {
			if c.parts != nil && !yield(c) {
				return
			}
		}
	}
}

// put adds a record to those of its name, in place of the claim of the same
// registry.
func (t *table) put(c *Record) {
	if old := t.Put(c); old != nil {
		c.mark(isServed, old.marked(isServed))
		c.mark(isShadowed, old.marked(isShadowed))
	}
}
