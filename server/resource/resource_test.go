package resource

import (
	"bytes"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/testing/protocmp"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/timestamppb"
	mcp "istio.io/api/mcp/v1alpha1"
	networking "istio.io/api/networking/v1alpha3"

	"github.com/isthmus-mesh/isthmus/plugin/collection"
)

// encode returns a resource as a plugin would send it.
func encode(t testing.TB, name string, spec proto.Message) []byte {
	t.Helper()
	body, err := anypb.New(spec)
	if err != nil {
		t.Fatal(err)
	}
	raw, err := proto.MarshalOptions{Deterministic: true}.Marshal(&mcp.Resource{
		Metadata: &mcp.Metadata{Name: name, CreateTime: &timestamppb.Timestamp{Seconds: 1e9}, Labels: map[string]string{"a": "b"}},
		Body:     body,
	})
	if err != nil {
		t.Fatal(err)
	}
	return raw
}

func part(t testing.TB, name string, spec proto.Message) *Part {
	t.Helper()
	p, err := Parse(encode(t, name, spec))
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func entry(host string) *networking.ServiceEntry {
	return &networking.ServiceEntry{
		Hosts:      []string{host},
		Ports:      []*networking.ServicePort{{Number: 80, Name: "http", Protocol: "HTTP"}},
		Resolution: networking.ServiceEntry_STATIC,
	}
}

func workload(address string, port uint32) *networking.WorkloadEntry {
	return &networking.WorkloadEntry{Address: address, Ports: map[string]uint32{"http": port}}
}

// decode returns what a sink makes of an encoding.
func decode(t testing.TB, enc *Encoding, spec proto.Message) *mcp.Metadata {
	t.Helper()
	raw := bytes.Join(enc.Segments, nil)
	if len(raw) != enc.Size {
		t.Errorf("Size is %d, the segments have %d bytes", enc.Size, len(raw))
	}
	var res mcp.Resource
	if err := proto.Unmarshal(raw, &res); err != nil {
		t.Fatal(err)
	}
	if err := res.GetBody().UnmarshalTo(spec); err != nil {
		t.Fatal(err)
	}
	return res.GetMetadata()
}

func service(t testing.TB, host string) *Service {
	s := NewService("dc1", "web")
	s.SetEntry(part(t, "consul/web", entry(host)))
	return s
}

// The inline shape is the ServiceEntry with its instances as endpoints, ordered by address, port and name.
func TestInline(t *testing.T) {
	s := service(t, "web.service.consul")
	for i, p := range []struct {
		address string
		port    uint32
	}{{"10.0.0.2", 80}, {"10.0.0.1", 81}, {"10.0.0.1", 80}} {
		s.SetInstance(part(t, fmt.Sprintf("consul/web-%d", i), workload(p.address, p.port)))
	}
	enc := s.Resource(Inline).Encode(Form{})
	var got networking.ServiceEntry
	meta := decode(t, enc, &got)

	want := entry("web.service.consul")
	for _, e := range []*networking.WorkloadEntry{workload("10.0.0.1", 80), workload("10.0.0.1", 81), workload("10.0.0.2", 80)} {
		e.Labels = map[string]string{SelectorLabel: "web"}
		want.Endpoints = append(want.Endpoints, e)
	}
	if d := cmp.Diff(want, &got, protocmp.Transform()); d != "" {
		t.Errorf("ServiceEntry (-want +got):\n%s", d)
	}
	wantMeta := &mcp.Metadata{
		Name: "consul/web", Version: enc.Version, CreateTime: &timestamppb.Timestamp{Seconds: 1e9}, Labels: map[string]string{"a": "b"},
	}
	if d := cmp.Diff(wantMeta, meta, protocmp.Transform()); d != "" || len(enc.Version) != 16 {
		t.Errorf("Metadata (-want +got):\n%s", d)
	}
}

// The workload shape is the ServiceEntry with a selector that its instances, resources of their own, match.
func TestWorkload(t *testing.T) {
	s := service(t, "web.service.consul")
	instance := s.SetInstance(part(t, "consul/web-0", workload("10.0.0.2", 80)))
	var got networking.ServiceEntry
	decode(t, s.Resource(Workload).Encode(Form{}), &got)
	want := entry("web.service.consul")
	want.WorkloadSelector = &networking.WorkloadSelector{Labels: map[string]string{SelectorLabel: "web"}}
	if d := cmp.Diff(want, &got, protocmp.Transform()); d != "" {
		t.Errorf("ServiceEntry (-want +got):\n%s", d)
	}
	var we networking.WorkloadEntry
	enc := instance.Encode(Form{})
	meta := decode(t, enc, &we)
	if meta.GetName() != "consul/web-0" || meta.GetVersion() != enc.Version || we.GetLabels()[SelectorLabel] != "web" {
		t.Errorf("WorkloadEntry: %v %v", meta, &we)
	}
}

// Without endpoints the inline shape has an empty list, or, where old endpoints would be kept then, a selector that nothing matches.
func TestInlineWithoutEndpoints(t *testing.T) {
	s := service(t, "web.service.consul")
	s.SetInstance(part(t, "consul/web-0", workload("10.0.0.2", 80)))
	for _, f := range []Form{{}, {EmptySelector: true}} {
		before := s.Resource(Inline).Encode(f).Version
		s.RemoveInstance("consul/web-0")
		enc := s.Resource(Inline).Encode(f)
		var got networking.ServiceEntry
		decode(t, enc, &got)
		if selects := got.GetWorkloadSelector().GetLabels()[SelectorLabel] == "web"; selects != f.EmptySelector || len(got.GetEndpoints()) != 0 {
			t.Errorf("form %v: %v", f, &got)
		}
		if before == enc.Version {
			t.Errorf("form %v: the version did not change", f)
		}
		s.SetInstance(part(t, "consul/web-0", workload("10.0.0.2", 80)))
		decode(t, s.Resource(Inline).Encode(f), &got)
		if got.GetWorkloadSelector() != nil || len(got.GetEndpoints()) != 1 {
			t.Errorf("form %v, with an endpoint again: %v", f, &got)
		}
	}
}

// Each workaround of a form shows in what it encodes and, since content differs, in the version.
func TestForms(t *testing.T) {
	s := service(t, "web.service.consul")
	s.SetVIP(VIPs("web.service.consul")[0].String())
	s.SetInstance(part(t, "consul/web-0", workload("10.0.0.1", 80)))
	s.SetInstance(part(t, "consul/web-1", workload("10.0.0.1", 81)))
	s.SetInstance(part(t, "consul/web-2", workload("10.0.0.2", 80)))
	r := s.Resource(Inline)
	plain := r.Encode(Form{})

	var se networking.ServiceEntry
	enc := r.Encode(Form{Address: true})
	decode(t, enc, &se)
	if a, err := netip.ParseAddr(strings.Join(se.GetAddresses(), ",")); err != nil || a.As4()[0] < 241 || a.As4()[0] > 250 || enc.Version == plain.Version {
		t.Errorf("address: %v, version %s beside %s", se.GetAddresses(), enc.Version, plain.Version)
	}

	enc = r.Encode(Form{PortSets: true})
	decode(t, enc, &se)
	l0, l1, l2 := se.GetEndpoints()[0].GetLabels()[PortsLabel], se.GetEndpoints()[1].GetLabels()[PortsLabel], se.GetEndpoints()[2].GetLabels()[PortsLabel]
	if l0 == "" || l0 != l1 || l2 != "" || enc.Version == plain.Version {
		t.Errorf("port sets: %q %q %q", l0, l1, l2)
	}
	s.RemoveInstance("consul/web-1")
	s.SetInstance(part(t, "consul/web-1", workload("10.0.0.1", 82)))
	decode(t, s.Resource(Inline).Encode(Form{PortSets: true}), &se)
	if se.GetEndpoints()[0].GetLabels()[PortsLabel] == l0 {
		t.Error("another set of ports has the same label")
	}

	enc = r.Encode(Form{OmitVersion: true})
	if meta := decode(t, enc, &se); meta.GetVersion() != "" || enc.Version == "" {
		t.Errorf("omit version: metadata has %q, the encoding %q", meta.GetVersion(), enc.Version)
	}
	if r.Encode(Form{OmitVersion: true}) != enc {
		t.Error("the second sink of a form does not share the first one's encoding")
	}
}

// Over random runs a service's resource decodes to what a plain map says, its version is that of a service that was built from the
// same instances in another order, and what did not change is shared.
func TestModel(t *testing.T) {
	for seed := range uint64(5) {
		r := rand.New(rand.NewPCG(seed, 7))
		s := service(t, "web.service.consul")
		model := map[string]*networking.WorkloadEntry{}
		for step := range 1500 {
			name := fmt.Sprintf("consul/web-%d", r.IntN(400))
			before := s.Resource(Inline)
			if r.IntN(3) == 0 {
				_, have := model[name]
				if s.RemoveInstance(name) != have {
					t.Fatalf("RemoveInstance(%s) = %t", name, !have)
				}
				delete(model, name)
			} else {
				we := workload(fmt.Sprintf("10.0.%d.%d", r.IntN(4), r.IntN(100)), uint32(80+r.IntN(3)))
				s.SetInstance(part(t, name, we))
				model[name] = we
			}
			after := s.Resource(Inline)
			shared := 0
			for _, b := range after.composed.blocks {
				if slices.Contains(before.composed.blocks, b) {
					shared++
				}
			}
			if len(after.composed.blocks)-shared > 3 {
				t.Fatalf("one change made %d of %d blocks anew", len(after.composed.blocks)-shared, len(after.composed.blocks))
			}
			if step%100 != 0 {
				continue
			}
			var got networking.ServiceEntry
			enc := after.Encode(Form{})
			decode(t, enc, &got)
			again := service(t, "web.service.consul")
			for _, name := range slices.SortedFunc(maps.Keys(model), func(a, b string) int { return strings.Compare(b, a) }) {
				again.SetInstance(part(t, name, model[name]))
			}
			want := again.Resource(Inline).Encode(Form{})
			if want.Version != enc.Version || !bytes.Equal(bytes.Join(want.Segments, nil), bytes.Join(enc.Segments, nil)) {
				t.Fatalf("seed %d step %d: another order of changes gives other bytes", seed, step)
			}
			if len(got.GetEndpoints()) != len(model) {
				t.Fatalf("%d endpoints, want %d", len(got.GetEndpoints()), len(model))
			}
			addresses := map[string]int{}
			for _, we := range model {
				addresses[fmt.Sprint(we.GetAddress(), we.GetPorts())]++
			}
			for _, e := range got.GetEndpoints() {
				addresses[fmt.Sprint(e.GetAddress(), e.GetPorts())]--
			}
			for a, n := range addresses {
				if n != 0 {
					t.Fatalf("%s: %d too few", a, n)
				}
			}
		}
	}
}

// What a plugin may not send is refused with the field that is wrong.
func TestParseRefuses(t *testing.T) {
	body, _ := anypb.New(entry("a.example.org"))
	foreign, _ := anypb.New(&mcp.Metadata{})
	now := &timestamppb.Timestamp{Seconds: 1}
	for _, test := range []struct {
		name string
		res  *mcp.Resource
		want string
	}{
		{"no name", &mcp.Resource{Metadata: &mcp.Metadata{CreateTime: now}, Body: body}, "metadata.name"},
		{"name without namespace", &mcp.Resource{Metadata: &mcp.Metadata{Name: "web", CreateTime: now}, Body: body}, "metadata.name"},
		{"upper case", &mcp.Resource{Metadata: &mcp.Metadata{Name: "ns/Web", CreateTime: now}, Body: body}, "metadata.name"},
		{"no create time", &mcp.Resource{Metadata: &mcp.Metadata{Name: "ns/web"}, Body: body}, "metadata.create_time"},
		{"no body", &mcp.Resource{Metadata: &mcp.Metadata{Name: "ns/web", CreateTime: now}}, "body"},
		{"foreign body", &mcp.Resource{Metadata: &mcp.Metadata{Name: "ns/web", CreateTime: now}, Body: foreign}, "istio.mcp.v1alpha1.Metadata"},
		{"broken body", &mcp.Resource{Metadata: &mcp.Metadata{Name: "ns/web", CreateTime: now}, Body: &anypb.Any{TypeUrl: body.TypeUrl, Value: []byte{0xff}}}, collection.ServiceEntry},
	} {
		raw, err := proto.Marshal(test.res)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := Parse(raw); err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: error %v, want one that names %q", test.name, err, test.want)
		}
	}
	if _, err := Parse(make([]byte, MaxSize+1)); err == nil {
		t.Error("a resource over the limit was accepted")
	}
}

