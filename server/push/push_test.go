package push

import (
	"bytes"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"testing"

	discovery "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/timestamppb"
	mcp "istio.io/api/mcp/v1alpha1"
	networking "istio.io/api/networking/v1alpha3"

	"github.com/isthmus-mesh/isthmus/plugin/collection"
	"github.com/isthmus-mesh/isthmus/server/resource"
	"github.com/isthmus-mesh/isthmus/server/store"
)

type (
	resourceStore = store.Store[*resource.Resource]
	op            = store.Op[*resource.Resource]
)

const entries = collection.ServiceEntry

func always(string) bool { return true }

func set(t testing.TB, name, host string) op {
	t.Helper()
	body, err := anypb.New(&networking.ServiceEntry{Hosts: []string{host}})
	if err != nil {
		t.Fatal(err)
	}
	raw, err := proto.Marshal(&mcp.Resource{Metadata: &mcp.Metadata{Name: name, CreateTime: &timestamppb.Timestamp{Seconds: 1}}, Body: body})
	if err != nil {
		t.Fatal(err)
	}
	p, err := resource.Parse(raw)
	if err != nil {
		t.Fatal(err)
	}
	return op{Collection: entries, Name: name, Value: resource.NewResource(p, "dc1")}
}

func remove(name string) op { return op{Collection: entries, Name: name, Remove: true} }

func apply(st *resourceStore, ops ...op) { st.Apply(ops) }

// sink is a client as the specification has it: it decodes what comes and keeps a state.
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
	if !ok {
		return r, false
	}
	raw := bytes.Join(r.Segments, nil)
	if len(raw) != r.Size {
		s.t.Fatalf("Size is %d, the segments have %d bytes", r.Size, len(raw))
	}
	if s.sub.options.Incremental {
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
		return r, true
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
	return r, true
}

func (s *sink) take(name, version string, a *anypb.Any) {
	s.t.Helper()
	var res mcp.Resource
	var se networking.ServiceEntry
	if err := a.UnmarshalTo(&res); err != nil {
		s.t.Fatal(err)
	}
	if err := res.GetBody().UnmarshalTo(&se); err != nil {
		s.t.Fatal(err)
	}
	meta := res.GetMetadata()
	if name != "" && (name != meta.GetName() || version != meta.GetVersion()) {
		s.t.Fatalf("delta names %s %s, the resource %s %s", name, version, meta.GetName(), meta.GetVersion())
	}
	if _, twice := s.have[meta.GetName()]; twice && !s.sub.options.Incremental {
		s.t.Fatalf("%s is there twice", meta.GetName())
	}
	s.have[meta.GetName()] = se.GetHosts()[0]
	s.vers[meta.GetName()] = meta.GetVersion()
}

func newSink(t testing.TB, h *Hub, o Options) *sink {
	o.Collection = entries
	if o.Incremental {
		o.Framing = DeltaXDS
	}
	return &sink{t: t, sub: NewSubscription(h, o), have: map[string]string{}, vers: map[string]string{}}
}

func state(st *resourceStore) map[string]string {
	all, _ := st.All(entries)
	m := map[string]string{}
	for c := range all {
		m[c.Name] = c.Value.Hosts()[0]
	}
	return m
}

