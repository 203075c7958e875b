package view

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"iter"
	"log/slog"
	"maps"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	discovery "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	gocmp "github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
	mcp "istio.io/api/mcp/v1alpha1"
	networking "istio.io/api/networking/v1alpha3"

	"github.com/isthmus-mesh/isthmus/internal/testresource"
	"github.com/isthmus-mesh/isthmus/plugin/collection"
	pluginv1 "github.com/isthmus-mesh/isthmus/plugin/proto/isthmus/plugin/v1"
	"github.com/isthmus-mesh/isthmus/server/encode"
	"github.com/isthmus-mesh/isthmus/server/state"
)

const entries = collection.ServiceEntry

// newDB returns a state of one registry, dc1, whose listing is complete.
func newDB(t testing.TB, o state.Options) *state.DB {
	t.Helper()
	db := state.New([]string{"dc1"}, o, slog.New(slog.DiscardHandler), prometheus.NewRegistry())
	db.Registry("dc1").Apply(&pluginv1.WatchResponse{Synced: true})
	return db
}

// op is a step of a batch.
type op struct {
	upsert []*pluginv1.Upsert
	remove *pluginv1.Removal
}

// plain sets a resource that is served as it is.
func plain(t testing.TB, name string, spec proto.Message) op {
	t.Helper()
	return op{upsert: []*pluginv1.Upsert{{Resource: testresource.Encode(testresource.Named(name), spec)}}}
}

func set(t testing.TB, name, host string) op {
	t.Helper()
	return plain(t, name, &networking.ServiceEntry{Hosts: []string{host}})
}

func remove(name string) op {
	return op{remove: &pluginv1.Removal{Collection: entries, Name: name}}
}

// apply carries out steps one after the other.
func apply(db *state.DB, ops ...op) {
	for _, o := range ops {
		m := &pluginv1.WatchResponse{Upserts: o.upsert}
		if o.remove != nil {
			m.Removals = []*pluginv1.Removal{o.remove}
		}
		db.Registry("dc1").Apply(m)
	}
}

// sink is a client as the specification has it: it decodes what comes and keeps
// a state.
type sink struct {
	t    testing.TB
	sub  *Subscription
	have map[string]string // host by name
	vers map[string]string // version by name
}

// step takes the next response, if there is one, without acknowledging it.
func (s *sink) step() (r Response, ok bool) {
	s.t.Helper()
	r, ok, err := s.sub.Next()
	if err != nil {
		s.t.Fatal(err)
	}
	if ok {
		s.receive(&r)
	}
	return r, ok
}

// receive applies a response to what the client holds.
func (s *sink) receive(r *Response) {
	s.t.Helper()
	raw := bytes.Join(r.Segments, nil)
	if len(raw) != r.Size {
		s.t.Fatalf("Size is %d, the segments have %d bytes", r.Size, len(raw))
	}
	if s.sub.options.Framing == DeltaXDS {
		var m discovery.DeltaDiscoveryResponse
		if err := proto.Unmarshal(raw, &m); err != nil {
			s.t.Fatal(err)
		}
		for _, d := range m.GetResources() {
			s.take(d.GetName(), d.GetVersion(), d.GetResource())
		}
		for _, name := range r.Removed {
			delete(s.have, name)
			delete(s.vers, name)
		}
		return
	}
	var m discovery.DiscoveryResponse
	if err := proto.Unmarshal(raw, &m); err != nil {
		s.t.Fatal(err)
	}
	clear(s.have)
	clear(s.vers)
	for _, a := range m.GetResources() {
		s.take("", "", a)
	}
}

