package changelog

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
)

// An index has what was put last under each name, whatever is evicted or
// cleared, and so has a reader at any pace.
func TestIndexModel(t *testing.T) {
	type entry struct{ name, text string }
	for seed := range uint64(200) {
		r := rand.New(rand.NewPCG(seed, 6))
		var x Index[entry]
		var lock sync.Mutex
		var c Cursor
		want, read := map[string]string{}, map[string]string{}
		for step := range 200 {
			e := entry{fmt.Sprint("n", r.IntN(20)), fmt.Sprint(step)}
			switch was, removed, listed := x.Find(e.name); {
			case r.IntN(60) == 0:
				x.Clear()
				clear(want)
			case listed && !removed && r.IntN(8) == 0:
				x.Update(e.name, entry{e.name, was.text})
			default:
				gone := r.IntN(3) == 0
				x.Put(e.name, e, gone, 4, func(e entry) string { return e.name })
				if delete(want, e.name); !gone {
					want[e.name] = e.text
				}
			}
			got := map[string]string{}
			for name := range x.Names() {
				if e, removed, listed := x.Find(name); !listed || e.name != name {
					t.Fatalf("seed %d: %s is %+v, listed %v", seed, name, e, listed)
				} else if !removed {
					got[name] = e.text
				}
			}
			if n := len(slices.Collect(x.Names())); !maps.Equal(want, got) || n-len(got) > 4 || x.IsEmpty() != (n == 0) {
				t.Fatalf("seed %d, step %d: %v, want %v", seed, step, got, want)
			}
			if r.IntN(10) > 0 {
				continue
			}
			for again := true; again; {
				x.Follow(&lock, &x.Revision, &c, func(of Change[entry]) bool {
					if delete(read, of.Entry.name); !of.Removed {
						read[of.Entry.name] = of.Entry.text
					}
					return true
				})
				if again = c.Lost; again {
					c = Cursor{}
					clear(read)
				}
			}
			if !maps.Equal(want, read) {
				t.Fatalf("seed %d, step %d: read %v, want %v", seed, step, read, want)
			}
		}
	}
}
