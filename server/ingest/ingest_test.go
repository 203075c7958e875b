package ingest

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/timestamppb"
	mcp "istio.io/api/mcp/v1alpha1"
	networking "istio.io/api/networking/v1alpha3"

	"github.com/isthmus-mesh/isthmus/plugin/collection"
	pluginv1 "github.com/isthmus-mesh/isthmus/plugin/proto/isthmus/plugin/v1"
	"github.com/isthmus-mesh/isthmus/server/resource"
	"github.com/isthmus-mesh/isthmus/server/store"
)

type env struct {
	t  testing.TB
	st *store.Store[*resource.Resource]
	*Ingest
}

func newEnv(t testing.TB, o Options, registries ...string) env {
	t.Helper()
	st := store.New[*resource.Resource](store.Options{})
	i, err := New(st, registries, o, slog.New(slog.DiscardHandler), prometheus.NewRegistry())
	if err != nil {
		t.Fatal(err)
	}
	return env{t, st, i}
}

func raw(name string, spec proto.Message) []byte {
	body, err := anypb.New(spec)
	if err != nil {
		panic(err)
	}
	b, err := proto.MarshalOptions{Deterministic: true}.Marshal(&mcp.Resource{
		Metadata: &mcp.Metadata{Name: name, CreateTime: &timestamppb.Timestamp{Seconds: 1}}, Body: body,
	})
	if err != nil {
		panic(err)
	}
	return b
}

// entry is a service's ServiceEntry.
func entry(name, host string) *pluginv1.Upsert {
	return &pluginv1.Upsert{Service: name, Resource: raw(name, &networking.ServiceEntry{Hosts: []string{host}, Resolution: networking.ServiceEntry_STATIC})}
}

func instance(service, name, address string) *pluginv1.Upsert {
	return &pluginv1.Upsert{Service: service, Resource: raw(name, &networking.WorkloadEntry{Address: address})}
}

func route(name, host string) *pluginv1.Upsert {
	return &pluginv1.Upsert{Resource: raw(name, &networking.VirtualService{Hosts: []string{host}})}
}

func gone(coll, name string) *pluginv1.Removal {
	return &pluginv1.Removal{Collection: coll, Name: name}
}

func upserts(u ...*pluginv1.Upsert) *pluginv1.WatchResponse {
	return &pluginv1.WatchResponse{Upserts: u}
}

var synced = &pluginv1.WatchResponse{Synced: true}

// served returns what sinks of both shapes get, as text: host and endpoints by name.
func (e env) served() (inline, workload map[string]string) {
	e.t.Helper()
	inline, workload = map[string]string{}, map[string]string{}
	for _, shape := range []resource.Shape{resource.Inline, resource.Workload} {
		out := inline
		if shape == resource.Workload {
			out = workload
		}
		for _, coll := range []string{collection.ServiceEntry, collection.WorkloadEntry, "networking.istio.io/VirtualService"} {
			all, _ := e.st.All(resource.Key(coll, shape))
			for c := range all {
				var res mcp.Resource
				if err := proto.Unmarshal(bytes.Join(c.Value.Encode(resource.Form{}).Segments, nil), &res); err != nil {
					e.t.Fatal(err)
				}
				body, err := res.GetBody().UnmarshalNew()
				if err != nil {
					e.t.Fatal(err)
				}
				switch b := body.(type) {
				case *networking.ServiceEntry:
					text := b.GetHosts()[0]
					for _, ep := range b.GetEndpoints() {
						text += " " + ep.GetAddress()
					}
					if sel := b.GetWorkloadSelector(); sel != nil {
						text += " selector"
					}
					out["se "+c.Name] = text
				case *networking.WorkloadEntry:
					out["we "+c.Name] = b.GetAddress() + " " + b.GetLabels()[resource.SelectorLabel]
				case *networking.VirtualService:
					out["vs "+c.Name] = b.GetHosts()[0]
				}
			}
		}
	}
	return inline, workload
}

func (e env) want(inline, workload map[string]string) {
	e.t.Helper()
	gotInline, gotWorkload := e.served()
	if d := cmp.Diff(inline, gotInline); d != "" {
		e.t.Errorf("inline (-want +got):\n%s", d)
	}
	if d := cmp.Diff(workload, gotWorkload); d != "" {
		e.t.Errorf("workload (-want +got):\n%s", d)
	}
}

