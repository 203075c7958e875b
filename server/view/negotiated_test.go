package view

import (
	"bytes"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"path"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	mcp "istio.io/api/mcp/v1alpha1"
	networking "istio.io/api/networking/v1alpha3"

	"github.com/isthmus-mesh/isthmus/internal/testresource"
	pluginv1 "github.com/isthmus-mesh/isthmus/plugin/proto/isthmus/plugin/v1"
	"github.com/isthmus-mesh/isthmus/server/encode"
	"github.com/isthmus-mesh/isthmus/server/state"
)

// legacySink is a sink as Istio 1.8's library is one.
type legacySink struct {
	t    testing.TB
	view *View
	neg  *Subscription
	vers map[string]string // what it holds
	next map[string]string // what it will hold when it acknowledges
	// incremental is the permission that it gives
	incremental bool
}

func newLegacySink(t testing.TB, v *View, incremental bool) *legacySink {
	s := &legacySink{t: t, view: v, vers: map[string]string{}, incremental: incremental}
	s.connect()
	return s
}

// connect begins a stream.
func (s *legacySink) connect() {
	if s.neg != nil {
		s.neg.Close()
	}
	o := Options{Collection: entries, Framing: MCP, Incremental: s.incremental}
	if s.incremental {
		o.Versions = maps.Clone(s.vers)
	}
	s.neg, s.next = NewSubscription(s.view, o), nil
}

// step takes the next response if there is one.
func (s *legacySink) step() (r Response, full, ok bool) {
	s.t.Helper()
	r, ok, err := s.neg.Next()
	full = r.Full
	if err != nil {
		s.t.Fatal(err)
	}
	if !ok {
		return r, false, false
	}
	if s.next != nil {
		s.t.Fatal("a second response is under way")
	}
	s.next = map[string]string{}
	if !full {
		maps.Copy(s.next, s.vers)
	}
	raw := bytes.Join(r.Segments, nil)
	if len(raw) != r.Size {
		s.t.Fatalf("Size is %d, the segments have %d bytes", r.Size, len(raw))
	}
	count := 0
	for len(raw) > 0 {
		num, typ, n := protowire.ConsumeTag(raw)
		value, m := protowire.ConsumeBytes(raw[n:])
		if num != mcpResources || typ != protowire.BytesType || m < 0 {
			s.t.Fatalf("field %d type %d", num, typ)
		}
		raw = raw[n+m:]
		var res mcp.Resource
		if err := proto.Unmarshal(value, &res); err != nil {
			s.t.Fatal(err)
		}
		s.next[res.GetMetadata().GetName()] = res.GetMetadata().GetVersion()
		count++
	}
	if count != r.Resources {
		s.t.Fatalf("Resources is %d, there are %d", r.Resources, count)
	}
	for _, name := range r.Removed {
		if full {
			s.t.Errorf("a full response removes %s", name)
		}
		delete(s.next, name)
	}
	return r, full, true
}

func (s *legacySink) ack(r Response, incremental bool) {
	s.vers, s.next = s.next, nil
	s.neg.Ack(r.Nonce, incremental)
}

func (s *legacySink) nack(r Response) {
	s.next = nil
	s.neg.Nack(r.Nonce, "no")
}

func versions(db *state.DB, f encode.Form) map[string]string {
	m := map[string]string{}
	for c := range db.Changes(state.Kind{Collection: entries, Shape: f.Shape}, &state.Cursor{}) {
		if e := c.Record.Encode(encode.NewLayout(f)); !e.Absent {
			m[c.Name] = e.Version.String()
		}
	}
	return m
}

// Whatever a sink permits, refuses and however often it reconnects, it ends
// with what the store holds; and no response is for nothing.
func TestNegotiatedModel(t *testing.T) {
	for seed := range uint64(8) {
		t.Run(strconv.FormatUint(seed, 10), func(t *testing.T) {
			r := rand.New(rand.NewPCG(seed, 5))
			st := newDB(t, state.Options{Tombstones: 10})
			v := New(st)
			var sinks []*legacySink
			for i := range 8 {
				sinks = append(sinks, newLegacySink(t, v, i%2 == 0))
			}
			held := make(map[*legacySink]Response)
			act := func(s *legacySink, refuse bool) bool {
				if resp, ok := held[s]; ok {
					delete(held, s)
					if refuse && r.IntN(10) == 0 {
						s.nack(resp)
						if r.IntN(2) == 0 {
							s.neg.Again()
						}
						return true
					}
					s.ack(resp, s.incremental && (!refuse || r.IntN(5) > 0))
					return true
				}
				before := maps.Clone(s.vers)
				again, refused := s.neg.again, s.neg.refused
				first := s.neg.status.Sent == 0
				resp, full, ok := s.step()
				if !ok {
					return false
				}
				if !first && !again && !refused && maps.Equal(before, s.next) && full == (s.neg.full != "") && len(resp.Removed) == 0 && resp.Resources == 0 {
					t.Errorf("a response for nothing, nonce %s", resp.Nonce)
				}
				held[s] = resp
				return true
			}
			for range 2000 {
				name := fmt.Sprintf("ns/s%d", r.IntN(40))
				switch r.IntN(3) {
				case 0:
					apply(st, set(t, name, strconv.Itoa(r.IntN(5))+".example.org"))
				case 1:
					apply(st, remove(name))
				}
				s := sinks[r.IntN(len(sinks))]
				if r.IntN(50) == 0 {
					delete(held, s)
					s.connect()
				}
				act(s, true)
			}
			want := versions(st, encode.Form{})
			for i, s := range sinks {
				if s.neg.Refused() {
					s.neg.Again()
				}
				for act(s, false) {
				}
				if d := cmp.Diff(want, s.vers); d != "" {
					t.Errorf("sink %d (-store +sink):\n%s", i, d)
				}
			}
		})
	}
}