// Sinks of every kind, however seldom they take and acknowledge a response and whatever they reject, end with what the store
// holds, without ever seeing a response for nothing.
func TestModel(t *testing.T) {
	for seed := range uint64(8) {
		t.Run(strconv.FormatUint(seed, 10), func(t *testing.T) {
			r := rand.New(rand.NewPCG(seed, 3))
			st := store.New[*resource.Resource](store.Options{})
			h := NewHub(st, always)
			type client struct {
				*sink
				nonce string
				seen  store.Revision
			}
			var clients []*client
			for i := range 8 {
				clients = append(clients, &client{sink: newSink(t, h, Options{Incremental: i%2 == 0})})
			}
			act := func(c *client) {
				if c.nonce != "" {
					if r.IntN(10) == 0 {
						c.sub.Nack(c.nonce, "no")
					} else {
						c.sub.Ack(c.nonce)
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
					o := Options{Incremental: c.sub.options.Incremental}
					have, vers := c.have, c.vers
					if o.Incremental {
						o.Versions = maps.Clone(vers)
					}
					c.sink, c.nonce, c.seen = newSink(t, h, o), "", 0
					if o.Incremental {
						c.have, c.vers = have, vers
					}
				}
			}
			for _, c := range clients {
				for range 3 {
					act(c)
				}
				if d := cmp.Diff(state(st), c.have); d != "" {
					t.Errorf("incremental %t (-store +sink):\n%s", c.sub.options.Incremental, d)
				}
				if _, ok := c.step(); ok && c.nonce == "" {
					t.Error("a sink that has everything gets another response")
				}
				c.sub.Close()
			}
			if len(h.pages) != 0 {
				t.Errorf("%d sets of pages are kept for nobody", len(h.pages))
			}
		})
	}
}

// A collection that is held is not answered, not even as empty; once it is open it is answered although it is empty.
func TestHeld(t *testing.T) {
	st := store.New[*resource.Resource](store.Options{})
	open := false
	h := NewHub(st, func(string) bool { return open })
	for _, incremental := range []bool{false, true} {
		open = false
		s := newSink(t, h, Options{Incremental: incremental})
		if _, ok := s.step(); ok || s.sub.State() != Held {
			t.Fatalf("incremental %t: a held collection was answered", incremental)
		}
		open = true
		r, ok := s.step()
		if !ok || r.Resources != 0 {
			t.Fatalf("incremental %t: an empty collection is not answered", incremental)
		}
		s.sub.Ack(r.Nonce)
		if _, ok := s.step(); ok {
			t.Fatalf("incremental %t: answered twice", incremental)
		}
	}
}

// One response is under way at a time, and only its own nonce ends that.
func TestOneInFlight(t *testing.T) {
	st := store.New[*resource.Resource](store.Options{})
	s := newSink(t, NewHub(st, always), Options{Incremental: true})
	apply(st, set(t, "ns/a", "a.example.org"))
	first, _ := s.step()
	apply(st, set(t, "ns/b", "b.example.org"))
	if _, ok := s.step(); ok {
		t.Fatal("a second response before the ACK of the first")
	}
	if s.sub.Ack("2026-11-21 02:01:37.5 +0000 UTC m=+0.12") || s.sub.Ack("0") || s.sub.Nack("", "x") {
		t.Fatal("a foreign nonce was taken for the ACK")
	}
	apply(st, set(t, "ns/b", "b2.example.org"))
	if !s.sub.Ack(first.Nonce) || s.sub.Ack(first.Nonce) {
		t.Fatal("the nonce of the response must be taken, once")
	}
	r, ok := s.step()
	if !ok || r.Resources != 1 || s.have["ns/b"] != "b2.example.org" {
		t.Fatalf("what changed meanwhile is one response with the newest: %d resources, %v", r.Resources, s.have)
	}
}

// A sink that comes back with the versions that it holds gets what it lacks: changed, new, and removed while it was away.
func TestResume(t *testing.T) {
	st := store.New[*resource.Resource](store.Options{})
	h := NewHub(st, always)
	for i := range 100 {
		apply(st, set(t, fmt.Sprintf("ns/s%d", i), "a.example.org"))
	}
	s := newSink(t, h, Options{Incremental: true})
	s.step()
	apply(st, set(t, "ns/s7", "b.example.org"), set(t, "ns/new", "c.example.org"), remove("ns/s9"))
	versions := maps.Clone(s.vers)
	versions["ns/never-there"] = "1"
	again := newSink(t, h, Options{Incremental: true, Versions: versions})
	again.have, again.vers = s.have, s.vers
	r, _ := again.step()
	if r.Resources != 2 || !slices.Equal(r.Removed, []string{"ns/never-there", "ns/s9"}) {
		t.Errorf("%d resources, removed %v; want ns/s7 and ns/new, and ns/s9 removed", r.Resources, r.Removed)
	}
	if d := cmp.Diff(state(st), again.have); d != "" {
		t.Errorf("(-store +sink):\n%s", d)
	}
}

// A first listing larger than a message comes in several, and what changes between them is not lost.
func TestFirstListingInParts(t *testing.T) {
	st := store.New[*resource.Resource](store.Options{})
	h := NewHub(st, always)
	long := strings.Repeat("x", 4000)
	for i := range 2000 {
		apply(st, set(t, fmt.Sprintf("ns/s%d", i), long))
	}
	versions := map[string]string{"ns/gone-1": "1", "ns/gone-2": "1"}
	s := newSink(t, h, Options{Incremental: true, Versions: versions})
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
		s.sub.Ack(r.Nonce)
	}
	if parts < 3 {
		t.Errorf("%d parts, want several", parts)
	}
	if d := cmp.Diff(state(st), s.have); d != "" {
		t.Errorf("(-store +sink):\n%s", d)
	}
}