func (s *sink) take(name, version string, a *anypb.Any) {
	s.t.Helper()
	var res mcp.Resource
	if err := a.UnmarshalTo(&res); err != nil {
		s.t.Fatal(err)
	}
	body, err := res.GetBody().UnmarshalNew()
	if err != nil {
		s.t.Fatal(err)
	}
	meta := res.GetMetadata()
	if name != "" && (name != meta.GetName() || version != meta.GetVersion()) {
		s.t.Fatalf("delta names %s %s, the resource %s %s", name, version, meta.GetName(), meta.GetVersion())
	}
	if _, twice := s.have[meta.GetName()]; twice && s.sub.options.Framing != DeltaXDS {
		s.t.Fatalf("%s is there twice", meta.GetName())
	}
	switch body := body.(type) {
	case *networking.ServiceEntry:
		s.have[meta.GetName()] = body.GetHosts()[0]
	case *networking.WorkloadEntry:
		s.have[meta.GetName()] = body.GetAddress()
	}
	s.vers[meta.GetName()] = meta.GetVersion()
}

func newSink(t testing.TB, v *View, f Framing, o Options) *sink {
	o.Collection, o.Framing = cmp.Or(o.Collection, entries), f
	return &sink{t: t, sub: NewSubscription(v, o), have: map[string]string{}, vers: map[string]string{}}
}

func hosts(db *state.DB) map[string]string {
	m := map[string]string{}
	for c := range db.Changes(state.Kind{Collection: entries}, &state.Cursor{}) {
		m[c.Name] = c.Record.Hosts()[0]
	}
	return m
}

// Sinks of every kind, however seldom they take and acknowledge a response and
// whatever they reject, end with what the store holds, without ever seeing a
// response for nothing.
func TestModel(t *testing.T) {
	for seed := range uint64(8) {
		t.Run(strconv.FormatUint(seed, 10), func(t *testing.T) {
			r := rand.New(rand.NewPCG(seed, 3))
			st := newDB(t, state.Options{})
			v := New(st)
			type client struct {
				*sink
				nonce string
				seen  state.Revision
			}
			var clients []*client
			for i := range 8 {
				clients = append(clients, &client{sink: newSink(t, v, []Framing{DeltaXDS, XDS}[i%2], Options{})})
			}
			act := func(c *client) {
				if c.nonce != "" {
					if r.IntN(10) == 0 {
						c.sub.Nack(c.nonce, "no")
					} else {
						c.sub.Ack(c.nonce, true)
					}
					c.nonce = ""
					return
				}
				before := maps.Clone(c.vers)
				resp, ok := c.step()
				if !ok {
					return
				}
				if c.seen > 0 && maps.Equal(before, c.vers) && len(resp.Removed) == 0 {
					t.Fatalf("response %s at revision %d changed nothing", resp.Nonce, resp.Revision)
				}
				c.nonce, c.seen = resp.Nonce, max(resp.Revision, 1)
			}
			for range 3000 {
				switch name := fmt.Sprintf("ns/s%d", r.IntN(600)); r.IntN(4) {
				case 0:
					apply(st, remove(name))
				case 1:
					apply(st, set(t, name, strings.Repeat("x", 1+r.IntN(300))+".example.org"))
				default:
					act(clients[r.IntN(len(clients))])
				}
				if r.IntN(300) == 0 { // reconnect
					c := clients[r.IntN(len(clients))]
					c.sub.Close()
					o, delta := Options{}, c.sub.options.Framing == DeltaXDS
					have, vers := c.have, c.vers
					if delta {
						o.Versions = maps.Clone(vers)
					}
					c.sink, c.nonce, c.seen = newSink(t, v, c.sub.options.Framing, o), "", 0
					if delta {
						c.have, c.vers = have, vers
					}
				}
			}
			for _, c := range clients {
				for range 3 {
					act(c)
				}
				if d := gocmp.Diff(hosts(st), c.have); d != "" {
					t.Errorf("incremental %t (-store +sink):\n%s", c.sub.options.Framing == DeltaXDS, d)
				}
				if _, ok := c.step(); ok && c.nonce == "" {
					t.Error("a sink that has everything gets another response")
				}
				c.sub.Close()
			}
			if len(v.pages) != 0 {
				t.Errorf("%d sets of pages are kept for nobody", len(v.pages))
			}
		})
	}
}