// A service and a resource that stands for itself reach both shapes; an entry that was published as it is gets no selector.
func TestShapes(t *testing.T) {
	e := newEnv(t, Options{}, "dc1")
	r := e.Registry("dc1")
	r.Begin([]string{collection.ServiceEntry})
	external := &pluginv1.Upsert{Resource: raw("dc1/external", &networking.ServiceEntry{Hosts: []string{"api.example.org"}, Resolution: networking.ServiceEntry_DNS})}
	r.Apply(upserts(instance("dc1/web", "dc1/web-1", "10.0.0.1"), entry("dc1/web", "web.example.org"), entry("dc1/none", "none.example.org"), external, route("dc1/r", "r.example.org")))
	e.want(map[string]string{
		"se dc1/web": "web.example.org 10.0.0.1", "se dc1/none": "none.example.org", "se dc1/external": "api.example.org", "vs dc1/r": "r.example.org",
	}, map[string]string{
		"se dc1/web": "web.example.org selector", "we dc1/web-1": "10.0.0.1 web", "se dc1/none": "none.example.org selector",
		"se dc1/external": "api.example.org", "vs dc1/r": "r.example.org",
	})
}

// A collection is held until every registry that may publish to it has synced; a registry that has not said what it may publish
// holds them all.
func TestReady(t *testing.T) {
	e := newEnv(t, Options{}, "a", "b")
	const routes = "networking.istio.io/VirtualService"
	if e.Ready(collection.ServiceEntry) || e.Ready(routes) || !e.Ready("core/MeshConfig") {
		t.Error("before the first listing: ServiceEntry or VirtualService is open, or an unknown collection is held")
	}
	e.Registry("a").Begin([]string{collection.ServiceEntry})
	e.Registry("b").Begin([]string{collection.ServiceEntry, routes})
	e.Registry("a").Apply(synced)
	if got := e.Waiting(collection.ServiceEntry); !slices.Equal(got, []string{"b"}) || e.Ready(routes) {
		t.Errorf("waiting for %v, want b", got)
	}
	wake := e.st.Changed()
	e.Registry("b").Apply(synced)
	if !e.Ready(collection.ServiceEntry) || !e.Ready(routes) {
		t.Error("not open although all registries are synced")
	}
	select {
	case <-wake:
	default:
		t.Error("whoever waits for the collection was not woken")
	}
	e.Registry("b").Down(errors.New("killed"))
	e.Registry("b").Begin([]string{collection.ServiceEntry, routes})
	if !e.Ready(routes) {
		t.Error("a new listing holds a collection that was open")
	}
}

// Only a complete new listing removes what it did not mention.
func TestListing(t *testing.T) {
	e := newEnv(t, Options{}, "dc1")
	r := e.Registry("dc1")
	r.Begin(nil)
	r.Apply(upserts(entry("dc1/web", "web"), instance("dc1/web", "dc1/web-1", "10.0.0.1"), instance("dc1/web", "dc1/web-2", "10.0.0.2"), entry("dc1/old", "old"), route("dc1/r", "r")))
	r.Apply(synced)
	all, _ := e.served()
	r.Down(errors.New("killed"))
	r.Begin(nil)
	r.Apply(upserts(entry("dc1/web", "web"), instance("dc1/web", "dc1/web-2", "10.0.0.2")))
	before := e.st.Revision()
	if now, _ := e.served(); !cmp.Equal(all, now) {
		t.Errorf("an incomplete listing removed something:\n%s", cmp.Diff(all, now))
	}
	r.Apply(&pluginv1.WatchResponse{Status: &pluginv1.Status{Error: "connection refused"}})
	if s := r.Status(); !s.Stale() || e.st.Revision() != before {
		t.Errorf("degraded: %+v", s)
	}
	r.Apply(synced)
	e.want(map[string]string{"se dc1/web": "web 10.0.0.2"}, map[string]string{"se dc1/web": "web selector", "we dc1/web-2": "10.0.0.2 web"})
	before = e.st.Revision()
	r.Apply(synced)
	r.Begin(nil)
	r.Apply(upserts(entry("dc1/web", "web"), instance("dc1/web", "dc1/web-2", "10.0.0.2")))
	r.Apply(synced)
	if e.st.Revision() != before {
		t.Errorf("the same listing again cost %d revisions", e.st.Revision()-before)
	}
}

