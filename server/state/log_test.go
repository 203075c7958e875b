package state

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/isthmus-mesh/isthmus/plugin/collection"
	pluginv1 "github.com/isthmus-mesh/isthmus/plugin/proto/isthmus/plugin/v1"
	"github.com/isthmus-mesh/isthmus/server/encode"
)

// chunk is more names than are read under one lock.
const chunk = 256

var routeKind = Kind{Collection: routes}

// change is a change as a test writes it.
type change struct {
	Name, Host string // Host is "" for a removal
	Revision   Revision
}

func (e env) changes(c *Cursor) (out []change) {
	e.t.Helper()
	for ch := range e.Changes(routeKind, c) {
		out = append(out, change{ch.Name, e.host(ch.Record), ch.Revision})
	}
	return out
}

// host returns the host of a route, "" for nil.
func (e env) host(r *Record) string {
	if r == nil {
		return ""
	}
	return encode.Hosts(r.Spec())[0] // field 1 of a VirtualService, too
}

func (e env) route(name, host string) {
	if host == "" {
		e.Registry("dc1").Apply(&pluginv1.WatchResponse{Removals: []*pluginv1.Removal{gone(routes, name)}})
		return
	}
	e.Registry("dc1").Apply(upserts(route(name, host)))
}

// A change moves its name to the end of the log; each name is there once, the
// oldest change first.
func TestChangesHaveEachNameOnce(t *testing.T) {
	e := newEnv(t, Options{}, "dc1")
	for _, name := range []string{"ns/a", "ns/b", "ns/c"} {
		e.route(name, "1")
	}
	c := Cursor{}
	e.changes(&c)
	for _, s := range [][2]string{{"ns/b", "2"}, {"ns/a", "2"}, {"ns/b", "3"}, {"ns/c", ""}} {
		e.route(s[0], s[1])
	}
	want := []change{{"ns/a", "2", 5}, {"ns/b", "3", 6}, {"ns/c", "", 7}}
	if d := cmp.Diff(want, e.changes(&c)); d != "" || c.Revision != 7 {
		t.Errorf("at %d (-want +got):\n%s", c.Revision, d)
	}
	if got := e.changes(&c); len(got) > 0 || c.Revision != 7 {
		t.Errorf("at %d: %v, want nothing", c.Revision, got)
	}
	if d := cmp.Diff([]change{{"ns/a", "2", 5}, {"ns/b", "3", 6}}, e.changes(&Cursor{})); d != "" {
		t.Errorf("from the beginning (-want +got):\n%s", d)
	}
}

// What changes nothing costs no revision and wakes no reader.
func TestNoOp(t *testing.T) {
	e := newEnv(t, Options{}, "dc1")
	e.route("ns/a", "1")
	wake := e.Changed()
	e.route("ns/a", "1")
	e.route("ns/b", "")
	if e.Revision() != 1 {
		t.Errorf("revision %d, want 1", e.Revision())
	}
	select {
	case <-wake:
		t.Error("a batch without a change woke its readers")
	default:
	}
	e.route("ns/a", "2")
	select {
	case <-wake:
	default:
		t.Error("a change did not wake its readers")
	}
}

// A reader whose cursor lies before a removal that is forgotten is told so; one
// behind it is not, and one that begins does not mind.
func TestTombstonesAreBounded(t *testing.T) {
	e := newEnv(t, Options{Tombstones: 2}, "dc1")
	for _, host := range []string{"1", ""} { // the removal of revision 4 is forgotten
		for _, name := range []string{"ns/a", "ns/b", "ns/c"} {
			e.route(name, host)
		}
	}
	lost, behind, first := At(3), At(4), Cursor{}
	if got := e.changes(&lost); !lost.Lost || len(got) > 0 {
		t.Errorf("from 3: lost %t, %v", lost.Lost, got)
	}
	want := []change{{"ns/b", "", 5}, {"ns/c", "", 6}}
	if d := cmp.Diff(want, e.changes(&behind)); d != "" || behind.Lost {
		t.Errorf("from 4: lost %t (-want +got):\n%s", behind.Lost, d)
	}
	if got := e.changes(&first); len(got) > 0 || first.Lost || first.Revision != 6 {
		t.Errorf("from the beginning: lost %t, at %d, %v", first.Lost, first.Revision, got)
	}
	if n := e.tables[routes].Len(); n != 2 {
		t.Errorf("%d names are remembered, want 2", n)
	}
}

