package plugin

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/proto"
	mcp "istio.io/api/mcp/v1alpha1"

	"github.com/isthmus-mesh/isthmus/plugin/collection"
	"github.com/isthmus-mesh/isthmus/plugin/registry"
)

// names returns what a mirror has, in short.
func (m *mirror) names() []string {
	var out []string
	for id := range m.resources {
		out = append(out, strings.ToLower(id.collection[len("networking.istio.io/"):][:1])+" "+id.name)
	}
	slices.Sort(out)
	return out
}

// restarted returns a catalog of a new process with limits, and its stream to a
// host that has the mirror's resources.
func restarted(m *mirror, l limits) (*catalog, *cursor) {
	c := newCatalog(named{plainTranslator{}}, []string{collection.ServiceEntry, collection.WorkloadEntry}, l)
	m.begin()
	return c, c.read()
}

// wantNames compares what a mirror has.
func wantNames(t *testing.T, when string, m *mirror, want ...string) {
	t.Helper()
	if d := cmp.Diff(want, m.names()); d != "" {
		t.Errorf("%s (-want +got):\n%s", when, d)
	}
}

// A published resource that is invalid when it is listed anew stays as it was,
// until it is valid or withdrawn; one that has no legible name keeps
// everything.
func TestCatalogKeepsInvalid(t *testing.T) {
	t.Parallel()
	m := newMirror()
	c, r := restarted(m, limits{})
	for _, name := range []string{"ns/a", "ns/b", "ns/c"} {
		c.Publish(publishedEntry(name, "good.example.org"))
	}
	c.Synced()
	drain(t, r, m)
	before := maps.Clone(m.resources)

	c, r = restarted(m, limits{})
	c.Publish(publishedEntry("ns/a", "not a host"))
	c.Publish(publishedEntry("ns/b", "not a host"))
	c.Publish(publishedEntry("ns/never", "not a host"))
	c.Synced()
	drain(t, r, m)
	wantNames(t, "kept", m, "s ns/a", "s ns/b")
	for id, text := range m.resources {
		if text != before[id] {
			t.Errorf("%v is %q, it was %q", id, text, before[id])
		}
	}
	// A new stream of the same process says the same.
	m.begin()
	r = c.read()
	drain(t, r, m)
	wantNames(t, "kept on a new stream", m, "s ns/a", "s ns/b")
	c.Withdraw(collection.ServiceEntry, "ns/a")
	c.Publish(publishedEntry("ns/b", "mended.example.org"))
	drain(t, r, m)
	wantNames(t, "one withdrawn, one mended", m, "s ns/b")
	if text := fmt.Sprint(m.resources); !strings.Contains(text, "mended.example.org") {
		t.Errorf("served: %s", text)
	}
	c.Withdraw(collection.ServiceEntry, "ns/b")
	drain(t, r, m)
	wantNames(t, "withdrawn", m)
	if c.Withdraw(collection.ServiceEntry, "ns/never"); len(c.slots) != 1 || len(c.kept) != 0 {
		t.Errorf("%d slots, one of them to be sent, and %d names are kept", len(c.slots), len(c.kept))
	}

	for name, res := range map[string]*mcp.Resource{
		"nothing": nil, "no name": {}, "an illegal name": publishedEntry("ns/A_1", "good.example.org"), "no text": publishedEntry("ns/\xff", "good.example.org"),
	} {
		m := newMirror()
		m.resources[resourceID{collection.ServiceEntry, "ns/a"}] = "|"
		c, r := restarted(m, limits{})
		c.Publish(res)
		c.Synced()
		for _, resp := range drain(t, r, m) {
			if _, err := proto.Marshal(resp); err != nil {
				t.Errorf("%s: %v", name, err)
			}
		}
		wantNames(t, name, m, "s ns/a")
	}
}

