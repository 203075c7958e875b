package conflict

import (
	"cmp"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	gocmp "github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/proto"
	networking "istio.io/api/networking/v1alpha3"

	"github.com/isthmus-mesh/isthmus/plugin/collection"
	"github.com/isthmus-mesh/isthmus/server/encode"
	"github.com/isthmus-mesh/isthmus/server/state/record"
)

// endpoint is an instance of a service in tests.
type endpoint struct{ record.Content }

func (e *endpoint) Tail() []byte { return nil }

// service is a service in tests.
type service struct {
	name, registry string
	own            *record.Composition[*endpoint]
}

func (s *service) Identity() (name, registry, selector string) {
	return s.name, s.registry, "of-" + s.registry
}
func (s *service) Instances() *record.Composition[*endpoint] { return s.own }
func (s *service) Derive(p *encode.Part, _ *endpoint) *endpoint {
	e := &endpoint{record.Of(p)}
	e.Set(record.Derived, true)
	return e
}

func newEndpoint(name string, we *networking.WorkloadEntry) *endpoint {
	spec, err := proto.MarshalOptions{Deterministic: true}.Marshal(we)
	if err != nil {
		panic(err)
	}
	p := &encode.Part{Collection: collection.WorkloadEntry, Name: name, Metadata: encode.WithName(nil, name), Spec: spec, Address: we.GetAddress()}
	p.Hash = encode.HashOf([]byte(name), spec)
	return &endpoint{record.Of(p)}
}

// text returns an endpoint in words.
func text(e *endpoint) string {
	we := new(networking.WorkloadEntry)
	if err := proto.Unmarshal(e.Spec(), we); err != nil {
		panic(err)
	}
	return fmt.Sprintf("%s %s %v *%d %v derived %v", e.Name(), we.GetAddress(), we.GetPorts(), we.GetWeight(), we.GetLabels(), e.Is(record.Derived))
}

// naive returns in words what is served of members, from nothing but their
// endpoints.
func naive(members []Member[*service]) (out []string) {
	type selected struct {
		n int
		e *endpoint
	}
	var all []selected
	sums := make([]uint64, len(members))
	taken := make(map[string]int) // the first member with an address and ports
	for n, m := range members {
		for e := range m.ID.own.All() {
			ports := m.portsOf(e.Spec())
			if m.Ports == nil {
				for _, number := range encode.PortNumbers(e.Spec()) {
					ports = append(ports, encode.NamedPort{Number: number})
				}
			}
			at := fmt.Sprint(e.Address(), ports)
			if first, is := taken[at]; m.Total > 0 && m.Share == 0 || is && first != n {
				continue
			}
			taken[at] = n
			sums[n] += uint64(encode.Weight(e.Spec()))
			all = append(all, selected{n, e})
		}
	}
	for _, s := range all {
		m, lead := members[s.n], members[0].ID
		if s.n == 0 && m.Total == 0 {
			out = append(out, text(s.e))
			continue
		}
		we := new(networking.WorkloadEntry)
		if err := proto.Unmarshal(s.e.Spec(), we); err != nil {
			panic(err)
		}
		if we.Labels == nil {
			we.Labels = make(map[string]string)
		}
		we.Labels[encode.SelectorLabel] = "of-" + lead.registry
		name := s.e.Name()
		if m.Total > 0 {
			we.Weight = m.weightOf(uint64(encode.Weight(s.e.Spec())), roundWeight(sums[s.n]))
		}
		if s.n > 0 {
			if m.Ports != nil {
				we.Ports = make(map[string]uint32)
				for _, p := range m.portsOf(s.e.Spec()) {
					we.Ports[p.Name] = p.Number
				}
			}
			_, short, _ := strings.Cut(name, "/")
			name = namespace(lead.name) + "/" + short + "." + m.ID.registry
		}
		e := newEndpoint(name, we)
		e.Set(record.Derived, true)
		out = append(out, text(e))
	}
	slices.Sort(out)
	return out
}

