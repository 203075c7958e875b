package state

import (
	"cmp"
	"iter"
	"slices"

	"github.com/isthmus-mesh/isthmus/server/state/book"
	"github.com/isthmus-mesh/isthmus/server/state/record"
)

// names finds the claims on each name of a collection. A batch begins with each
// name that it touches, so that readers see the name as it was.
type names struct {
	book.Draft[string, committed]
	book  *book.Book
	index map[string]*Record // the first claim on each name
}

func newNames(d *DB) *names {
	return &names{book.NewDraft[string, committed](&d.book), &d.book, make(map[string]*Record)}
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
	if t.Has(name) {
		return nil, false
	}
	c := committed{current: t.current(name), head: t.index[name]}
	if c.head != nil && c.head.next != nil {
		c.all = claimsOn(c.head)
	}
	t.Begin(name, c)
	return c.current, true
}

// currentShared returns what the logs have of a name. The caller holds the book
// for reading.
func (t *names) currentShared(name string) *Record {
	if c, changing := t.Shared(name); changing {
		return c.current
	}
	return t.current(name)
}

// claimsShared returns the committed claims on a name, without derived records.
// The caller holds the book for reading.
func (t *names) claimsShared(name string) []*Record {
	c, changing := t.Shared(name)
	switch {
	case !changing:
		c.all = claimsOn(t.index[name])
	case c.all == nil && c.head != nil:
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

// services yields all ServiceEntries of services.
func (t *names) services() iter.Seq[*Record] {
	return func(yield func(*Record) bool) {
		for _, c := range t.index {
			for ; c != nil; c = c.next {
				if c.parts != nil && !yield(c) {
					return
				}
			}
		}
	}
}

// put adds a record to those of its name, in place of the claim of the same
// registry.
func (t *names) put(c *Record) {
	name := c.Name()
	var before *Record
	r := t.index[name]
	for r != nil && precedence(r, c) < 0 {
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
	t.book.Change(func() { t.index[name] = c })
}

// drop removes a record from those of its name, and the name with the last one.
func (t *names) drop(c *Record) {
	name := c.Name()
	t.book.Change(func() {
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
	t.book.Change(func() {
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