// What a limit leaves out of a new listing stays as it was, a service with all
// its instances; once there is room for it, or it is gone, nothing of what was
// kept is left.
func TestCatalogKeepsBeyondLimits(t *testing.T) {
	t.Parallel()
	for name, l := range map[string]limits{"resources": {resources: 4}, "bytes": {bytes: 600}} {
		t.Run(name, func(t *testing.T) {
			m := newMirror()
			c, r := restarted(m, limits{})
			c.Set(service1("web"), instances("1", "2"))
			c.Set(service1("api"), instances("1", "2"))
			c.Set(service1("old"), instances("1"))
			c.Publish(publishedEntry("ns/pub", "good.example.org"))
			c.Synced()
			drain(t, r, m)

			c, r = restarted(m, l)
			c.Set(service1("new"), instances("1", "2", "3"))
			for _, name := range []string{"web", "api", "none"} {
				c.Set(service1(name), instances("2", "3"))
			}
			c.Publish(publishedEntry("ns/pub", strings.Repeat("h", 60)+".example.org"))
			c.Synced()
			drain(t, r, m)
			fresh := []string{"s ns/new", "w ns/new-1", "w ns/new-2", "w ns/new-3"}
			wantNames(t, "kept", m, "s ns/api", "s ns/new", "s ns/pub", "s ns/web", "w ns/api-1", "w ns/api-2", "w ns/new-1", "w ns/new-2", "w ns/new-3", "w ns/web-1", "w ns/web-2")

			c.Remove(registry.Key{Name: "api"})
			c.Withdraw(collection.ServiceEntry, "ns/pub")
			c.Remove(registry.Key{Name: "none"})
			drain(t, r, m)
			wantNames(t, "two gone", m, append(slices.Clone(fresh[:1]), "s ns/web", "w ns/new-1", "w ns/new-2", "w ns/new-3", "w ns/web-1", "w ns/web-2")...)
			c.Remove(registry.Key{Name: "new"})
			c.Set(service1("web"), instances("2", "3"))
			drain(t, r, m)
			wantNames(t, "there is room", m, "s ns/web", "w ns/web-2", "w ns/web-3")
			c.Remove(registry.Key{Name: "web"})
			drain(t, r, m)
			if wantNames(t, "all gone", m); len(c.slots)+len(c.kept) != 0 {
				t.Errorf("%d slots and %d kept names are left", len(c.slots), len(c.kept))
			}
		})
	}
}

// A service that there is room for later is sent in several batches if it is
// large; what it lacks goes with the last one.
func TestCatalogRelistsLargeService(t *testing.T) {
	t.Parallel()
	ids := make([]string, 2500)
	for n := range ids {
		ids[n] = fmt.Sprintf("%04d", n)
	}
	m := newMirror()
	c, r := restarted(m, limits{})
	c.Set(service1("web"), instances(ids[:2000]...))
	c.Synced()
	drain(t, r, m)
	c, r = restarted(m, limits{resources: 2010})
	c.Set(service1("new"), instances(ids[:2000]...))
	c.Set(service1("web"), instances(ids[500:]...))
	c.Synced()
	drain(t, r, m)
	c.Remove(registry.Key{Name: "new"})
	drain(t, r, m)
	c.Set(service1("web"), instances(ids[500:]...))
	most := len(m.resources)
	for n := 0; ; n++ {
		resp, err := r.next()
		if err != nil {
			t.Fatal(err)
		}
		if resp == nil {
			break
		}
		if err := m.apply(resp, plainID(c)); err != nil {
			t.Fatal(err)
		}
		if got := len(m.resources); got < 2001 {
			t.Errorf("%d resources after batch %d, there were %d", got, n, most)
		}
		if n == 0 { // what changes meanwhile is sent last
			c.Set(service1("web"), instances(append(slices.Clone(ids[500:]), "9999")...))
		}
	}
	want := []string{"s ns/web", "w ns/web-9999"}
	for _, id := range ids[500:] {
		want = append(want, "w ns/web-"+id)
	}
	slices.Sort(want)
	wantNames(t, "in the end", m, want...)
}

// Beyond a number of names none is remembered, and a listing removes nothing.
func TestCatalogKeptIsBounded(t *testing.T) {
	t.Parallel()
	m := newMirror()
	for n := range 3 {
		m.resources[resourceID{collection.ServiceEntry, fmt.Sprint("ns/s", maxKept+n)}] = "|"
	}
	c, r := restarted(m, limits{resources: 1})
	c.Set(service1("first"), nil)
	for n := range maxKept + 3 {
		c.Set(service1(fmt.Sprint("s", n)), instances("1"))
	}
	c.Synced()
	drain(t, r, m)
	wantNames(t, "kept", m, "s ns/s20000", "s ns/s20001", "s ns/s20002")
	if len(c.kept) > maxKept+1 || len(c.slots) > maxKept+1 {
		t.Errorf("%d names are remembered, %d slots", len(c.kept), len(c.slots))
	}
}