// An outage is one warning and its end one line, whatever the plugin says in between.
func TestOutageIsLoggedOnce(t *testing.T) {
	var log bytes.Buffer
	i, err := New(store.New[*resource.Resource](store.Options{}), []string{"dc1"}, Options{},
		slog.New(slog.NewTextHandler(&log, nil)), prometheus.NewRegistry())
	if err != nil {
		t.Fatal(err)
	}
	r := i.Registry("dc1")
	r.Begin(nil)
	for _, reason := range []string{"", "connection refused", "connection refused", "no leader", "", ""} {
		r.Apply(&pluginv1.WatchResponse{Status: &pluginv1.Status{Error: reason}})
	}
	if n := strings.Count(log.String(), "\n"); n != 2 || !strings.Contains(log.String(), "connection refused") || !strings.Contains(log.String(), "followed again") {
		t.Errorf("%d lines:\n%s", n, log.String())
	}
}

// The first registry of the configuration owns a name, whoever came first; the other is served when it goes.
func TestOwnership(t *testing.T) {
	for _, order := range []string{"first", "second"} {
		e := newEnv(t, Options{}, "a", "b")
		a, b := e.Registry("a"), e.Registry("b")
		say := map[*Registry]*pluginv1.WatchResponse{
			a: upserts(entry("ns/web", "a.example.org"), instance("ns/web", "ns/web-a", "10.0.0.1"), route("ns/r", "a")),
			b: upserts(entry("ns/web", "b.example.org"), instance("ns/web", "ns/web-b", "10.0.0.2"), route("ns/r", "b")),
		}
		if order == "first" {
			a.Apply(say[a])
			b.Apply(say[b])
		} else {
			b.Apply(say[b])
			a.Apply(say[a])
		}
		e.want(map[string]string{"se ns/web": "a.example.org 10.0.0.1", "vs ns/r": "a"},
			map[string]string{"se ns/web": "a.example.org selector", "we ns/web-a": "10.0.0.1 web", "vs ns/r": "a"})
		if p := b.Problems(); len(p) != 2 || !strings.Contains(p[0].Reason, `registry "a"`) || len(a.Problems()) != 0 {
			t.Errorf("problems of b: %v, of a: %v", p, a.Problems())
		}
		b.Apply(upserts(instance("ns/web", "ns/web-c", "10.0.0.3"))) // behind the scenes
		a.Apply(&pluginv1.WatchResponse{Removals: []*pluginv1.Removal{gone(collection.ServiceEntry, "ns/web"), gone("networking.istio.io/VirtualService", "ns/r")}})
		e.want(map[string]string{"se ns/web": "b.example.org 10.0.0.2 10.0.0.3", "vs ns/r": "b"},
			map[string]string{"se ns/web": "b.example.org selector", "we ns/web-b": "10.0.0.2 web", "we ns/web-c": "10.0.0.3 web", "vs ns/r": "b"})
		if p := b.Problems(); len(p) != 0 {
			t.Errorf("problems of b afterwards: %v", p)
		}
	}
}

// What cannot be served is refused, counted and listed, and what was good before stays, through the next listing too.
func TestRefused(t *testing.T) {
	e := newEnv(t, Options{
		MaxResources: 4,
		Validate: func(body proto.Message) error {
			if se, ok := body.(*networking.ServiceEntry); ok && se.GetHosts()[0] == "bad.example.org" {
				return errors.New("hosts[0]: bad.example.org is a bad host")
			}
			return nil
		},
	}, "dc1")
	r := e.Registry("dc1")
	r.Begin(nil)
	r.Apply(upserts(entry("dc1/web", "web"), instance("dc1/web", "dc1/web-1", "10.0.0.1")))
	r.Apply(synced)
	want, _ := e.served()
	r.Begin(nil)
	withEndpoints := &pluginv1.Upsert{Service: "dc1/own", Resource: raw("dc1/own", &networking.ServiceEntry{
		Hosts: []string{"own"}, Endpoints: []*networking.WorkloadEntry{{Address: "10.0.0.1"}},
	})}
	r.Apply(upserts(
		&pluginv1.Upsert{Resource: []byte{0xff}},
		entry("dc1/web", "bad.example.org"),
		instance("dc1/none", "dc1/none-1", "10.0.0.9"),
		&pluginv1.Upsert{Service: "dc1/web", Resource: raw("dc1/r", &networking.VirtualService{})},
		instance("dc1/web", "other/web-9", "10.0.0.9"),
		withEndpoints,
	))
	broken := instance("dc1/web", "dc1/web-1", "10.0.0.1")
	broken.Resource = append(broken.Resource, 0x1a, 0) // a field that does not exist
	r.Apply(upserts(broken))
	r.Apply(synced)
	if got, _ := e.served(); !cmp.Equal(want, got) {
		t.Errorf("(-want +got):\n%s", cmp.Diff(want, got))
	}
	var ids []string
	for _, p := range r.Problems() {
		ids = append(ids, p.ID)
	}
	wantIDs := []string{
		"resource networking.istio.io/ServiceEntry dc1/own", "resource networking.istio.io/ServiceEntry dc1/web", "resource networking.istio.io/VirtualService dc1/r",
		"resource networking.istio.io/WorkloadEntry dc1/none-1", "resource networking.istio.io/WorkloadEntry dc1/web-1", "resource networking.istio.io/WorkloadEntry other/web-9", `resource of unknown kind ""`,
	}
	if d := cmp.Diff(wantIDs, ids); d != "" {
		t.Errorf("problems (-want +got):\n%s", d)
	}
	r.Apply(upserts(entry("dc1/web", "web2"), instance("dc1/web", "dc1/web-2", "10.0.0.2"), instance("dc1/web", "dc1/web-3", "10.0.0.3"), instance("dc1/web", "dc1/web-4", "10.0.0.4")))
	if got, _ := e.served(); got["se dc1/web"] != "web2 10.0.0.1 10.0.0.2 10.0.0.3" {
		t.Errorf("served %v; want the limit of 4 resources kept and the entry mended", got)
	}
}