// A listing that is sent in parts is complete in the end, although names
// change, come and go between the parts; and no part removes what is there.
func TestNegotiatedParts(t *testing.T) {
	st := newDB(t, state.Options{})
	v := New(st)
	big := strings.Repeat("x", 10_000)
	for i := range 1000 {
		apply(st, set(t, fmt.Sprintf("ns/s%d", i), fmt.Sprintf("%d.%s", i, big)))
	}
	s := newLegacySink(t, v, true)
	first, full, _ := s.step()
	if !full || first.Size > MaxDelta {
		t.Fatalf("first part: full %v, %d bytes", full, first.Size)
	}
	s.ack(first, true)
	// It reconnects half-way: the rest comes, nothing is removed but what is
	// gone.
	apply(st, set(t, "ns/s1", "changed"), remove("ns/s2"), set(t, "ns/new", "new"))
	s.connect()
	parts := 0
	for {
		r, full, ok := s.step()
		if !ok {
			break
		}
		parts++
		if full {
			t.Error("a part replaces what the sink has")
		}
		for _, name := range r.Removed {
			if name != "ns/s2" && name != "ns/s3" {
				t.Errorf("%s is removed", name)
			}
		}
		if parts == 1 {
			apply(st, set(t, "ns/s500", "changed"), remove("ns/s3"))
		}
		s.ack(r, true)
	}
	if d := cmp.Diff(versions(st, encode.Form{}), s.vers); d != "" || parts < 2 {
		t.Errorf("%d parts (-store +sink):\n%s", parts, d)
	}
}

// Resources and removals together are not more than a sink receives.
func TestNegotiatedRemovalsCount(t *testing.T) {
	st := newDB(t, state.Options{})
	big := strings.Repeat("x", 10_000)
	for i := range 290 {
		apply(st, set(t, fmt.Sprintf("ns/s%d", i), fmt.Sprintf("%d.%s", i, big)))
	}
	s := newLegacySink(t, New(st), true)
	for i := range 100_000 {
		s.vers[fmt.Sprintf("ns/gone-%032d", i)] = "1"
	}
	s.connect()
	for {
		r, _, ok := s.step()
		if !ok {
			break
		}
		size := r.Size
		for _, name := range r.Removed {
			size += len(name) + 2
		}
		if size > MaxMessage {
			t.Errorf("a response of %d bytes", size)
		}
		s.ack(r, true)
	}
	if d := cmp.Diff(versions(st, encode.Form{}), s.vers); d != "" {
		t.Errorf("(-store +sink):\n%.2000s", d)
	}
}

// setLarge sets a service whose entry has more than [MaxDelta].
func setLarge(t testing.TB, name string) op {
	t.Helper()
	o := service(t, name, path.Base(name)+".example.org") // two with one host conflict
	for i := range 8 {
		label := map[string]string{"l": strings.Repeat("x", MaxDelta/7)}
		o.upsert = append(o.upsert, &pluginv1.Upsert{
			Service: name, Resource: testresource.Encode(testresource.Named(fmt.Sprintf("%s-%d", name, i)), &networking.WorkloadEntry{Address: "10.0.0.1", Labels: label}),
		})
	}
	return o
}

// A part that begins with what the sink holds already is not empty because what
// follows is large.
func TestNegotiatedPartsAfterHeld(t *testing.T) {
	st := newDB(t, state.Options{})
	apply(st, setLarge(t, "ns/a"), set(t, "ns/b", "b"), setLarge(t, "ns/c"))
	s := newLegacySink(t, New(st), true)
	s.vers["ns/b"] = versions(st, encode.Form{})["ns/b"]
	s.connect()
	for range 2 {
		r, full, ok := s.step()
		if !ok || full || r.Resources != 1 {
			t.Fatalf("there is a response: %v, full: %v, with %d resources; want one part with one", ok, full, r.Resources)
		}
		s.ack(r, true)
	}
	if d := cmp.Diff(versions(st, encode.Form{}), s.vers); d != "" {
		t.Errorf("(-store +sink):\n%s", d)
	}
}