// A collection that is held is not answered, not even as empty; once it is open
// it is answered although it is empty.
func TestHeld(t *testing.T) {
	for _, f := range []Framing{XDS, DeltaXDS, MCP} {
		db := state.New([]string{"dc1"}, state.Options{}, slog.New(slog.DiscardHandler), prometheus.NewRegistry())
		s := newSink(t, New(db), f, Options{})
		if _, ok := s.step(); ok || s.sub.State() != Waiting {
			t.Fatalf("framing %d: a held collection was answered", f)
		}
		db.Registry("dc1").Apply(&pluginv1.WatchResponse{Synced: true})
		r, ok := s.step()
		if !ok || r.Resources != 0 {
			t.Fatalf("framing %d: an empty collection is not answered", f)
		}
		s.sub.Ack(r.Nonce, true)
		if _, ok := s.step(); ok {
			t.Fatalf("framing %d: answered twice", f)
		}
	}
}

// One response is under way at a time, and only its own nonce ends that.
func TestOneInFlight(t *testing.T) {
	st := newDB(t, state.Options{})
	s := newSink(t, New(st), DeltaXDS, Options{})
	apply(st, set(t, "ns/a", "a.example.org"))
	first, _ := s.step()
	apply(st, set(t, "ns/b", "b.example.org"))
	if _, ok := s.step(); ok {
		t.Fatal("a second response before the ACK of the first")
	}
	if s.sub.Ack("2026-11-21 02:01:37.5 +0000 UTC m=+0.12", true) || s.sub.Ack("0", true) || s.sub.Nack("", "x") {
		t.Fatal("a foreign nonce was taken for the ACK")
	}
	apply(st, set(t, "ns/b", "b2.example.org"))
	if !s.sub.Ack(first.Nonce, true) || s.sub.Ack(first.Nonce, true) {
		t.Fatal("the nonce of the response must be taken, once")
	}
	r, ok := s.step()
	if !ok || r.Resources != 1 || s.have["ns/b"] != "b2.example.org" {
		t.Fatalf("what changed meanwhile is one response with the newest: %d resources, %v", r.Resources, s.have)
	}
}

// A sink that comes back with the versions that it holds gets what it lacks:
// changed, new, and removed while it was away.
func TestResume(t *testing.T) {
	st := newDB(t, state.Options{})
	v := New(st)
	for i := range 100 {
		apply(st, set(t, fmt.Sprintf("ns/s%d", i), "a.example.org"))
	}
	s := newSink(t, v, DeltaXDS, Options{})
	s.step()
	apply(st, set(t, "ns/s7", "b.example.org"), set(t, "ns/new", "c.example.org"), remove("ns/s9"))
	versions := maps.Clone(s.vers)
	versions["ns/never-there"] = "1"
	again := newSink(t, v, DeltaXDS, Options{Versions: versions})
	again.have, again.vers = s.have, s.vers
	r, _ := again.step()
	if r.Resources != 2 || !slices.Equal(r.Removed, []string{"ns/never-there", "ns/s9"}) {
		t.Errorf("%d resources, removed %v; want ns/s7 and ns/new, and ns/s9 removed", r.Resources, r.Removed)
	}
	if d := gocmp.Diff(hosts(st), again.have); d != "" {
		t.Errorf("(-store +sink):\n%s", d)
	}
}

