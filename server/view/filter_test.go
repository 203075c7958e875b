package view

import (
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"testing"

	gocmp "github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	networking "istio.io/api/networking/v1alpha3"

	"github.com/isthmus-mesh/isthmus/plugin/collection"
	pluginv1 "github.com/isthmus-mesh/isthmus/plugin/proto/isthmus/plugin/v1"
	"github.com/isthmus-mesh/isthmus/plugin/shard"
	"github.com/isthmus-mesh/isthmus/server/encode"
	"github.com/isthmus-mesh/isthmus/server/state"
)

// shown is the plain model of a filter: what a sink of it has to hold of all
// that there is. The registry of a resource is its namespace, and the service
// of an instance is its name up to the dot.
func shown(f Filter, all, hostOf map[string]string) map[string]string {
	out := map[string]string{}
	for name, value := range all {
		service, _, _ := strings.Cut(name, ".")
		ns, _, _ := strings.Cut(service, "/")
		host := hostOf[service]
		if len(f.Registries) > 0 && !slices.Contains(f.Registries, ns) || len(f.Namespaces) > 0 && !slices.Contains(f.Namespaces, ns) ||
			!f.Shards.All() && shard.Of(host, f.Shards.Of) != f.Shards.First ||
			len(f.Hosts) > 0 && !strings.HasSuffix(host, strings.TrimPrefix(f.Hosts[0], "*")) {
			continue
		}
		out[name] = value
	}
	return out
}

// Sinks of views, also of some that change while they are connected, end with
// what their view selects, whatever moves into and out of it.
func TestFilterModel(t *testing.T) {
	filters := []Filter{
		{},
		{Registries: []string{"a"}},
		{Namespaces: []string{"b"}},
		{Hosts: []string{"*.x.example.org"}},
		{Shards: shard.Set{First: 0, Last: 0, Of: 3}},
		{Shards: shard.Set{First: 1, Last: 1, Of: 3}},
		{Shards: shard.Set{First: 2, Last: 2, Of: 3}},
		{Registries: []string{"b"}, Shards: shard.Set{First: 1, Last: 1, Of: 2}},
	}
	const workloads = collection.WorkloadEntry
	for seed := range uint64(6) {
		t.Run(strconv.FormatUint(seed, 10), func(t *testing.T) {
			r := rand.New(rand.NewPCG(seed, 12))
			db := state.New([]string{"a", "b"}, state.Options{Tombstones: []int{5, 1000}[seed%2]}, slog.New(slog.DiscardHandler), prometheus.NewRegistry())
			for _, name := range []string{"a", "b"} {
				db.Registry(name).Apply(&pluginv1.WatchResponse{Synced: true})
			}
			root := New(db)
			type client struct {
				*sink
				filter  Filter
				release func()
				nonce   string
			}
			open := func(c *client, f Framing, o Options) {
				var v *View
				v, c.release = root.Narrow(c.filter)
				c.sink, c.nonce = newSink(t, v, f, o), ""
			}
			var clients []*client
			for i := range 18 {
				c := &client{filter: filters[i%len(filters)]}
				o := Options{Collection: entries}
				switch i % 3 {
				case 1:
					o.Form.Shape = encode.Workload
				case 2:
					o.Collection, o.Form.Shape = workloads, encode.Workload
				}
				open(c, []Framing{XDS, DeltaXDS, DeltaXDS}[i%3], o)
				clients = append(clients, c)
			}
			act := func(c *client) {
				if c.nonce != "" {
					c.sub.Ack(c.nonce, true)
					c.nonce = ""
					return
				}
				resp, ok, err := c.sub.Next()
				if err != nil { // fell behind: it comes back with what it holds
					o := c.sub.options
					o.Versions = maps.Clone(c.vers)
					have, vers := c.have, c.vers
					c.sub.Close()
					c.release()
					open(c, o.Framing, o)
					c.have, c.vers = have, vers
					return
				}
				if ok {
					c.receive(&resp)
					c.nonce = resp.Nonce
				}
			}
			hostOf := map[string]string{}
			for range 4000 {
				ns := []string{"a", "b"}[r.IntN(2)]
				name := fmt.Sprintf("%s/s%d", ns, r.IntN(40))
				instanceName := fmt.Sprintf("%s.i%d", name, r.IntN(4))
				host := fmt.Sprintf("%s%d.%s.example.org", strings.ReplaceAll(name, "/", "-"), r.IntN(3), []string{"x", "y"}[r.IntN(2)])
				m := &pluginv1.WatchResponse{}
				switch r.IntN(9) {
				case 0, 1:
					m.Upserts, hostOf[name] = service(t, name, host).upsert, host
				case 2:
					m.Removals = []*pluginv1.Removal{{Collection: entries, Name: name}}
				case 3, 4:
					if hostOf[name] == "" {
						continue
					}
					m.Upserts = slices.Concat(service(t, name, hostOf[name]).upsert, instance(t, name, instanceName, fmt.Sprintf("10.0.0.%d", r.IntN(9))).upsert)
				case 5:
					m.Removals = []*pluginv1.Removal{{Collection: workloads, Name: instanceName}}
				case 6:
					c := clients[r.IntN(len(clients))]
					if r.IntN(10) > 0 {
						continue
					}
					release := c.release
					c.filter = filters[r.IntN(len(filters))]
					var v *View
					v, c.release = root.Narrow(c.filter)
					c.sub.SetView(v)
					release()
					continue
				default:
					act(clients[r.IntN(len(clients))])
					continue
				}
				db.Registry(ns).Apply(m)
			}
			for i, c := range clients {
				for range 8 {
					act(c)
				}
				all := map[string]string{}
				for change := range db.Changes(c.sub.kind, &state.Cursor{}) {
					if h := change.Record.Hosts(); h != nil {
						all[change.Name] = h[0]
					} else {
						all[change.Name] = c.have[change.Name] // compared by name and version
						if e := change.Record.Encode(c.sub.layout); c.have[change.Name] != "" && c.vers[change.Name] != e.Version.String() {
							t.Errorf("client %d holds an old version of %s", i, change.Name)
						}
					}
				}
				if d := gocmp.Diff(shown(c.filter, all, hostOf), c.have); d != "" {
					t.Errorf("client %d, framing %d, %+v (-view +sink):\n%s", i, c.sub.options.Framing, c.filter, d)
				}
				if _, ok, err := c.sub.Next(); ok || err != nil {
					t.Errorf("client %d has everything and gets another response, or %v", i, err)
				}
				c.sub.Close()
				c.release()
			}
			if len(root.narrower.of) > 0 {
				t.Errorf("%d views are kept for nobody", len(root.narrower.of))
			}
		})
	}
}

