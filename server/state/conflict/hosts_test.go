package conflict

import (
	"fmt"
	"iter"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/isthmus-mesh/isthmus/server/encode"
	"github.com/isthmus-mesh/isthmus/server/state/book"
)

// entryID is a registry, a blank and the name of an entry.
type entryID string

func (id entryID) Of() string {
	_, name, _ := strings.Cut(string(id), " ")
	return name
}

// world has the entries of all registries.
type world map[entryID]*Contender[entryID]

func (w world) Contender(id entryID) *Contender[entryID] {
	c, is := w[id]
	if !is {
		return nil
	}
	return &Contender[entryID]{
		ID: id, Owner: c.Owner, Registry: c.Registry, Namespace: c.Namespace, Name: c.Name, Composed: c.Composed, Spec: c.Spec,
	}
}

func (w world) Named(name string) iter.Seq[entryID] {
	return func(yield func(entryID) bool) {
		for id := range w {
			if id.Of() == name && !yield(id) {
				return
			}
		}
	}
}

// A batch decides as all entries together would be decided on, and says each
// verdict that changed.
func TestHostsModel(t *testing.T) {
	for seed := range uint64(300) {
		r := rand.New(rand.NewPCG(seed, 4))
		var b book.Book
		w := world{}
		h := NewHosts(&b, w, randomRules(r))
		told := map[entryID]Verdict[entryID]{}
		for range 40 {
			before := maps.Clone(told)
			for range r.IntN(4) {
				registry := string(rune('a' + r.IntN(3)))
				id := entryID(fmt.Sprintf("%s %c/%d", registry, 'x'+r.IntN(2), r.IntN(4)))
				old := w[id]
				var now *Contender[entryID]
				if delete(w, id); r.IntN(4) > 0 {
					now = randomEntry(r, id)
					w[id] = now
				}
				var hosts [2][]string
				composed := false
				for n, c := range []*Contender[entryID]{old, now} {
					if c != nil {
						hosts[n], composed = c.Spec.Hosts, composed || c.Composed
					}
				}
				h.Change(id, hosts[0], hosts[1], func(other entryID) bool {
					return other[0] != id[0] || composed && w[other] != nil && w[other].Composed
				})
			}
			if r.IntN(10) == 0 {
				h.Rules = randomRules(r)
				h.MarkAll()
			}
			h.Decide(func(id entryID, was, now *Verdict[entryID]) {
				if got, is := told[id]; is != (was != nil) || is && got != *was {
					t.Fatalf("seed %d: the verdict on %s was %+v, and %+v was said", seed, id, was, got)
				}
				if delete(told, id); now != nil {
					told[id] = *now
				}
			})
			var all []*Contender[entryID]
			for _, id := range slices.Sorted(maps.Keys(w)) {
				all = append(all, w.Contender(id))
			}
			contested, want := Decide(all, h.Rules), map[entryID]Verdict[entryID]{}
			for _, c := range all {
				if c.Verdict != nil {
					want[c.ID] = *c.Verdict
				}
			}
			if d := cmp.Diff(want, told); d != "" {
				t.Fatalf("seed %d: verdicts (-want +got):\n%s", seed, d)
			}
			by := map[Policy]int{}
			for _, p := range contested {
				by[p]++
			}
			for _, p := range Policies {
				if by[p] != h.By[p] {
					t.Fatalf("seed %d: %d hosts are contested by %s, want %d", seed, h.By[p], p, by[p])
				}
			}
			shared := func(want map[entryID]Verdict[entryID]) {
				for _, id := range slices.Sorted(maps.Keys(want)) {
					if v := h.VerdictShared(id); v == nil || *v != want[id] {
						t.Fatalf("seed %d: readers see %+v on %s, want %+v", seed, v, id, want[id])
					}
				}
			}
			shared(before)
			b.Commit()
			shared(told)
		}
		for id, c := range maps.Clone(w) {
			delete(w, id)
			h.Change(id, c.Spec.Hosts, nil, func(entryID) bool { return true })
		}
		h.Decide(func(entryID, *Verdict[entryID], *Verdict[entryID]) {})
		if h.Len() > 0 || !h.Peaceful() || len(h.Shared()) > 0 {
			t.Fatalf("seed %d: %d hosts, verdicts and policies of nothing", seed, h.Len())
		}
	}
}

func randomEntry(r *rand.Rand, id entryID) *Contender[entryID] {
	ns, _, _ := strings.Cut(id.Of(), "/")
	c := &Contender[entryID]{
		ID: id, Owner: int(id[0]), Registry: string(id[0]), Namespace: ns, Name: id.Of(), Composed: r.IntN(4) > 0,
		Spec: encode.Entry{Resolution: "STATIC", ExportTo: [][]string{nil, {"."}, {"x"}, {"*"}}[r.IntN(4)]},
	}
	for h := range 5 {
		if r.IntN(4) == 0 {
			c.Spec.Hosts = append(c.Spec.Hosts, fmt.Sprint("h", h))
		}
	}
	return c
}

func randomRules(r *rand.Rand) (rs Rules) {
	for h := range 5 {
		if n := r.IntN(len(Policies) + 1); n < len(Policies) {
			rs = append(rs, Rule{Hosts: []string{fmt.Sprint("h", h)}, Policy: Policies[n], Registry: []string{"", "", "a"}[r.IntN(3)]})
		}
	}
	return rs
}