// A listing is read while the state changes: what is there at the end has been
// seen, what is gone has not or is removed, and stopping costs nothing.
func TestChangesAreLazy(t *testing.T) {
	e := newEnv(t, Options{}, "dc1")
	for n := range 3 * chunk {
		e.route(fmt.Sprintf("ns/r%d", n), "1")
	}
	have := map[string]string{}
	c := Cursor{}
	seen := 0
	for stopped := true; stopped; {
		stopped = false
		for ch := range e.Changes(routeKind, &c) {
			if seen++; ch.Removed {
				delete(have, ch.Name)
			} else {
				have[ch.Name] = e.host(ch.Record)
			}
			switch seen {
			case 10:
				e.route("ns/r5", "2")  // was seen
				e.route("ns/r6", "")   // was seen
				e.route("ns/r700", "") // was not
				e.route("ns/new", "3")
			case 300:
				stopped = true
			}
			if stopped {
				break
			}
		}
	}
	want := map[string]string{}
	for ch := range e.Changes(routeKind, &Cursor{}) {
		want[ch.Name] = e.host(ch.Record)
	}
	if d := cmp.Diff(want, have); d != "" {
		t.Errorf("(-state +reader):\n%s", d)
	}
	if most := 3*chunk + 4; seen > most {
		t.Errorf("%d changes were seen, at most %d were to be seen", seen, most)
	}
}

// Over random runs the state agrees with plain maps, and every reader that
// follows it, however seldom it looks and wherever it stops, ends with the same
// content.
func TestReadersModel(t *testing.T) {
	for seed := range uint64(12) {
		t.Run(strconv.FormatUint(seed, 10), func(t *testing.T) {
			r := rand.New(rand.NewPCG(seed, 1))
			e := newEnv(t, Options{Tombstones: 1 + r.IntN(20)}, "dc1")
			model := map[string]string{}
			type reader struct {
				cursor Cursor
				have   map[string]string
			}
			readers := make([]*reader, 6)
			for i := range readers {
				readers[i] = &reader{have: map[string]string{}}
			}
			catchUp := func(rd *reader, stop bool) {
				last := rd.cursor.Revision
				for ch := range e.Changes(routeKind, &rd.cursor) {
					if ch.Revision <= last {
						t.Fatalf("revisions do not grow: %d after %d", ch.Revision, last)
					}
					if last = ch.Revision; ch.Removed {
						delete(rd.have, ch.Name)
					} else {
						rd.have[ch.Name] = e.host(ch.Record)
					}
					if stop && r.IntN(4) == 0 {
						return
					}
				}
				if rd.cursor.Lost {
					rd.cursor, rd.have = Cursor{}, map[string]string{}
				}
			}
			for range 1000 {
				m := &pluginv1.WatchResponse{}
				named := map[string]bool{}
				before, want := e.Revision(), 0
				for range r.IntN(5) {
					name := "ns/" + strconv.Itoa(r.IntN(40))
					if named[name] {
						continue
					}
					named[name] = true
					old, host := model[name], strconv.Itoa(r.IntN(3))
					if r.IntN(3) == 0 {
						m.Removals = append(m.Removals, gone(routes, name))
						delete(model, name)
					} else {
						m.Upserts = append(m.Upserts, route(name, host))
						model[name] = host
					}
					if old != model[name] {
						want++
					}
				}
				e.Registry("dc1").Apply(m)
				if e.Revision() != before+Revision(want) {
					t.Fatalf("%v cost %d revisions, want %d", m, e.Revision()-before, want)
				}
				if r.IntN(10) == 0 {
					catchUp(readers[r.IntN(len(readers))], true)
				}
			}
			for _, rd := range readers {
				for range 2 { // one that is lost begins again
					catchUp(rd, false)
				}
				if d := cmp.Diff(model, rd.have); d != "" {
					t.Errorf("reader (-model +reader):\n%s", d)
				}
			}
			if got := e.Len(routeKind); got != len(model) {
				t.Errorf("Len = %d, want %d", got, len(model))
			}
		})
	}
}