// A first listing larger than a message comes in several, and what changes
// between them is not lost.
func TestFirstListingInParts(t *testing.T) {
	st := newDB(t, state.Options{})
	v := New(st)
	long := strings.Repeat("x", 4000)
	for i := range 2000 {
		apply(st, set(t, fmt.Sprintf("ns/s%d", i), long))
	}
	versions := map[string]string{"ns/gone-1": "1", "ns/gone-2": "1"}
	s := newSink(t, v, DeltaXDS, Options{Versions: versions})
	s.have = map[string]string{"ns/gone-1": "x", "ns/gone-2": "x"}
	parts := 0
	for {
		r, ok := s.step()
		if !ok {
			break
		}
		if parts++; r.Size > MaxDelta+10_000 {
			t.Errorf("part %d has %d bytes", parts, r.Size)
		}
		if parts < 10 {
			apply(st, remove(fmt.Sprintf("ns/s%d", parts)), remove(fmt.Sprintf("ns/s%d", 1999-parts)), set(t, fmt.Sprintf("ns/s%d", 500+parts), "changed"))
		}
		s.sub.Ack(r.Nonce, true)
	}
	if parts < 3 {
		t.Errorf("%d parts, want several", parts)
	}
	if d := gocmp.Diff(hosts(st), s.have); d != "" {
		t.Errorf("(-store +sink):\n%s", d)
	}
}

// A sink that is too far behind is told so, and one of the state of the world
// does not mind.
func TestFellBehind(t *testing.T) {
	st := newDB(t, state.Options{Tombstones: 1})
	v := New(st)
	apply(st, set(t, "ns/a", "a"), set(t, "ns/b", "a"), set(t, "ns/c", "a"))
	delta, all := newSink(t, v, DeltaXDS, Options{}), newSink(t, v, XDS, Options{})
	for _, s := range []*sink{delta, all} {
		r, _ := s.step()
		s.sub.Ack(r.Nonce, true)
	}
	apply(st, remove("ns/a"), remove("ns/b"))
	if _, _, err := delta.sub.Next(); !errors.Is(err, ErrFellBehind) {
		t.Errorf("error %v, want ErrFellBehind", err)
	}
	all.step()
	if d := gocmp.Diff(hosts(st), all.have); d != "" {
		t.Errorf("(-store +sink):\n%s", d)
	}
}

// A subscription to names gets these only; a name that does not exist is
// answered as removed; asking again answers again.
func TestNames(t *testing.T) {
	st := newDB(t, state.Options{})
	s := newSink(t, New(st), DeltaXDS, Options{})
	apply(st, set(t, "ns/a", "a"), set(t, "ns/b", "b"))
	s.sub.Narrow()
	s.sub.Add("ns/a", "ns/none")
	r, _ := s.step()
	if r.Resources != 1 || !slices.Equal(r.Removed, []string{"ns/none"}) {
		t.Errorf("%d resources, removed %v", r.Resources, r.Removed)
	}
	s.sub.Ack(r.Nonce, true)
	apply(st, set(t, "ns/b", "b2"))
	if _, ok := s.step(); ok {
		t.Error("a name that was not asked for was sent")
	}
	apply(st, set(t, "ns/none", "n"))
	r, ok := s.step()
	if !ok || r.Resources != 1 {
		t.Error("a name that came into being was not sent")
	}
	s.sub.Ack(r.Nonce, true)
	s.sub.Add("ns/a")
	r, ok = s.step()
	if !ok || r.Resources != 1 {
		t.Error("a name that was asked for again was not sent again")
	}
	s.sub.Ack(r.Nonce, true)
	s.sub.Drop("ns/a")
	apply(st, set(t, "ns/a", "a2"))
	if _, ok := s.step(); ok {
		t.Error("a name that was dropped was sent")
	}
	s.sub.Widen()
	if r, _ := s.step(); r.Resources != 3 {
		t.Errorf("widened: %d resources, want all 3", r.Resources)
	}
}