// Two sinks of equal filters share the view, and an equal content has an equal
// version in views of two bridges that came to it on different ways.
func TestEqualVersionPerView(t *testing.T) {
	third := Filter{Shards: shard.Set{First: 1, Last: 1, Of: 3}}
	var versions []string
	for order := range 2 {
		db := newDB(t, state.Options{})
		v, release := New(db).Narrow(third)
		defer release()
		for i := range 60 {
			if order == 1 {
				i = 59 - i
				apply(db, set(t, fmt.Sprintf("ns/s%d", i), "other.example.org"))
			}
			apply(db, set(t, fmt.Sprintf("ns/s%d", i), fmt.Sprintf("s%d.example.org", i)))
		}
		s := newSink(t, v, XDS, Options{})
		r, ok := s.step()
		if !ok || r.Resources == 0 || r.Resources == 60 {
			t.Fatalf("%d resources", r.Resources)
		}
		s.sub.Ack(r.Nonce, true)
		versions = append(versions, r.Version)
		// A change of another shard is none here.
		for i := 100; ; i++ {
			if host := fmt.Sprintf("s%d.example.org", i); !third.Shards.Has(host) {
				apply(db, set(t, fmt.Sprintf("ns/s%d", i), host))
				break
			}
		}
		if _, ok := s.step(); ok {
			t.Error("a change outside of the view was sent")
		}
		s.sub.Close()
	}
	if versions[0] != versions[1] {
		t.Errorf("versions %v of equal content", versions)
	}
}

// The first sink of a view with a filter gets all of it in its first response,
// as any other: it may regard itself as up to date after that.
func TestFirstResponseOfPart(t *testing.T) {
	db := newDB(t, state.Options{})
	for i := range 10 {
		apply(db, set(t, fmt.Sprintf("ns/s%d", i), fmt.Sprintf("s%d.example.org", i)))
	}
	v, release := New(db).Narrow(Filter{Namespaces: []string{"ns"}})
	defer release()
	s := newSink(t, v, DeltaXDS, Options{})
	defer s.sub.Close()
	if r, _ := s.step(); r.Resources != 10 {
		t.Errorf("the first response has %d of 10 resources", r.Resources)
	}
}

// A view waits for the first listings of its own registries only.
func TestHeldByOwnRegistries(t *testing.T) {
	db := state.New([]string{"a", "b"}, state.Options{}, slog.New(slog.DiscardHandler), prometheus.NewRegistry())
	root := New(db)
	a, release := root.Narrow(Filter{Registries: []string{"a"}})
	defer release()
	s, all := newSink(t, a, XDS, Options{}), newSink(t, root, XDS, Options{})
	if _, ok := s.step(); ok {
		t.Fatal("answered before the listing of its registry")
	}
	changed := a.Changed()
	db.Registry("a").Apply(&pluginv1.WatchResponse{Synced: true})
	<-changed
	if _, ok := s.step(); !ok {
		t.Error("not answered after the listing of its registry")
	}
	if _, ok := all.step(); ok {
		t.Error("the view of all does not wait for b")
	}
	none, releaseNone := root.Narrow(Filter{Registries: []string{"a"}, Collections: []string{collection.DestinationRule}})
	defer releaseNone()
	if r, ok := newSink(t, none, XDS, Options{}).step(); !ok || r.Resources != 0 {
		t.Error("a collection that is not in the view is not answered as empty")
	}
}