// A sink that is too far behind is told so, and one of the state of the world does not mind.
func TestFellBehind(t *testing.T) {
	st := store.New[*resource.Resource](store.Options{Tombstones: 1})
	h := NewHub(st, always)
	apply(st, set(t, "ns/a", "a"), set(t, "ns/b", "a"), set(t, "ns/c", "a"))
	delta, all := newSink(t, h, Options{Incremental: true}), newSink(t, h, Options{})
	for _, s := range []*sink{delta, all} {
		r, _ := s.step()
		s.sub.Ack(r.Nonce)
	}
	apply(st, remove("ns/a"), remove("ns/b"))
	if _, _, err := delta.sub.Next(); !errors.Is(err, ErrFellBehind) {
		t.Errorf("error %v, want ErrFellBehind", err)
	}
	all.step()
	if d := cmp.Diff(state(st), all.have); d != "" {
		t.Errorf("(-store +sink):\n%s", d)
	}
}

// A subscription to names gets these only; a name that does not exist is answered as removed; asking again answers again.
func TestNames(t *testing.T) {
	st := store.New[*resource.Resource](store.Options{})
	s := newSink(t, NewHub(st, always), Options{Incremental: true})
	apply(st, set(t, "ns/a", "a"), set(t, "ns/b", "b"))
	s.sub.Narrow()
	s.sub.Add("ns/a", "ns/none")
	r, _ := s.step()
	if r.Resources != 1 || !slices.Equal(r.Removed, []string{"ns/none"}) {
		t.Errorf("%d resources, removed %v", r.Resources, r.Removed)
	}
	s.sub.Ack(r.Nonce)
	apply(st, set(t, "ns/b", "b2"))
	if _, ok := s.step(); ok {
		t.Error("a name that was not asked for was sent")
	}
	apply(st, set(t, "ns/none", "n"))
	r, ok := s.step()
	if !ok || r.Resources != 1 {
		t.Error("a name that came into being was not sent")
	}
	s.sub.Ack(r.Nonce)
	s.sub.Add("ns/a")
	r, ok = s.step()
	if !ok || r.Resources != 1 {
		t.Error("a name that was asked for again was not sent again")
	}
	s.sub.Ack(r.Nonce)
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

// One change re-encodes one page; the others are the very same bytes, for every sink.
func TestPagesAreShared(t *testing.T) {
	st := store.New[*resource.Resource](store.Options{})
	h := NewHub(st, always)
	for i := range 2000 {
		apply(st, set(t, fmt.Sprintf("ns/s%d", i), strings.Repeat("x", 100)))
	}
	a, b := newSink(t, h, Options{}), newSink(t, h, Options{})
	ra, _ := a.step()
	rb, _ := b.step()
	if &ra.Segments[0] != &rb.Segments[0] {
		t.Error("two sinks have two lists of pages")
	}
	a.sub.Ack(ra.Nonce)
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

func filled(b *testing.B, size int) (*resourceStore, *Hub, [2][]op) {
	st := store.New[*resource.Resource](store.Options{})
	var changes [2][]op
	for i := range size {
		apply(st, set(b, fmt.Sprintf("ns/service-%d", i), strings.Repeat("x", 100)))
		if i < 1000 {
			for v := range changes {
				changes[v] = append(changes[v], set(b, fmt.Sprintf("ns/service-%d", i), fmt.Sprintf("%d-%s", v, strings.Repeat("x", 100))))
			}
		}
	}
	return st, NewHub(st, always), changes
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
			s.sub.Ack(r.Nonce)
		}
	}
}