// Whatever the order of events, what is served follows from the members and
// their endpoints, and each step says how it differs from the one before.
func TestMergerModel(t *testing.T) {
	for seed := range uint64(400) {
		r := rand.New(rand.NewPCG(seed, 2))
		var services []*service
		for _, registry := range []string{"a", "b", "c"} {
			services = append(services, &service{registry + "/web", registry, &record.Composition[*endpoint]{}})
		}
		m := NewMerger[*service, *endpoint](services[0])
		var members []Member[*service]
		served := map[*endpoint]bool{}
		decide := func() {
			members = nil
			weighted := r.IntN(2) == 0
			for n, s := range services {
				if n > 0 && r.IntN(3) == 0 {
					continue
				}
				role := Role{}
				if r.IntN(2) == 0 {
					role.Ports = []Port{{"http", "http", 80}}
				}
				if weighted {
					role.Total, role.Share = 100, uint64([]int{0, 20, 80}[r.IntN(3)])
				}
				members = append(members, Member[*service]{s, role})
			}
			if len(members) == 1 {
				members = nil
			}
			m.Set(members)
		}
		decide()
		for step := range 60 {
			if r.IntN(12) == 0 {
				decide()
			}
			for range r.IntN(4) {
				s := services[r.IntN(3)]
				var lost, got []*endpoint
				for e := range s.own.All() {
					if r.IntN(6) == 0 {
						lost = append(lost, e)
					}
				}
				for n := range r.IntN(3) {
					we := &networking.WorkloadEntry{Address: fmt.Sprintf("10.0.0.%d", r.IntN(6)), Weight: uint32(r.IntN(3))}
					if r.IntN(2) == 0 {
						we.Ports = map[string]uint32{"http": uint32(8080 + r.IntN(2))}
					}
					got = append(got, newEndpoint(fmt.Sprintf("%s/%d-%d", s.registry, step, n+10*r.IntN(1000)), we))
				}
				if slices.ContainsFunc(members, func(m Member[*service]) bool { return m.ID == s }) {
					m.Note(got, lost)
				}
				s.own = s.own.With(got, lost)
			}
			parts, added, removed := m.Compose()
			for _, e := range removed {
				if !served[e] {
					t.Fatalf("seed %d, step %d: %s is removed, and was not served", seed, step, text(e))
				}
				delete(served, e)
			}
			for _, e := range added {
				served[e] = true
			}
			var got []string
			for e := range parts.All() {
				if !served[e] {
					t.Fatalf("seed %d, step %d: %s is served, and was not added", seed, step, text(e))
				}
				got = append(got, text(e))
			}
			slices.Sort(got)
			if d := gocmp.Diff(naive(members), got); d != "" || len(served) != parts.Len() {
				t.Fatalf("seed %d, step %d: %d served (-want +got):\n%s", seed, step, len(served), d)
			}
			if len(added)+len(removed) > 0 && cmp.Compare(len(got), parts.Len()) != 0 {
				t.Fatalf("seed %d, step %d: %d of %d", seed, step, len(got), parts.Len())
			}
		}
	}
}

// A decision that changes nothing replaces no endpoint.
func TestSameDecision(t *testing.T) {
	a, b := &service{"a/web", "a", &record.Composition[*endpoint]{}}, &service{"b/web", "b", &record.Composition[*endpoint]{}}
	a.own = a.own.With([]*endpoint{newEndpoint("a/1", &networking.WorkloadEntry{Address: "10.0.0.1"})}, nil)
	b.own = b.own.With([]*endpoint{newEndpoint("b/1", &networking.WorkloadEntry{Address: "10.0.0.2"})}, nil)
	m := NewMerger[*service, *endpoint](a)
	members := []Member[*service]{{ID: a}, {ID: b}}
	m.Set(members)
	if parts, added, _ := m.Compose(); parts.Len() != 2 || len(added) != 2 {
		t.Fatalf("%d served, %d added", parts.Len(), len(added))
	}
	m.Set(members)
	if _, added, removed := m.Compose(); len(added)+len(removed) > 0 {
		t.Errorf("%d added, %d removed", len(added), len(removed))
	}
	m.Set(nil)
	if parts, _, removed := m.Compose(); parts.Len() > 0 || len(removed) != 2 || m.IsWeighted() || len(m.Members()) > 0 {
		t.Errorf("%d served, %d removed", parts.Len(), len(removed))
	}
}

// The name of a derived endpoint says where it is from, and is never too long.
func TestDerivedName(t *testing.T) {
	for _, test := range []struct{ lead, registry, name, want string }{
		{"a", "b", "b/web-1", "a/web-1.b"},
		{"a", "b", "c/web-1", "a/web-1.c.b"},
	} {
		if got := derivedName(test.lead, test.registry, test.name); got != test.want {
			t.Errorf("%s, want %s", got, test.want)
		}
	}
	x, y := derivedName("a", "b", "c/"+strings.Repeat("x", 253)), derivedName("a", "b", "d/"+strings.Repeat("x", 253))
	if x == y || len(x) != len("a/")+maxDerivedName || !strings.HasSuffix(x, ".b") {
		t.Errorf("%s and %s", x, y)
	}
}