// An instance that has the label of its service is left as it is; of a label that is there twice the last counts, as for every reader.
func TestLabelOfService(t *testing.T) {
	own := &networking.WorkloadEntry{Address: "10.0.0.1", Labels: map[string]string{SelectorLabel: "web", "a": "b"}}
	p := part(t, "consul/web-1", own)
	if q := p.withLabel(SelectorLabel, "web"); q != p {
		t.Error("it was changed although it has the label")
	}
	q := p.withLabel(SelectorLabel, "other")
	if q.label(SelectorLabel) != "other" || q.label("a") != "b" || q.label("b") != "" || q.Version() == p.Version() {
		t.Errorf("labels %q, %q, %q; versions %s and %s", q.label(SelectorLabel), q.label("a"), q.label("b"), p.Version(), q.Version())
	}
	if p.label(SelectorLabel) != "web" {
		t.Error("the part that it was made of changed")
	}
	var got networking.WorkloadEntry
	if err := proto.Unmarshal(q.spec, &got); err != nil || got.GetLabels()[SelectorLabel] != "other" {
		t.Errorf("decoded: %v, %v", got.GetLabels(), err)
	}
}

// Nothing of a message lives on in what was taken out of it.
func TestPartKeepsNothingOfTheMessage(t *testing.T) {
	raw := encode(t, "ns/web-1", workload("10.0.0.1", 80))
	p, err := Parse(raw)
	if err != nil {
		t.Fatal(err)
	}
	want := bytes.Join(NewResource(p, "dc1").Encode(Form{}).Segments, nil)
	for i := range raw {
		raw[i] = 0xff
	}
	if got := bytes.Join(NewResource(p, "dc1").Encode(Form{}).Segments, nil); p.Name() != "ns/web-1" || !bytes.Equal(want, got) {
		t.Errorf("%s changed with the message: %q", p.Name(), got)
	}
}