// BenchmarkOneChange is one changed resource of 100,000, from Apply to the segments of each sink's response.
func BenchmarkOneChange(b *testing.B) {
	for _, mode := range []string{"delta", "sotw"} {
		for _, sinks := range []int{1, 32} {
			b.Run(fmt.Sprintf("%s/sinks=%d", mode, sinks), func(b *testing.B) {
				st, h, changes := filled(b, 100_000)
				var all []*sink
				for range sinks {
					all = append(all, newSink(b, h, Options{Incremental: mode == "delta"}))
				}
				settle(b, all)
				b.ReportAllocs()
				i := 0
				for b.Loop() {
					st.Apply(changes[(i/1000)&1][i%1000 : i%1000+1])
					for _, s := range all {
						r, ok, _ := s.sub.Next()
						if !ok {
							b.Fatal("no response")
						}
						s.sub.Ack(r.Nonce)
					}
					i++
				}
			})
		}
	}
}

func setShape(t testing.TB, shape resource.Shape, name, host string) op {
	o := set(t, name, host)
	o.Collection = resource.Key(entries, shape)
	return o
}

func removeShape(shape resource.Shape, name string) op {
	return op{Collection: resource.Key(entries, shape), Name: name, Remove: true}
}

// What a sink said that it holds and what changed since is there all the time,
// although the listing comes in parts and the change in a later one than the
// listing's last.
func TestHeldIsNotRemovedBetweenParts(t *testing.T) {
	st := store.New[*resource.Resource](store.Options{})
	long := strings.Repeat("x", 10_000)
	for i := range 400 {
		apply(st, set(t, fmt.Sprintf("ns/s%d", i), long))
	}
	apply(st, set(t, "ns/held", "old"))
	s := newSink(t, NewHub(st, always), Options{Incremental: true, Versions: map[string]string{"ns/held": "another"}})
	s.have = map[string]string{"ns/held": "older"}
	r, _ := s.step()
	for i := range 400 {
		apply(st, set(t, fmt.Sprintf("ns/s%d", i), "y"+long))
	}
	apply(st, set(t, "ns/held", "new"))
	parts := 1
	for {
		s.sub.Ack(r.Nonce)
		var ok bool
		if r, ok = s.step(); !ok {
			break
		}
		parts++
		if len(r.Removed) > 0 {
			t.Errorf("part %d removes %v", parts, r.Removed)
		}
	}
	if d := cmp.Diff(state(st), s.have); d != "" || parts < 3 {
		t.Errorf("%d parts (-store +sink):\n%s", parts, d)
	}
}

// A subscription whose form changes gets everything again, and loses what only the old form had, removals that it had not been told yet
// included; also while a response is under way.
func TestReform(t *testing.T) {
	for _, underWay := range []bool{false, true} {
		for _, incremental := range []bool{false, true} {
			t.Run(fmt.Sprintf("incremental=%t,under way=%t", incremental, underWay), func(t *testing.T) {
				st := store.New[*resource.Resource](store.Options{})
				s := newSink(t, NewHub(st, always), Options{Incremental: incremental})
				apply(st,
					setShape(t, resource.Inline, "ns/both", "inline"), setShape(t, resource.Inline, "ns/old", "inline"), setShape(t, resource.Inline, "ns/gone", "inline"),
					setShape(t, resource.Workload, "ns/both", "workload"), setShape(t, resource.Workload, "ns/new", "workload"))
				r, _ := s.step()
				if !underWay {
					s.sub.Ack(r.Nonce)
				}
				apply(st, removeShape(resource.Inline, "ns/gone"))
				s.sub.Reform(resource.Form{Shape: resource.Workload})
				if underWay {
					if _, ok := s.step(); ok {
						t.Error("a second response went out")
					}
					s.sub.Ack(r.Nonce)
				}
				r, ok := s.step()
				if !ok {
					t.Fatal("no response in the new form")
				}
				if d := cmp.Diff(map[string]string{"ns/both": "workload", "ns/new": "workload"}, s.have); d != "" {
					t.Errorf("(-want +got):\n%s", d)
				}
				s.sub.Ack(r.Nonce)
				if _, ok := s.step(); ok {
					t.Error("a response for nothing")
				}
				apply(st, removeShape(resource.Workload, "ns/new"))
				s.step()
				if _, has := s.have["ns/new"]; has {
					t.Error("a change in the new form was not sent")
				}
			})
		}
	}
}