// One change re-encodes one page; the others are the very same bytes, for every
// sink.
func TestPagesAreShared(t *testing.T) {
	st := newDB(t, state.Options{})
	v := New(st)
	for i := range 2000 {
		apply(st, set(t, fmt.Sprintf("ns/s%d", i), strings.Repeat("x", 100)))
	}
	a, b := newSink(t, v, XDS, Options{}), newSink(t, v, XDS, Options{})
	ra, _ := a.step()
	rb, _ := b.step()
	if &ra.Segments[0] != &rb.Segments[0] {
		t.Error("two sinks have two lists of pages")
	}
	a.sub.Ack(ra.Nonce, true)
	apply(st, set(t, "ns/s1000", "changed"))
	rc, _ := a.step()
	different := 0
	for i := range rc.Segments {
		if &rc.Segments[i][0] != &ra.Segments[i][0] {
			different++
		}
	}
	if different != 1 || len(ra.Segments) < 5 {
		t.Errorf("%d of %d pages were encoded again, want 1", different, len(rc.Segments))
	}
}

func filled(b *testing.B, size int) (*state.DB, *View, [2][]op) {
	st := newDB(b, state.Options{})
	var changes [2][]op
	for i := range size {
		apply(st, set(b, fmt.Sprintf("ns/service-%d", i), strings.Repeat("x", 100)))
		if i < 1000 {
			for v := range changes {
				changes[v] = append(changes[v], set(b, fmt.Sprintf("ns/service-%d", i), fmt.Sprintf("%d-%s", v, strings.Repeat("x", 100))))
			}
		}
	}
	return st, New(st), changes
}

func settle(b *testing.B, sinks []*sink) {
	for _, s := range sinks {
		for {
			r, ok, err := s.sub.Next()
			if err != nil {
				b.Fatal(err)
			}
			if !ok {
				break
			}
			s.sub.Ack(r.Nonce, true)
		}
	}
}

// BenchmarkOneChange is one changed resource of 100,000, from Apply to the
// segments of each sink's response.
func BenchmarkOneChange(b *testing.B) {
	for _, mode := range []string{"delta", "sotw"} {
		for _, sinks := range []int{1, 32} {
			b.Run(fmt.Sprintf("%s/sinks=%d", mode, sinks), func(b *testing.B) {
				st, v, changes := filled(b, 100_000)
				var all []*sink
				for range sinks {
					all = append(all, newSink(b, v, map[string]Framing{"delta": DeltaXDS, "sotw": XDS}[mode], Options{}))
				}
				settle(b, all)
				b.ReportAllocs()
				i := 0
				for b.Loop() {
					apply(st, changes[(i/1000)&1][i%1000])
					for _, s := range all {
						r, ok, _ := s.sub.Next()
						if !ok {
							b.Fatal("no response")
						}
						s.sub.Ack(r.Nonce, true)
					}
					i++
				}
			})
		}
	}
}

// workload returns a WorkloadEntry that stands for itself.
func workload(t testing.TB, name, address string) op {
	return plain(t, name, &networking.WorkloadEntry{Address: address})
}

// instance returns an instance of a service.
func instance(t testing.TB, service, name, address string) op {
	o := workload(t, name, address)
	o.upsert[0].Service = service
	return o
}

// service returns the ServiceEntry of a service that has instances.
func service(t testing.TB, name, host string) op {
	o := set(t, name, host)
	o.upsert[0].Service = name
	return o
}

// What a sink said that it holds and what changed since is there all the time,
// although the listing comes in parts and the change in a later one than the
// listing's last.
func TestHeldIsNotRemovedBetweenParts(t *testing.T) {
	st := newDB(t, state.Options{})
	long := strings.Repeat("x", 10_000)
	for i := range 400 {
		apply(st, set(t, fmt.Sprintf("ns/s%d", i), long))
	}
	apply(st, set(t, "ns/held", "old"))
	s := newSink(t, New(st), DeltaXDS, Options{Versions: map[string]string{"ns/held": "another"}})
	s.have = map[string]string{"ns/held": "older"}
	r, _ := s.step()
	for i := range 400 {
		apply(st, set(t, fmt.Sprintf("ns/s%d", i), "y"+long))
	}
	apply(st, set(t, "ns/held", "new"))
	parts := 1
	for {
		s.sub.Ack(r.Nonce, true)
		var ok bool
		if r, ok = s.step(); !ok {
			break
		}
		parts++
		if len(r.Removed) > 0 {
			t.Errorf("part %d removes %v", parts, r.Removed)
		}
	}
	if d := gocmp.Diff(hosts(st), s.have); d != "" || parts < 3 {
		t.Errorf("%d parts (-store +sink):\n%s", parts, d)
	}
}