// The version that a plugin states counts for nothing; labels and annotations do.
func TestVersionIsOfContent(t *testing.T) {
	body, _ := anypb.New(entry("a.example.org"))
	version := func(m *mcp.Metadata) string {
		m.Name, m.CreateTime = "ns/web", &timestamppb.Timestamp{Seconds: 1}
		raw, err := proto.Marshal(&mcp.Resource{Metadata: m, Body: body})
		if err != nil {
			t.Fatal(err)
		}
		p, err := Parse(raw)
		if err != nil {
			t.Fatal(err)
		}
		return p.Version()
	}
	plain := version(&mcp.Metadata{})
	if v := version(&mcp.Metadata{Version: "7"}); v != plain {
		t.Errorf("with a stated version: %s, without: %s", v, plain)
	}
	if v := version(&mcp.Metadata{Annotations: map[string]string{"a": "b"}}); v == plain {
		t.Error("an annotation does not show in the version")
	}
}

// Whatever Parse accepts, a sink decodes.
func FuzzParse(f *testing.F) {
	f.Add(encode(f, "ns/web", entry("web.example.org")))
	f.Add(encode(f, "ns/web-1", workload("10.0.0.1", 80)))
	f.Add(encode(f, "ns/route", &networking.VirtualService{Hosts: []string{"a.example.org"}}))
	f.Add([]byte{0x0a, 0x00, 0x12, 0x00})
	f.Fuzz(func(t *testing.T, raw []byte) {
		p, err := Parse(raw)
		if err != nil {
			return
		}
		enc := NewResource(p, "dc1").Encode(Form{PortSets: true, Address: true})
		var res mcp.Resource
		if err := proto.Unmarshal(bytes.Join(enc.Segments, nil), &res); err != nil {
			t.Fatalf("accepted, but does not decode: %v", err)
		}
		if res.GetMetadata().GetName() != p.Name() || res.GetMetadata().GetVersion() != enc.Version || res.GetMetadata().GetCreateTime() == nil {
			t.Fatalf("metadata %v", res.GetMetadata())
		}
		body, err := res.GetBody().UnmarshalNew()
		if err != nil {
			t.Fatal(err)
		}
		se, ok := body.(*networking.ServiceEntry)
		if !ok || len(se.GetEndpoints()) > 0 || se.GetWorkloadSelector() != nil {
			return
		}
		s := NewService("dc1", "web")
		s.SetEntry(p)
		s.SetVIP("241.0.0.1")
		s.SetInstance(part(t, "ns/web-1", workload("10.0.0.1", 80)))
		s.SetInstance(part(t, "ns/web-2", workload("10.0.0.1", 81)))
		var got networking.ServiceEntry
		decode(t, s.Resource(Inline).Encode(Form{PortSets: true, Address: true}), &got)
		if len(got.GetEndpoints()) != 2 {
			t.Fatalf("%d endpoints", len(got.GetEndpoints()))
		}
	})
}