// Readers and writers at once: each reader ends with what the writers left, and
// sees each batch whole.
func TestConcurrentReaders(t *testing.T) {
	e := newEnv(t, Options{Tombstones: 8}, "dc1")
	const writers, rounds = 4, 300
	done := make(chan struct{})
	var readers, writing sync.WaitGroup
	for range 4 {
		readers.Go(func() {
			have, c := map[string]string{}, Cursor{}
			for {
				wake := e.Changed()
				for ch := range e.Changes(routeKind, &c) {
					if ch.Removed {
						delete(have, ch.Name)
					} else {
						have[ch.Name] = e.host(ch.Record)
					}
				}
				if c.Lost {
					have, c = map[string]string{}, Cursor{}
					continue
				}
				for w := range writers { // a writer's two names always change together
					if a, b := have[fmt.Sprint("ns/a", w)], have[fmt.Sprint("ns/b", w)]; a != b {
						t.Errorf("half a batch: a%d = %q, b%d = %q", w, a, w, b)
						return
					}
				}
				select {
				case <-wake:
				case <-done:
					if c.Revision == e.Revision() {
						return
					}
				}
			}
		})
	}
	for w := range writers {
		writing.Go(func() {
			r := rand.New(rand.NewPCG(uint64(w), 2))
			a, b := fmt.Sprint("ns/a", w), fmt.Sprint("ns/b", w)
			for i := range rounds {
				if r.IntN(4) == 0 {
					e.Registry("dc1").Apply(&pluginv1.WatchResponse{Removals: []*pluginv1.Removal{gone(routes, a), gone(routes, b)}})
				} else {
					host := strconv.Itoa(i)
					e.Registry("dc1").Apply(upserts(route(a, host), route(b, host)))
				}
			}
		})
	}
	writing.Wait()
	close(done)
	readers.Wait()
}

// BenchmarkChangesOne is one change and its pick-up by one reader at different
// sizes: the cost must not grow with the size.
func BenchmarkChangesOne(b *testing.B) {
	for _, size := range []int{1_000, 100_000} {
		b.Run(fmt.Sprintf("size=%d", size), func(b *testing.B) {
			e := newEnv(b, Options{}, "dc1")
			m := [2][]*pluginv1.WatchResponse{}
			for n := range size {
				name := fmt.Sprintf("ns/service-%d", n)
				e.route(name, "0")
				if n%(size/1000) == 0 {
					m[0], m[1] = append(m[0], upserts(route(name, "1"))), append(m[1], upserts(route(name, "2")))
				}
			}
			c := At(e.Revision())
			b.ReportAllocs()
			i := 0
			for b.Loop() {
				e.Registry("dc1").Apply(m[i/1000&1][i%1000])
				n := 0
				for range e.Changes(routeKind, &c) {
					n++
				}
				if n != 1 {
					b.Fatalf("%d changes", n)
				}
				i++
			}
		})
	}
}

// Names that two registries had for a while are remembered up to a bound. Who
// reads claims and missed one of them learns so, who did not reads on.
func TestClaimsAreBounded(t *testing.T) {
	e := newEnv(t, Options{Tombstones: 4}, "a", "b")
	a, b := e.Registry("a"), e.Registry("b")
	read := func(c *ClaimsCursor) (names []string) {
		for claims := range e.Claims(collection.ServiceEntry, c) {
			names = append(names, fmt.Sprint(claims.Name, len(claims.Records)))
		}
		return names
	}
	var early, late ClaimsCursor
	a.Apply(upserts(entry("ns/kept", "kept.example.org")))
	b.Apply(upserts(entry("ns/kept", "kept.example.org")))
	read(&early)
	for n := range 40 {
		name := fmt.Sprintf("ns/s%d", n)
		a.Apply(upserts(entry(name, name+".example.org")))
		b.Apply(upserts(entry(name, name+".example.org")))
		if got := read(&late); !slices.Contains(got, name+"2") || late.Lost {
			t.Fatalf("%s: %q, lost %v", name, got, late.Lost)
		}
		b.Apply(removed(collection.ServiceEntry, name))
		if got := read(&late); !slices.Equal(got, []string{name + "1"}) || late.Lost {
			t.Fatalf("%s without b: %q, lost %v", name, got, late.Lost)
		}
	}
	if n := len(slices.Collect(e.tables[collection.ServiceEntry].asides.Names())); n > 5 {
		t.Errorf("%d names are remembered", n)
	}
	if read(&early); !early.Lost {
		t.Error("who missed 36 changes does not learn so")
	}
	if got := read(&ClaimsCursor{}); !slices.Contains(got, "ns/kept2") || !slices.Contains(got, "ns/s31") {
		t.Errorf("from the start on: %q", got)
	}
}