// A host of one registry may be served with the endpoints of others: without
// their listings a full response would remove these from its sinks.
func TestHeldByMergedRegistries(t *testing.T) {
	rules := []state.ConflictRule{{Hosts: []string{"web.example.org"}, Policy: state.Merge}}
	db := state.New([]string{"a", "b"}, state.Options{Conflicts: rules}, slog.New(slog.DiscardHandler), prometheus.NewRegistry())
	v, release := New(db).Narrow(Filter{Registries: []string{"a"}})
	defer release()
	s := newSink(t, v, XDS, Options{})
	db.Registry("a").Apply(&pluginv1.WatchResponse{Synced: true})
	if _, ok := s.step(); ok {
		t.Fatal("answered before the listing of a registry whose endpoints may be part of it")
	}
	changed := v.Changed()
	db.Registry("b").Apply(&pluginv1.WatchResponse{Synced: true})
	<-changed
	if _, ok := s.step(); !ok {
		t.Error("not answered after all listings")
	}
}

// BenchmarkShards is one changed resource of 100,000 in one of 16 shards, each
// with two sinks: what the state and all views do, and the sinks of the shard
// whose resource it is. quiet is what the sinks of another shard do meanwhile.
func BenchmarkShards(b *testing.B) {
	const of = 16
	for _, which := range []string{"own", "quiet"} {
		b.Run(which, func(b *testing.B) {
			db := newDB(b, state.Options{})
			n := shard.Of("web.example.org", of)
			for i := range 100_000 {
				apply(db, set(b, fmt.Sprintf("ns/service-%d", i), fmt.Sprintf("service-%d.example.org", i)))
			}
			root := New(db)
			var own, others []*sink
			for i := range of {
				v, release := root.Narrow(Filter{Shards: shard.Set{First: i, Last: i, Of: of}})
				defer release()
				for range 2 {
					s := newSink(b, v, DeltaXDS, Options{})
					if i == n {
						own = append(own, s)
					} else {
						others = append(others, s)
					}
				}
			}
			settle(b, own)
			settle(b, others)
			changes := [2]op{}
			for i := range changes {
				changes[i] = plain(b, "ns/web", &networking.ServiceEntry{Hosts: []string{"web.example.org"}, ExportTo: []string{strconv.Itoa(i)}})
			}
			b.ReportAllocs()
			i := 0
			woken := 0
			for b.Loop() {
				changed := others[0].sub.view.Changed()
				apply(db, changes[i%2])
				if which == "own" {
					for _, s := range own {
						r, ok, _ := s.sub.Next()
						if !ok {
							b.Fatal("no response")
						}
						s.sub.Ack(r.Nonce, true)
					}
				} else if _, ok, _ := others[0].sub.Next(); ok {
					b.Fatal("a response to another shard")
				}
				select {
				case <-changed:
					woken++
				default:
				}
				i++
			}
			if woken > 0 {
				b.Errorf("a sink of another shard was woken %d times", woken)
			}
		})
	}
}

// A selection that has missed removals reads everything again, and has as
// changed only what is.
func TestSelectionReadsAgain(t *testing.T) {
	db := newDB(t, state.Options{Tombstones: 2})
	apply(db, service(t, "ns/web", "web.example.org"), instance(t, "ns/web", "ns/web-1", "10.0.0.1"), service(t, "ns/api", "api.example.org"))
	for i := range 5 {
		apply(db, service(t, fmt.Sprintf("ns/gone-%d", i), fmt.Sprintf("gone-%d.example.org", i)))
	}
	k := Kind{Collection: entries, Shape: encode.Workload}
	s := newSelection(db, Filter{Namespaces: []string{"ns"}})
	var c state.Cursor
	names := 0
	for range s.Changes(k, &c) {
		names++
	}
	if names != 7 {
		t.Fatalf("%d names", names)
	}
	// The entry of web is another record, and the same to sinks that have its
	// instances apart.
	apply(db, instance(t, "ns/web", "ns/web-1", "10.0.0.2"), service(t, "ns/api", "api2.example.org"))
	for i := range 5 {
		apply(db, remove(fmt.Sprintf("ns/gone-%d", i)))
	}
	before := s.Revision()
	s.follow()
	if n := s.Revision() - before; n != 6 {
		t.Errorf("%d changes, want five removals and one of ns/api", n)
	}
	if r, ok := s.Get(k, "ns/web"); !ok {
		t.Error("ns/web is gone")
	} else if now, _ := db.Get(k, "ns/web"); now != r {
		t.Error("the selection has an older record of ns/web")
	}
}