// What only the old form had can be more than one message, and goes in several.
func TestReformRemovesInParts(t *testing.T) {
	st := store.New[*resource.Resource](store.Options{})
	shared := setShape(t, resource.Inline, "ns/any", "inline")
	for i := range 30_000 {
		o := shared
		o.Name = fmt.Sprintf("ns/%0200d", i)
		apply(st, o)
	}
	apply(st, setShape(t, resource.Workload, "ns/new", "workload"))
	s := newSink(t, NewHub(st, always), Options{Incremental: true})
	held := map[string]bool{}
	parts := 0
	for {
		r, ok, err := s.sub.Next()
		if err != nil {
			t.Fatal(err)
		}
		if !ok {
			if parts > 0 {
				break
			}
			all, _ := st.All(entries)
			for c := range all {
				held[c.Name] = true
			}
			s.sub.Reform(resource.Form{Shape: resource.Workload})
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
		if len(held) > 0 || len(r.Removed) > 0 {
			parts++
		}
		s.sub.Ack(r.Nonce)
	}
	if len(held) > 0 || parts < 2 {
		t.Errorf("%d names are left after %d parts", len(held), parts)
	}
}

// A subscription that becomes one to all names loses what was removed since it was last told, and a name that it asked for
// remains asked for when it becomes one to names again.
func TestWidenAndNarrow(t *testing.T) {
	st := store.New[*resource.Resource](store.Options{})
	s := newSink(t, NewHub(st, always), Options{Incremental: true})
	apply(st, set(t, "ns/a", "a"), set(t, "ns/b", "b"))
	s.sub.Narrow()
	s.sub.Add("ns/a", "ns/b")
	r, _ := s.step()
	s.sub.Ack(r.Nonce)
	apply(st, remove("ns/a"))
	s.sub.Widen()
	r, _ = s.step()
	if d := cmp.Diff(map[string]string{"ns/b": "b"}, s.have); d != "" {
		t.Errorf("widened (-want +got):\n%s", d)
	}
	s.sub.Ack(r.Nonce)
	s.sub.Narrow()
	apply(st, set(t, "ns/b", "b2"), set(t, "ns/c", "c"))
	s.step()
	if d := cmp.Diff(map[string]string{"ns/b": "b2"}, s.have); d != "" {
		t.Errorf("narrowed (-want +got):\n%s", d)
	}
}

// With all names, one that is subscribed to once more or dropped is answered, once, beside what changed.
func TestNamesAmongAll(t *testing.T) {
	st := store.New[*resource.Resource](store.Options{})
	s := newSink(t, NewHub(st, always), Options{Incremental: true})
	apply(st, set(t, "ns/a", "a"), set(t, "ns/b", "b"))
	r, _ := s.step()
	s.sub.Ack(r.Nonce)
	s.sub.Add("ns/a", "ns/b", "ns/none")
	apply(st, set(t, "ns/b", "b2"))
	if r, _ = s.step(); r.Resources != 2 || !slices.Equal(r.Removed, []string{"ns/none"}) {
		t.Errorf("%d resources, removed %v", r.Resources, r.Removed)
	}
	s.sub.Ack(r.Nonce)
	s.sub.Drop("ns/a")
	if r, _ = s.step(); r.Resources != 1 {
		t.Errorf("dropped: %d resources", r.Resources)
	}
	s.sub.Ack(r.Nonce)
	if r, ok := s.step(); ok {
		t.Errorf("a response for nothing: %+v", r)
	}
}

// Many names are answered in responses of bounded size.
func TestNamesAreChunked(t *testing.T) {
	st := store.New[*resource.Resource](store.Options{})
	s := newSink(t, NewHub(st, always), Options{Incremental: true})
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
		s.sub.Ack(r.Nonce)
	}
}