// Whatever a registry holds and a plugin cannot send, nothing goes that the
// registry has, and in the end nothing stays that it has not.
func TestCatalogKeepsAtRandom(t *testing.T) {
	t.Parallel()
	for seed := range uint64(200) {
		rnd := rand.New(rand.NewPCG(seed, 3))
		service := func() string { return fmt.Sprint("s", rnd.IntN(8)) }
		some := func() []registry.Instance {
			return instances([]string{"1", "2", "3", "4"}[:1+rnd.IntN(4)]...)
		}
		m := newMirror()
		has, pubs := map[string]bool{}, map[string]bool{}
		for range 3 { // processes
			c, r := restarted(m, limits{resources: uint64(1 + rnd.IntN(20))})
			before := maps.Clone(m.resources)
			has, pubs = map[string]bool{}, map[string]bool{}
			step := func() {
				switch name := service(); rnd.IntN(8) {
				case 0:
					c.Remove(registry.Key{Name: name})
					delete(has, name)
					if id := (resourceID{collection.ServiceEntry, "ns/" + name}); before[id] != "" {
						delete(before, id)
					}
				case 1, 2:
					c.Publish(publishedEntry("pub/"+name, []string{"good.example.org", "not a host"}[rnd.IntN(2)]))
					pubs[name] = true
				case 3:
					c.Withdraw(collection.ServiceEntry, "pub/"+name)
					delete(pubs, name)
					delete(before, resourceID{collection.ServiceEntry, "pub/" + name})
				case 4:
					for range rnd.IntN(2) {
						if resp, err := r.next(); err != nil {
							t.Fatal(err)
						} else if resp != nil {
							if err := m.apply(resp, plainID(c)); err != nil {
								t.Fatalf("seed %d: %v", seed, err)
							}
						}
					}
				case 5:
					if rnd.IntN(4) == 0 {
						m.begin()
						r = c.read()
					}
				default:
					c.Set(service1(name), some())
					has[name] = true
				}
			}
			check := func(when string) {
				for id := range before {
					name := id.name[strings.IndexByte(id.name, '/')+1:]
					all := has
					if strings.HasPrefix(id.name, "pub/") {
						all = pubs
					}
					if id.collection == collection.ServiceEntry && all[name] && m.resources[id] == "" {
						t.Fatalf("seed %d, %s: %v is gone, which the registry has; kept %v", seed, when, id, c.kept)
					}
				}
				for id := range m.resources {
					ns, name, _ := strings.Cut(id.name, "/")
					name, _, _ = strings.Cut(name, "-")
					if !map[string]map[string]bool{"ns": has, "pub": pubs}[ns][name] {
						t.Fatalf("seed %d, %s: %v is there, which the registry does not have", seed, when, id)
					}
				}
			}
			for range 30 {
				step()
			}
			c.Synced()
			drain(t, r, m)
			check("listed")
			maps.DeleteFunc(before, func(id resourceID, _ string) bool { return m.resources[id] == "" })
			for range 30 {
				step()
			}
			drain(t, r, m)
			check("later")
			// What fits is what the service is now, and nothing else.
			for name := range has {
				c.Remove(registry.Key{Name: name})
			}
			last := service()
			c.Set(service1(last), instances("9"))
			drain(t, r, m)
			for id := range m.resources {
				ofLast := id.name == "ns/"+last || id.name == "ns/"+last+"-9" || c.kept[registry.Key{Name: last}] != nil && strings.HasPrefix(id.name, "ns/"+last+"-")
				if strings.HasPrefix(id.name, "ns/") && !ofLast {
					t.Fatalf("seed %d: %v is left", seed, id)
				}
			}
			has = map[string]bool{last: true}
			if rnd.IntN(2) == 0 { // for the next process to have more to lose
				big, r2 := restarted(m, limits{})
				for n := range 8 {
					big.Set(service1(fmt.Sprint("s", n)), some())
					big.Publish(publishedEntry(fmt.Sprint("pub/s", n), "good.example.org"))
				}
				big.Synced()
				drain(t, r2, m)
			}
		}
	}
}