// Hosts that hash to one address: the smallest has it, and the next gets it when that one goes.
func TestAddressConflict(t *testing.T) {
	e := newEnv(t, Options{}, "dc1")
	i := e.Ingest
	host := "web.example.org"
	addr := resource.VIP(host)
	i.vips[addr] = map[string]int{"a-smaller-host": 1}
	r := e.Registry("dc1")
	address := func() string {
		res, ok := e.st.Get(collection.ServiceEntry, "dc1/web")
		if !ok {
			t.Fatal("not served")
		}
		var m mcp.Resource
		var se networking.ServiceEntry
		if err := proto.Unmarshal(bytes.Join(res.Encode(resource.Form{Address: true}).Segments, nil), &m); err != nil {
			t.Fatal(err)
		}
		if err := m.GetBody().UnmarshalTo(&se); err != nil {
			t.Fatal(err)
		}
		return strings.Join(se.GetAddresses(), ",")
	}
	r.Apply(upserts(entry("dc1/web", host)))
	if got := address(); got != "" {
		t.Errorf("address %s, want none: a smaller host has it", got)
	}
	i.vips[addr] = map[string]int{"z-larger-host": 1, host: 1}
	r.Apply(upserts(entry("dc1/web", host), instance("dc1/web", "dc1/web-1", "10.0.0.1")))
	if got := address(); got != addr.String() {
		t.Errorf("address %q, want %s", got, addr)
	}
}

// Over random runs of two registries that share a namespace, with plugins that die and list again, the store holds what a plain model
// says.
func TestModel(t *testing.T) {
	type svc struct {
		host      string
		instances map[string]string
	}
	for seed := range uint64(20) {
		t.Run(strconv.FormatUint(seed, 10), func(t *testing.T) {
			rnd := rand.New(rand.NewPCG(seed, 11))
			e := newEnv(t, Options{}, "a", "b")
			truth := map[string]map[string]*svc{"a": {}, "b": {}} // what each plugin believes
			for _, name := range []string{"a", "b"} {
				e.Registry(name).Begin(nil)
			}
			for range 400 {
				name := []string{"a", "b"}[rnd.IntN(2)]
				r, services := e.Registry(name), truth[name]
				m := &pluginv1.WatchResponse{}
				// A batch names a resource once, and removals are carried out first.
				n := fmt.Sprintf("ns/s%d", rnd.IntN(5))
				s := services[n]
				switch rnd.IntN(10) {
				case 0: // the plugin dies, misses something, and lists again
					for n := range services {
						if rnd.IntN(3) == 0 {
							delete(services, n)
						}
					}
					r.Down(errors.New("killed"))
					r.Begin(nil)
					for n, s := range services {
						m.Upserts = append(m.Upserts, entry(n, s.host))
						for w, addr := range s.instances {
							m.Upserts = append(m.Upserts, instance(n, w, addr))
						}
					}
					m.Synced = true
				case 1:
					if s == nil {
						continue
					}
					for w := range s.instances {
						if rnd.IntN(2) == 0 { // the removal of the entry is enough
							m.Removals = append(m.Removals, gone(collection.WorkloadEntry, w))
						}
					}
					m.Removals = append(m.Removals, gone(collection.ServiceEntry, n))
					delete(services, n)
				default:
					if s == nil || rnd.IntN(4) == 0 {
						host := fmt.Sprintf("%s%d.example.org", name, rnd.IntN(3))
						if s == nil {
							s = &svc{instances: map[string]string{}}
							services[n] = s
						}
						s.host = host
						m.Upserts = append(m.Upserts, entry(n, host))
					}
					for w := range 4 {
						id := fmt.Sprintf("%s-%s%d", n, name, w)
						switch rnd.IntN(4) {
						case 0:
							s.instances[id] = fmt.Sprintf("10.0.0.%d", rnd.IntN(5))
							m.Upserts = append(m.Upserts, instance(n, id, s.instances[id]))
						case 1:
							m.Removals = append(m.Removals, gone(collection.WorkloadEntry, id))
							delete(s.instances, id)
						}
					}
				}
				r.Apply(m)
			}
			inline, workload := map[string]string{}, map[string]string{}
			for _, name := range []string{"b", "a"} { // a owns
				for n, s := range truth[name] {
					if _, both := truth["a"][n]; both && name == "b" {
						continue
					}
					var addresses []string
					for id, addr := range s.instances {
						addresses = append(addresses, addr)
						workload["we "+id] = addr + " " + strings.TrimPrefix(n, "ns/")
					}
					slices.Sort(addresses)
					inline["se "+n] = strings.Join(append([]string{s.host}, addresses...), " ")
					workload["se "+n] = s.host + " selector"
				}
			}
			e.want(inline, workload)
			if len(e.vips) > 6 {
				t.Errorf("%d addresses are counted for at most 6 hosts", len(e.vips))
			}
		})
	}
}