// All of a collection is not sent to a sink that can resume if it is too large
// for one message.
func TestNegotiatedResume(t *testing.T) {
	st := newDB(t, state.Options{})
	big := strings.Repeat("x", 100_000)
	for i := range 50 {
		apply(st, set(t, fmt.Sprintf("ns/s%d", i), fmt.Sprintf("%d.%s", i, big)))
	}
	s := newLegacySink(t, New(st), true)
	r, _, _ := s.step()
	s.ack(r, true)
	r, _, _ = s.step()
	s.nack(r)
	s.neg.Again()
	if _, _, err := s.neg.Next(); !errors.Is(err, ErrResume) {
		t.Fatalf("error %v, want ErrResume", err)
	}
	s.connect()
	r, full, ok := s.step()
	if !ok || full || r.Resources != 50-len(s.vers) {
		t.Errorf("after the reconnect: full %v, %d resources, %d were there", full, r.Resources, len(s.vers))
	}
}

// A sink of synthetic entries is never told what is removed by name.
func TestSyntheticRemoval(t *testing.T) {
	st := newDB(t, state.Options{})
	apply(st, set(t, "ns/a", "a"), set(t, "ns/b", "b"))
	s := newLegacySink(t, New(st), true)
	s.neg.options.Form.Synthetic = true
	r, _, _ := s.step()
	s.ack(r, true)
	apply(st, set(t, "ns/a", "a2"))
	if r, full, _ := s.step(); full || r.Resources != 1 {
		t.Errorf("a change: full %v, %d resources", full, r.Resources)
	} else {
		s.ack(r, true)
	}
	apply(st, remove("ns/b"))
	if r, full, _ := s.step(); !full || len(r.Removed) > 0 || r.Resources != 1 {
		t.Errorf("a removal: full %v, %d resources, removed %v", full, r.Resources, r.Removed)
	}
}

// A resource that is absent in a sink's form is as good as removed, in both
// modes, and comes back.
func TestAbsent(t *testing.T) {
	static := func(endpoints int) op {
		entry := &networking.ServiceEntry{Hosts: []string{"a"}, Resolution: networking.ServiceEntry_STATIC}
		for i := range endpoints {
			entry.Endpoints = append(entry.Endpoints, &networking.WorkloadEntry{Address: fmt.Sprintf("10.0.0.%d", i+1)})
		}
		return plain(t, "ns/a", entry)
	}
	for _, incremental := range []bool{false, true} {
		t.Run(fmt.Sprintf("incremental=%v", incremental), func(t *testing.T) {
			st := newDB(t, state.Options{})
			v := New(st)
			apply(st, static(0), set(t, "ns/b", "b"))
			s := newLegacySink(t, v, incremental)
			s.neg = NewSubscription(v, Options{
				Collection: entries, Framing: MCP, Incremental: incremental, Form: encode.Form{Legacy: encode.LegacyDrop},
			})
			for n, names := range [][]string{{"ns/b"}, {"ns/a", "ns/b"}, {"ns/b"}} {
				if n > 0 {
					apply(st, static(2-n))
				}
				r, _, ok := s.step()
				if !ok {
					t.Fatalf("step %d: no response", n)
				}
				s.ack(r, incremental)
				if got := slices.Sorted(maps.Keys(s.vers)); !slices.Equal(got, names) {
					t.Errorf("step %d: the sink holds %v, want %v", n, got, names)
				}
			}
		})
	}
}

// BenchmarkNegotiatedOneChange is one changed resource of 10,000, from Apply to
// the segments of each sink's response.
func BenchmarkNegotiatedOneChange(b *testing.B) {
	for _, incremental := range []bool{true, false} {
		for _, count := range []int{1, 32} {
			b.Run(fmt.Sprintf("incremental=%v/sinks=%d", incremental, count), func(b *testing.B) {
				st, v, changes := filled(b, 10_000)
				sinks := make([]*Subscription, count)
				take := func(n *Subscription) bool {
					r, ok, err := n.Next()
					if err != nil {
						b.Fatal(err)
					}
					if ok {
						n.Ack(r.Nonce, incremental)
					}
					return ok
				}
				for i := range sinks {
					sinks[i] = NewSubscription(v, Options{Collection: entries, Framing: MCP, Incremental: incremental})
					for take(sinks[i]) {
					}
				}
				b.ReportAllocs()
				i := 0
				for b.Loop() {
					apply(st, changes[(i/1000)&1][i%1000])
					for _, n := range sinks {
						if !take(n) {
							b.Fatal("no response")
						}
					}
					i++
				}
			})
		}
	}
}
