package names

import (
	"cmp"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/isthmus-mesh/isthmus/server/state/book"
)

// rec is a record in tests, of a registry that takes precedence by its order.
type rec struct {
	name   string
	owner  *int
	listed bool
	next   *rec
}

func compare(a, b *rec) int { return cmp.Compare(*a.owner, *b.owner) }

func (r *rec) replaces(s *rec) bool { return r.owner == s.owner }

var of = Of[*rec]{
	Name: func(r *rec) string { return r.name }, Next: func(r *rec) **rec { return &r.next }, Compare: compare,
	Replaces: (*rec).replaces, IsListed: func(r *rec) bool { return r.listed },
}

// The writer finds the records of each name in order, and readers find those of
// the last commit, whatever is put, dropped and sorted.
func TestModel(t *testing.T) {
	for seed := range uint64(300) {
		r := rand.New(rand.NewPCG(seed, 7))
		var b book.Book
		n := New(&b, of)
		orders := []int{0, 1, 2, 3}
		type seen struct {
			listed *rec
			all    []*rec
		}
		want, committed := map[string][]*rec{}, map[string]seen{}
		now := func(name string) seen {
			var s seen
			for _, c := range want[name] {
				if s.all = append(s.all, c); s.listed == nil && c.listed {
					s.listed = c
				}
			}
			return s
		}
		begin := func(name string) {
			is := now(name)
			if listed, first := n.Begin(name); first && listed != is.listed {
				t.Fatalf("seed %d: %v is listed, want %v", seed, listed, is.listed)
			}
		}
		for step := range 200 {
			name := fmt.Sprint("n", r.IntN(5))
			switch r.IntN(8) {
			case 0, 1, 2, 3:
				begin(name)
				c := &rec{name: name, owner: &orders[r.IntN(4)], listed: r.IntN(2) == 0}
				var replaced *rec
				if i := slices.IndexFunc(want[name], c.replaces); i >= 0 {
					replaced = want[name][i]
					want[name] = slices.Delete(slices.Clone(want[name]), i, i+1)
				}
				want[name] = append(want[name], c)
				slices.SortFunc(want[name], compare)
				if old := n.Put(c); old != replaced {
					t.Fatalf("seed %d: %v is replaced, want %v", seed, old, replaced)
				}
			case 4, 5:
				if len(want[name]) == 0 {
					continue
				}
				begin(name)
				i := r.IntN(len(want[name]))
				n.Drop(want[name][i])
				n.Drop(want[name][i]) // without effect
				if want[name] = slices.Delete(want[name], i, i+1); len(want[name]) == 0 {
					delete(want, name)
				}
			case 6:
				r.Shuffle(4, func(i, j int) { orders[i], orders[j] = orders[j], orders[i] })
				for name := range want {
					sorted := slices.IsSortedFunc(want[name], compare)
					if n.Sort(name, func() { begin(name) }) == sorted {
						t.Fatalf("seed %d: %s is sorted %v", seed, name, sorted)
					}
					slices.SortFunc(want[name], compare)
				}
			case 7:
				if r.IntN(4) == 0 {
					begin(name)
					var gone []*rec
					n.Clear(name, func(c *rec) { gone = append(gone, c) })
					if !slices.Equal(gone, want[name]) {
						t.Fatalf("seed %d: %v are dropped, want %v", seed, gone, want[name])
					}
					delete(want, name)
				}
				b.Commit()
				clear(committed)
				for name := range want {
					committed[name] = now(name)
				}
			}
			count := 0
			for range n.All() {
				count++
			}
			for i := range 5 {
				name := fmt.Sprint("n", i)
				if !slices.Equal(n.Of(name), want[name]) || n.Listed(name) != now(name).listed {
					t.Fatalf("seed %d, step %d: %s has %v, want %v", seed, step, name, n.Of(name), want[name])
				}
				was := committed[name]
				if !slices.Equal(n.Shared(name), was.all) || n.ListedShared(name) != was.listed {
					t.Fatalf("seed %d, step %d: readers find %v of %s, want %v", seed, step, n.Shared(name), name, was.all)
				}
				count -= len(want[name])
			}
			if count != 0 || n.Len() != len(want) {
				t.Fatalf("seed %d, step %d: %d records too many, and %d names, want %d", seed, step, count, n.Len(), len(want))
			}
		}
		b.Commit()
		if n.Begun() > 0 {
			t.Fatalf("seed %d: %d names of no batch", seed, n.Begun())
		}
	}
}