// Whatever a plugin sends, the host goes on, and what it serves decodes.
func FuzzApply(f *testing.F) {
	seed := func(m *pluginv1.WatchResponse) {
		b, err := proto.Marshal(m)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	seed(upserts(entry("dc1/web", "web"), instance("dc1/web", "dc1/web-1", "10.0.0.1"), route("dc1/r", "r")))
	seed(&pluginv1.WatchResponse{Removals: []*pluginv1.Removal{gone(collection.ServiceEntry, "dc1/web"), gone(collection.WorkloadEntry, "dc1/web-1")}, Synced: true})
	seed(upserts(&pluginv1.Upsert{Service: "dc1/web", Resource: raw("dc1/web", &networking.WorkloadEntry{})}, entry("dc1/web", "")))
	f.Fuzz(func(t *testing.T, b []byte) {
		var m pluginv1.WatchResponse
		if proto.Unmarshal(b, &m) != nil {
			return
		}
		e := newEnv(t, Options{}, "dc1", "dc2")
		for _, name := range []string{"dc2", "dc1"} {
			r := e.Registry(name)
			r.Begin(nil)
			r.Apply(upserts(entry("dc1/web", "web"), instance("dc1/web", "dc1/web-1", "10.0.0.1"), route("dc1/r", "r")))
			r.Apply(&m)
			r.Apply(synced)
			r.Begin(nil)
			r.Apply(&m)
			r.Apply(synced)
			r.Problems()
			r.Status()
		}
		for coll := range e.st.Collections() {
			all, _ := e.st.All(coll)
			for c := range all {
				var res mcp.Resource
				if err := proto.Unmarshal(bytes.Join(c.Value.Encode(resource.Form{Address: true, PortSets: true}).Segments, nil), &res); err != nil {
					t.Fatal(err)
				}
			}
		}
	})
}

// BenchmarkOneInstance is one changed instance of a registry of 100,000, from the plugin's message to the store.
func BenchmarkOneInstance(b *testing.B) {
	e := newEnv(b, Options{}, "dc1")
	r := e.Registry("dc1")
	r.Begin(nil)
	for s := range 10_000 {
		n := fmt.Sprintf("dc1/service-%d", s)
		m := upserts(entry(n, n+".example.org"))
		for w := range 10 {
			m.Upserts = append(m.Upserts, instance(n, fmt.Sprintf("%s-%d", n, w), fmt.Sprintf("10.%d.%d.%d", s>>8, s&255, w)))
		}
		r.Apply(m)
	}
	r.Apply(synced)
	changes := [2]*pluginv1.WatchResponse{
		upserts(instance("dc1/service-7", "dc1/service-7-3", "10.200.0.1")), upserts(instance("dc1/service-7", "dc1/service-7-3", "10.200.0.2")),
	}
	b.ReportAllocs()
	i := 0
	for b.Loop() {
		r.Apply(changes[i&1])
		i++
	}
}