// A subscription whose form changes gets everything again, and loses what only
// the old form had, removals that it had not been told yet included; also while
// a response is under way.
func TestSetForm(t *testing.T) {
	const workloads = collection.WorkloadEntry
	for _, underWay := range []bool{false, true} {
		for _, f := range []Framing{XDS, DeltaXDS} {
			t.Run(fmt.Sprintf("framing=%d,under way=%t", f, underWay), func(t *testing.T) {
				st := newDB(t, state.Options{})
				s := newSink(t, New(st), f, Options{Collection: workloads})
				apply(st, service(t, "ns/web", "web"), instance(t, "ns/web", "ns/new", "10.0.0.1"),
					workload(t, "ns/both", "10.0.0.2"), workload(t, "ns/gone", "10.0.0.3"), workload(t, "ns/told", "10.0.0.4"))
				r, _ := s.step()
				if !underWay {
					s.sub.Ack(r.Nonce, true)
				}
				apply(st, op{remove: &pluginv1.Removal{Collection: workloads, Name: "ns/gone"}})
				s.sub.SetForm(encode.Form{Shape: encode.Workload})
				if underWay {
					if _, ok := s.step(); ok {
						t.Error("a second response went out")
					}
					s.sub.Ack(r.Nonce, true)
				}
				r, ok := s.step()
				if !ok {
					t.Fatal("no response in the new form")
				}
				if d := gocmp.Diff(map[string]string{"ns/both": "10.0.0.2", "ns/new": "10.0.0.1", "ns/told": "10.0.0.4"}, s.have); d != "" {
					t.Errorf("(-want +got):\n%s", d)
				}
				s.sub.Ack(r.Nonce, true)
				if _, ok := s.step(); ok {
					t.Error("a response for nothing")
				}
				apply(st, op{remove: &pluginv1.Removal{Collection: workloads, Name: "ns/new"}})
				r, _ = s.step()
				s.sub.Ack(r.Nonce, true)
				if _, has := s.have["ns/new"]; has {
					t.Error("a change in the new form was not sent")
				}
				s.sub.SetForm(encode.Form{})
				s.step()
				if d := gocmp.Diff(map[string]string{"ns/both": "10.0.0.2", "ns/told": "10.0.0.4"}, s.have); d != "" {
					t.Errorf("back again (-want +got):\n%s", d)
				}
			})
		}
	}
}

// What only the old form had can be more than one message, and goes in several.
func TestSetFormRemovesInParts(t *testing.T) {
	st := newDB(t, state.Options{})
	held := map[string]bool{}
	many := service(t, "ns/web", "web")
	for i := range 30_000 {
		name := fmt.Sprintf("ns/%0200d", i)
		held[name] = true
		many.upsert = append(many.upsert, instance(t, "ns/web", name, "10.0.0.1").upsert...)
	}
	apply(st, many, workload(t, "ns/stays", "10.0.0.2"))
	s := newSink(t, New(st), DeltaXDS, Options{Collection: collection.WorkloadEntry, Form: encode.Form{Shape: encode.Workload}})
	listed, parts := false, 0
	for {
		r, ok, err := s.sub.Next()
		if err != nil {
			t.Fatal(err)
		}
		if !ok {
			if listed {
				break
			}
			listed = true
			s.sub.SetForm(encode.Form{})
			continue
		}
		size := r.Size
		for _, name := range r.Removed {
			size += len(name) + 4
			delete(held, name)
		}
		if size > MaxMessage {
			t.Errorf("a response of %d bytes", size)
		}
		if listed {
			parts++
		}
		s.sub.Ack(r.Nonce, true)
	}
	if len(held) > 0 || parts < 2 {
		t.Errorf("%d names are left after %d parts", len(held), parts)
	}
}