// BenchmarkComposeOneLabelled is BenchmarkComposeOne with the label of
// exceptional endpoints, where all endpoints are exceptional.
func BenchmarkComposeOneLabelled(b *testing.B) {
	for _, size := range []int{10, 1_000, 20_000} {
		b.Run(fmt.Sprintf("endpoints=%d", size), func(b *testing.B) {
			s := service(b, "web.service.consul")
			instance := func(i int, weight uint32) *Part {
				return part(b, fmt.Sprintf("consul/web-%d", i), &networking.WorkloadEntry{Address: fmt.Sprintf("10.%d.%d.%d", i>>16, i>>8&255, i&255), Weight: weight})
			}
			for i := range size {
				s.SetInstance(instance(i, uint32(i+1)))
			}
			changed := [2]*Part{instance(5, 1_000_000), instance(5, 2_000_000)}
			b.ReportAllocs()
			i := 0
			for b.Loop() {
				s.SetInstance(changed[i&1])
				s.Resource(Inline).Encode(Form{EndpointsHash: true})
				i++
			}
		})
	}
}

// BenchmarkComposeOne is one changed instance of a service of a size, to its encoded inline ServiceEntry.
func BenchmarkComposeOne(b *testing.B) {
	for _, size := range []int{10, 1_000, 20_000} {
		b.Run(fmt.Sprintf("endpoints=%d", size), func(b *testing.B) {
			s := service(b, "web.service.consul")
			for i := range size {
				s.SetInstance(part(b, fmt.Sprintf("consul/web-%d", i), workload(fmt.Sprintf("10.%d.%d.%d", i>>16, i>>8&255, i&255), 80)))
			}
			changed := [2]*Part{part(b, "consul/web-5", workload("10.0.0.5", 81)), part(b, "consul/web-5", workload("10.0.0.5", 82))}
			b.ReportAllocs()
			i := 0
			for b.Loop() {
				s.SetInstance(changed[i&1])
				s.Resource(Inline).Encode(Form{})
				i++
			}
		})
	}
}

// BenchmarkParse is one WorkloadEntry as a plugin sends it.
func BenchmarkParse(b *testing.B) {
	raw := encode(b, "consul/web-5", workload("10.0.0.5", 81))
	b.ReportAllocs()
	for b.Loop() {
		if _, err := Parse(raw); err != nil {
			b.Fatal(err)
		}
	}
}
