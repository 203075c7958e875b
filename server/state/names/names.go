// Package names finds the records of each name, in order of precedence.
//
// Most names have one record. So the records of a name are a list of which
// [Names] has the head, and each record the next one. A writer begins with each
// name that it changes; what readers get of it, until the book is committed, is
// what it was.
package names

import (
	"iter"
	"maps"
	"slices"

	"github.com/isthmus-mesh/isthmus/server/state/book"
)

// Of says what a record is. The zero R is none.
type Of[R comparable] struct {
	Name func(R) string
	// Next has the record that follows one under its name.
	Next func(R) *R
	// Compare orders the records of one name.
	Compare func(a, b R) int
	// Replaces reports whether a record takes the place of another one of its
	// name.
	Replaces func(r, old R) bool
	// IsListed reports whether a record is what the logs have under its name.
	IsListed func(R) bool
}

// Names has the records of names.
type Names[R comparable] struct {
	of    Of[R]
	draft book.Draft[string, committed[R]]
	book  *book.Book
	heads map[string]R
}

// committed is what readers see of a name.
type committed[R any] struct {
	listed, head R
	all          []R // nil if there is at most one
}

// New returns no names.
func New[R comparable](b *book.Book, of Of[R]) *Names[R] {
	return &Names[R]{of, book.NewDraft[string, committed[R]](b), b, make(map[string]R)}
}

// Len returns the number of names.
func (n *Names[R]) Len() int { return len(n.heads) }

// Begun returns the number of names that the batch in progress has begun with.
func (n *Names[R]) Begun() int { return n.draft.Begun() }

// Grow makes room for as many names, if there are none.
func (n *Names[R]) Grow(size int) { n.heads = make(map[string]R, size) }

// Begin retains what readers see of a name that a batch is about to change, and
// returns what the logs have of it. It is false if the batch has begun with the
// name before.
func (n *Names[R]) Begin(name string) (listed R, first bool) {
	var none R
	if n.draft.Has(name) {
		return none, false
	}
	c := committed[R]{listed: n.Listed(name), head: n.heads[name]}
	if c.head != none && *n.of.Next(c.head) != none {
		c.all = n.Of(name)
	}
	n.draft.Begin(name, c)
	return c.listed, true
}

// Head returns the first record of a name.
func (n *Names[R]) Head(name string) R { return n.heads[name] }

// Sorted returns the names in order.
func (n *Names[R]) Sorted() []string { return slices.Sorted(maps.Keys(n.heads)) }

// Heads yields the first record of each name, by name.
func (n *Names[R]) Heads() iter.Seq2[string, R] { return maps.All(n.heads) }

// All yields all records.
func (n *Names[R]) All() iter.Seq[R] {
	return func(yield func(R) bool) {
		var none R
		for _, r := range n.heads {
			for ; r != none; r = *n.of.Next(r) {
				if !yield(r) {
					return
				}
			}
		}
	}
}

// Of returns the records of a name.
func (n *Names[R]) Of(name string) (all []R) {
	var none R
	for r := n.heads[name]; r != none; r = *n.of.Next(r) {
		all = append(all, r)
	}
	return all
}

// Listed returns what the logs have under a name.
func (n *Names[R]) Listed(name string) R {
	var none R
	r := n.heads[name]
	for r != none && !n.of.IsListed(r) {
		r = *n.of.Next(r)
	}
	return r
}

// ListedShared returns what the logs have under a name, as it was committed.
// The caller holds the book for reading.
func (n *Names[R]) ListedShared(name string) R {
	if c, changing := n.draft.Shared(name); changing {
		return c.listed
	}
	return n.Listed(name)
}

// Shared returns the records of a name, as they were committed. The caller
// holds the book for reading.
func (n *Names[R]) Shared(name string) []R {
	var none R
	switch c, changing := n.draft.Shared(name); {
	case !changing:
		return n.Of(name)
	case c.all == nil && c.head != none:
		return []R{c.head}
	default:
		return slices.Clone(c.all)
	}
}

// Put adds a record to those of its name, and returns the one that it replaces.
// The batch has begun with the name.
func (n *Names[R]) Put(c R) (old R) {
	name := n.of.Name(c)
	var none, before R
	r := n.heads[name]
	for r != none && n.of.Compare(r, c) < 0 {
		before, r = r, *n.of.Next(r)
	}
	if *n.of.Next(c) = r; r != none && n.of.Replaces(c, r) {
		old, *n.of.Next(c) = r, *n.of.Next(r)
	}
	if before != none {
		*n.of.Next(before) = c // nobody else reads it
	} else {
		n.book.Change(func() { n.heads[name] = c })
	}
	return old
}

// Drop removes a record from those of its name, and the name with the last one.
func (n *Names[R]) Drop(c R) {
	name := n.of.Name(c)
	n.book.Change(func() {
		var none R
		next := *n.of.Next(c)
		for r := n.heads[name]; r != none && r != c; r = *n.of.Next(r) {
			if *n.of.Next(r) == c {
				*n.of.Next(r) = next
				return
			}
		}
		switch {
		case n.heads[name] != c:
		case next == none:
			delete(n.heads, name)
		default:
			n.heads[n.of.Name(next)] = next // so that the key does not retain c's memory
		}
	})
}

// Clear drops all records of a name, after it calls f with each.
func (n *Names[R]) Clear(name string, f func(R)) {
	var none R
	r, known := n.heads[name]
	if !known {
		return
	}
	for ; r != none; r = *n.of.Next(r) {
		f(r)
	}
	n.book.Change(func() { delete(n.heads, name) })
}

// Sort sorts the records of a name again, and reports whether that changes
// anything. Begin is called before that.
func (n *Names[R]) Sort(name string, begin func()) bool {
	all := n.Of(name)
	if slices.IsSortedFunc(all, n.of.Compare) {
		return false
	}
	begin()
	slices.SortStableFunc(all, n.of.Compare)
	n.book.Change(func() {
		var next R
		for _, r := range slices.Backward(all) {
			*n.of.Next(r), next = next, r
		}
		n.heads[name] = next
	})
	return true
}