// A subscription that becomes one to all names loses what was removed since it
// was last told, and a name that it asked for remains asked for when it becomes
// one to names again.
func TestWidenAndNarrow(t *testing.T) {
	st := newDB(t, state.Options{})
	s := newSink(t, New(st), DeltaXDS, Options{})
	apply(st, set(t, "ns/a", "a"), set(t, "ns/b", "b"))
	s.sub.Narrow()
	s.sub.Add("ns/a", "ns/b")
	r, _ := s.step()
	s.sub.Ack(r.Nonce, true)
	apply(st, remove("ns/a"))
	s.sub.Widen()
	r, _ = s.step()
	if d := gocmp.Diff(map[string]string{"ns/b": "b"}, s.have); d != "" {
		t.Errorf("widened (-want +got):\n%s", d)
	}
	s.sub.Ack(r.Nonce, true)
	s.sub.Narrow()
	apply(st, set(t, "ns/b", "b2"), set(t, "ns/c", "c"))
	s.step()
	if d := gocmp.Diff(map[string]string{"ns/b": "b2"}, s.have); d != "" {
		t.Errorf("narrowed (-want +got):\n%s", d)
	}
}

// With all names, one that is subscribed to once more or dropped is answered,
// once, beside what changed.
func TestNamesAmongAll(t *testing.T) {
	st := newDB(t, state.Options{})
	s := newSink(t, New(st), DeltaXDS, Options{})
	apply(st, set(t, "ns/a", "a"), set(t, "ns/b", "b"))
	r, _ := s.step()
	s.sub.Ack(r.Nonce, true)
	s.sub.Add("ns/a", "ns/b", "ns/none")
	apply(st, set(t, "ns/b", "b2"))
	if r, _ = s.step(); r.Resources != 2 || !slices.Equal(r.Removed, []string{"ns/none"}) {
		t.Errorf("%d resources, removed %v", r.Resources, r.Removed)
	}
	s.sub.Ack(r.Nonce, true)
	s.sub.Drop("ns/a")
	if r, _ = s.step(); r.Resources != 1 {
		t.Errorf("dropped: %d resources", r.Resources)
	}
	s.sub.Ack(r.Nonce, true)
	if r, ok := s.step(); ok {
		t.Errorf("a response for nothing: %+v", r)
	}
}

// Many names are answered in responses of bounded size.
func TestNamesAreChunked(t *testing.T) {
	st := newDB(t, state.Options{})
	s := newSink(t, New(st), DeltaXDS, Options{})
	s.sub.Narrow()
	for i := range 100 {
		name := fmt.Sprintf("ns/s%d", i)
		apply(st, set(t, name, strings.Repeat("x", 100_000)))
		s.sub.Add(name)
	}
	for responses := 1; ; responses++ {
		r, ok := s.step()
		if !ok {
			if len(s.have) != 100 || responses < 4 {
				t.Errorf("%d resources after %d responses", len(s.have), responses)
			}
			return
		}
		if r.Size > MaxDelta+200_000 {
			t.Errorf("a response has %d bytes", r.Size)
		}
		s.sub.Ack(r.Nonce, true)
	}
}

// busy is a state in which something changes while a response is made.
type busy struct {
	data
	change func(read int)
}

// Changes implements data.
func (b busy) Changes(k state.Kind, c *state.Cursor) iter.Seq[state.Change] {
	return func(yield func(state.Change) bool) {
		read := 0
		for change := range b.data.Changes(k, c) {
			read++
			b.change(read)
			if !yield(change) {
				return
			}
		}
	}
}

// What changes while a response is made is not in it twice: a client may refuse
// such a response as a whole, as Envoy does. It is in the next one.
func TestChangeWhileListing(t *testing.T) {
	for what, change := range map[string]op{"changed": set(t, "ns/0", "changed.example.org"), "removed": remove("ns/0")} {
		t.Run(what, func(t *testing.T) {
			db := newDB(t, state.Options{})
			for n := range 1000 { // more than are read at once
				apply(db, set(t, fmt.Sprintf("ns/%d", n), "a.example.org"))
			}
			v := New(db)
			v.data = busy{v.data, func(read int) {
				if read == 10 {
					apply(db, change)
				}
			}}
			s := &sink{t: t, sub: NewSubscription(v, Options{Collection: entries, Framing: DeltaXDS}), have: map[string]string{}, vers: map[string]string{}}
			for {
				r, ok := s.step()
				if !ok {
					break
				}
				var m discovery.DeltaDiscoveryResponse
				if err := proto.Unmarshal(bytes.Join(r.Segments, nil), &m); err != nil {
					t.Fatal(err)
				}
				names := slices.Clone(r.Removed)
				for _, d := range m.GetResources() {
					names = append(names, d.GetName())
				}
				slices.Sort(names)
				if n := len(names); len(slices.Compact(names)) != n {
					t.Errorf("of %d names some are there twice", n)
				}
				s.sub.Ack(r.Nonce, true)
			}
			if host, there := s.have["ns/0"]; there != (what == "changed") || there && host != "changed.example.org" || len(s.have) < 999 {
				t.Errorf("%d services; of the one that was %s the client has %q", len(s.have), what, host)
			}
		})
	}
}

// late is a state in which something changes when it was read.
type late struct {
	data
	change func()
}

// Changes implements data.
func (l late) Changes(k state.Kind, c *state.Cursor) iter.Seq[state.Change] {
	return func(yield func(state.Change) bool) {
		defer l.change()
		l.data.Changes(k, c)(yield)
	}
}

// A client whose view changes gets what changed while its new listing was
// prepared.
func TestChangeWhileSetView(t *testing.T) {
	for what, change := range map[string]op{"changed": set(t, "ns/0", "changed.example.org"), "removed": remove("ns/0"), "added": set(t, "ns/2", "b.example.org")} {
		t.Run(what, func(t *testing.T) {
			db := newDB(t, state.Options{})
			apply(db, set(t, "ns/0", "a.example.org"), set(t, "ns/1", "a.example.org"))
			v := New(db)
			s := newSink(t, v, DeltaXDS, Options{})
			r, _ := s.step()
			s.sub.Ack(r.Nonce, true)
			v.data = late{v.data, sync.OnceFunc(func() { apply(db, change) })}
			s.sub.SetView(New(db))
			for {
				r, ok := s.step()
				if !ok {
					break
				}
				s.sub.Ack(r.Nonce, true)
			}
			if d := gocmp.Diff(hosts(db), s.have); d != "" {
				t.Errorf("(-store +sink):\n%s", d)
			}
		})
	}
}

// A client that refuses the response that was under way when its view changed
// does not hold what was in it.
func TestRefusedBeforeSetView(t *testing.T) {
	db := newDB(t, state.Options{})
	apply(db, set(t, "ns/0", "a.example.org"))
	s := newSink(t, New(db), DeltaXDS, Options{})
	r, _, err := s.sub.Next()
	if err != nil {
		t.Fatal(err)
	}
	s.sub.SetView(New(db))
	s.sub.Nack(r.Nonce, "no")
	if _, ok := s.step(); !ok {
		t.Error("no response in the new view")
	}
	if d := gocmp.Diff(hosts(db), s.have); d != "" {
		t.Errorf("(-store +sink):\n%s", d)
	}
}
