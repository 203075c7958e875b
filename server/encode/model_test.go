package encode

import (
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"reflect"
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

	"github.com/isthmus-mesh/isthmus/internal/testresource"
)

// encodes fails the test unless b is an encoding of want in which no field is
// twice: the length of any other differs.
func encodes(t *testing.T, what string, b []byte, want proto.Message) {
	t.Helper()
	got := want.ProtoReflect().New().Interface()
	if err := proto.Unmarshal(b, got); err != nil {
		t.Fatalf("%s: %v", what, err)
	}
	if d := cmp.Diff(want, got, protocmp.Transform()); d != "" {
		t.Errorf("%s (-want +got):\n%s", what, d)
	}
	if len(b) != proto.Size(want) {
		t.Errorf("%s: %d bytes, want %d", what, len(b), proto.Size(want))
	}
}

func encoded(t *testing.T, m proto.Message) []byte {
	t.Helper()
	b, err := proto.MarshalOptions{Deterministic: true}.Marshal(m)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// What is read from encoded messages, and written into them, is what the same
// operation on the decoded message gives.
func TestWorkloadEntryModel(t *testing.T) {
	names := []string{"http", "grpc", "admin"}
	for seed := range uint64(300) {
		r := rand.New(rand.NewPCG(seed, 0))
		entry := &networking.WorkloadEntry{
			Address: fmt.Sprintf("10.0.0.%d", r.IntN(200)), Weight: uint32(r.IntN(3) * r.IntN(300)),
			Network: "n", Locality: "a/b", ServiceAccount: "sa",
		}
		port := func() map[string]uint32 {
			ports := map[string]uint32{}
			for _, name := range names {
				if r.IntN(2) == 0 {
					ports[name] = 1 + uint32(r.IntN(4)*r.IntN(20_000))
				}
			}
			return ports
		}
		entry.Ports = port()
		entry.Labels = map[string]string{"version": "v1"}
		if r.IntN(2) == 0 {
			entry.Labels[SelectorLabel] = "before"
		}
		raw := encoded(t, entry)

		w := Rewriting{Selector: fmt.Sprint("web-", seed), Weight: uint32(r.IntN(2) * r.IntN(300))}
		rewritten := proto.CloneOf(entry)
		rewritten.Labels[SelectorLabel] = w.Selector
		if w.Weight != 0 {
			rewritten.Weight = w.Weight
		}
		if r.IntN(2) == 0 {
			rewritten.Ports, w.Ports = port(), []NamedPort{}
			for _, name := range slices.Sorted(maps.Keys(rewritten.GetPorts())) {
				w.Ports = append(w.Ports, NamedPort{name, rewritten.GetPorts()[name]})
			}
		}
		encodes(t, "Rewrite", Rewrite(raw, w), rewritten)

		labelled := proto.CloneOf(entry)
		labelled.Labels["more"] = "x"
		encodes(t, "AppendLabel", AppendLabel(slices.Clone(raw), "more", "x"), labelled)

		if got := Weight(raw); got != max(entry.GetWeight(), 1) {
			t.Errorf("Weight of %d is %d", entry.GetWeight(), got)
		}
		if got, want := PortNumbers(raw), slices.Sorted(maps.Values(entry.GetPorts())); !slices.Equal(got, want) {
			t.Errorf("PortNumbers %v, want %v", got, want)
		}
		for _, name := range names {
			if got := PortOf(raw, name); got != entry.GetPorts()[name] {
				t.Errorf("PortOf %s is %d of %v", name, got, entry.GetPorts())
			}
		}

		// Attributes are everything but the address.
		moved := proto.CloneOf(entry)
		moved.Address = "10.1.0.1"
		relabelled := proto.CloneOf(moved)
		relabelled.Labels["version"] = "v2"
		if Attributes(raw) != Attributes(encoded(t, moved)) || Attributes(raw) == Attributes(encoded(t, relabelled)) {
			t.Errorf("attributes of %v are not everything but its address", entry)
		}

		// Endpoints, and whether they have the ports of the service.
		service := &networking.ServiceEntry{Hosts: []string{"a.example.org", "b.example.org"}, Ports: []*networking.ServicePort{{Number: 80, Name: "http"}, {Number: 81, Name: "grpc"}}}
		split := r.IntN(len(raw))
		b := encoded(t, service)
		before := len(b)
		b = AppendEndpoint(b, raw[:split], raw[split:])
		if len(b)-before != SizeEndpoint(len(raw)) {
			t.Errorf("SizeEndpoint is %d of %d", SizeEndpoint(len(raw)), len(b)-before)
		}
		good := &networking.WorkloadEntry{Address: "10.2.0.1", Ports: map[string]uint32{"http": 80}}
		b = AppendEndpoint(b, encoded(t, good), nil)
		b = AppendAddress(b, "240.0.0.1")
		b = AppendSelector(b, "web")
		service.Endpoints, service.Addresses = []*networking.WorkloadEntry{entry, good}, []string{"240.0.0.1"}
		service.WorkloadSelector = &networking.WorkloadSelector{Labels: map[string]string{SelectorLabel: "web"}}
		encodes(t, "endpoint, address, selector", b, service)
		if got := Hosts(b); !slices.Equal(got, service.GetHosts()) {
			t.Errorf("Hosts %q", got)
		}
		ports := ServicePorts(b)
		if d := cmp.Diff(Ports{"http": 80, "grpc": 81}, ports); d != "" {
			t.Errorf("ServicePorts (-want +got):\n%s", d)
		}
		all := true
		for name, number := range entry.GetPorts() {
			all = all && ports[name] == uint64(number)
		}
		if ports.Has(raw) != all || ports.HasAll(b) != all {
			t.Errorf("of ports %v: Has %t, HasAll %t, want %t", entry.GetPorts(), ports.Has(raw), ports.HasAll(b), all)
		}
	}
}

func TestMetadata(t *testing.T) {
	m := &mcp.Metadata{
		Name: "ns/web", CreateTime: &timestamppb.Timestamp{Seconds: 1e9, Nanos: 5},
		Labels: map[string]string{"a": "b"}, Annotations: map[string]string{"c": "d"},
	}
	raw := encoded(t, m)
	for _, tt := range []struct {
		name string
		got  []byte
		want func(m *mcp.Metadata)
	}{
		{"WithName", WithName(raw, "other/name"), func(m *mcp.Metadata) { m.Name = "other/name" }},
		{"WithNanos 0", WithNanos(raw, 0), func(m *mcp.Metadata) { m.CreateTime.Nanos = 0 }},
		{"WithNanos empty", WithNanos(raw, EmptyNanos), func(m *mcp.Metadata) { m.CreateTime.Nanos = EmptyNanos }},
		{"WithNanos", WithNanos(raw, lastNanos), func(m *mcp.Metadata) { m.CreateTime.Nanos = lastNanos }},
		{"AppendMetadataLabel", AppendMetadataLabel(slices.Clone(raw), "e", "f"), func(m *mcp.Metadata) { m.Labels["e"] = "f" }},
		{"AppendMetadataAnnotation", AppendMetadataAnnotation(slices.Clone(raw), "e", "f"), func(m *mcp.Metadata) { m.Annotations["e"] = "f" }},
		{"AppendSynthetic", AppendSynthetic(slices.Clone(raw), 1, 2), func(m *mcp.Metadata) {
			m.Annotations[ServiceVersionAnnotation], m.Annotations[EndpointsVersionAnnotation] = "0000000000000001", "0000000000000002"
		}},
	} {
		want := proto.CloneOf(m)
		tt.want(want)
		encodes(t, tt.name, tt.got, want)
	}
	if h := (&Head{Metadata: raw}); h.Size() != len(h.Append(nil)) {
		t.Errorf("a head without version has %d bytes, Size is %d", len(h.Append(nil)), h.Size())
	}
	for h, want := range map[Hash]uint64{0: firstNanos, lastNanos - firstNanos: lastNanos, lastNanos - firstNanos + 1: firstNanos} {
		if got := h.Nanos(); got != want || got <= EmptyNanos {
			t.Errorf("nanos of %d: %d, want %d", h, got, want)
		}
	}
}

// What a part says of its resource is what the decoded message says.
func TestParts(t *testing.T) {
	endpoints := []*networking.WorkloadEntry{{Address: "10.0.0.1"}}
	selector := &networking.WorkloadSelector{Labels: map[string]string{"a": "b"}}
	hosts := []string{"a.example.org"}
	const static, dns, none = networking.ServiceEntry_STATIC, networking.ServiceEntry_DNS, networking.ServiceEntry_NONE
	for _, tt := range []struct {
		entry *networking.ServiceEntry
		want  Part
	}{
		{&networking.ServiceEntry{Hosts: hosts, Resolution: static}, Part{Composable: true, Static: true}},
		{&networking.ServiceEntry{Hosts: hosts, Resolution: dns}, Part{Composable: true}},
		{&networking.ServiceEntry{Hosts: hosts, Resolution: none}, Part{Composable: true, OwnAddress: true}},
		{&networking.ServiceEntry{Hosts: hosts, Resolution: static, Endpoints: endpoints}, Part{Static: true}},
		{&networking.ServiceEntry{Hosts: hosts, Resolution: static, WorkloadSelector: selector}, Part{Static: true}},
		{&networking.ServiceEntry{Hosts: hosts, Resolution: static, Addresses: []string{"10.9.9.9"}}, Part{Composable: true, Static: true, OwnAddress: true}},
		{&networking.ServiceEntry{Hosts: []string{"*.example.org"}, Resolution: static}, Part{Composable: true, Static: true, OwnAddress: true}},
		{&networking.ServiceEntry{Hosts: []string{"a", "b"}, Resolution: static}, Part{Composable: true, Static: true, OwnAddress: true}},
	} {
		m := named("ns/web")
		m.Version, m.Annotations = "7", map[string]string{"c": "d"}
		p, err := Parse(testresource.Encode(m, tt.entry), nil)
		if err != nil {
			t.Fatal(err)
		}
		if p.Composable != tt.want.Composable || p.Static != tt.want.Static || p.OwnAddress != tt.want.OwnAddress || !slices.Equal(p.Hosts, tt.entry.GetHosts()) || p.Namespace() != "ns" {
			t.Errorf("%v: %+v", tt.entry, p)
		}
		encodes(t, "spec", p.Spec, tt.entry)
		m.Version = ""
		encodes(t, "metadata", p.Metadata, m)
		if got := maps.Collect(p.LabelsAndAnnotations()); !maps.Equal(got, map[string]string{"a": "b", "c": "d"}) {
			t.Errorf("labels and annotations %v", got)
		}
	}
	p, err := Parse(testresource.Encode(named("ns/web-1"), &networking.WorkloadEntry{Address: "10.0.0.1", Labels: map[string]string{"a": "b"}}), nil)
	if err != nil || p.Address != "10.0.0.1" || p.Label("a") != "b" || p.Label("b") != "" {
		t.Errorf("%+v, %v", p, err)
	}
	got, err := ParseEntry(encoded(t, &networking.ServiceEntry{
		Hosts: hosts, ExportTo: []string{"."}, Resolution: dns, Location: networking.ServiceEntry_MESH_INTERNAL,
		Ports: []*networking.ServicePort{{Name: "http", Protocol: "HTTP", Number: 80}, {Name: "grpc", Protocol: "GRPC", Number: 81, TargetPort: 8081}},
	}))
	want := Entry{
		Hosts: hosts, ExportTo: []string{"."}, Resolution: "DNS", Location: "MESH_INTERNAL",
		Ports: []ServicePort{{"http", "HTTP", 80, 80}, {"grpc", "GRPC", 81, 8081}},
	}
	if d := cmp.Diff(want, got); err != nil || d != "" {
		t.Errorf("ParseEntry: %v (-want +got):\n%s", err, d)
	}
}

// A hash is of everything that is served: collection, metadata, spec and tail,
// and of where one ends and the next begins.
func TestHashIsOfAll(t *testing.T) {
	if HashOf([]byte("ab"), []byte("c")) == HashOf([]byte("a"), []byte("bc")) || HashOf([]byte("a")) == HashOf([]byte("a"), nil) {
		t.Error("the boundaries of parts do not matter")
	}
	tail := func(b string) func(*Part) []byte { return func(*Part) []byte { return []byte(b) } }
	parse := func(raw []byte, tail func(*Part) []byte) Hash {
		t.Helper()
		p, err := Parse(raw, tail)
		if err != nil {
			t.Fatal(err)
		}
		return p.Hash
	}
	web := entry("a.example.org")
	raw := testresource.Encode(named("ns/web"), web)
	later := named("ns/web")
	later.CreateTime.Seconds++
	all := map[Hash]string{}
	for what, h := range map[string]Hash{
		"plain": parse(raw, nil), "tail": parse(raw, tail("a")), "other tail": parse(raw, tail("b")),
		"name": parse(testresource.Encode(named("ns/web2"), web), nil), "time": parse(testresource.Encode(later, web), nil),
		"spec": parse(testresource.Encode(named("ns/web"), entry("b.example.org")), nil),
		// The same bytes as another kind.
		"kind": parse(testresource.Encode(named("ns/web"), &networking.WorkloadEntry{}), nil), "other kind": parse(testresource.Encode(named("ns/web"), &networking.VirtualService{}), nil),
	} {
		if other, ok := all[h]; ok {
			t.Errorf("%s and %s have one hash", what, other)
		}
		all[h] = what
	}
	if parse(raw, tail("")) != parse(raw, nil) {
		t.Error("an empty tail changes the hash")
	}
}

// Forms differ in name, and what they serve in version, exactly if its content
// may differ. The names never change: versions are made of them.
func TestForms(t *testing.T) {
	all := Form{Workload, true, true, true, true, true, LegacyEndpoints, true, true}
	if want := "workload,omit-version,address,port-sets,empty-selector,endpoints-hash,legacy-endpoints,synthetic,registry"; all.String() != want {
		t.Errorf("the form with everything is %s, want %s", all, want)
	}
	if got := (Form{}).String() + " " + LegacyDrop.String() + " " + LegacyEmpty.String(); got != "inline legacy-drop legacy-empty" {
		t.Errorf("names %s", got)
	}
	const content = Hash(7)
	zero := NewLayout(Form{})
	// A ServiceEntry that is served as it is has the version of its content,
	// unless the form changes such entries too.
	plain := []string{"EndpointsHash", "Legacy"}
	composed := map[Hash]string{zero.VersionOf(content, true): "none"}
	for i := range reflect.TypeFor[Form]().NumField() {
		f := Form{}
		field, name := reflect.ValueOf(&f).Elem().Field(i), reflect.TypeFor[Form]().Field(i).Name
		if field.Kind() == reflect.Bool {
			field.SetBool(true)
		} else {
			field.SetUint(1)
		}
		l := NewLayout(f)
		v := l.VersionOf(content, true)
		if other, ok := composed[v]; ok {
			t.Errorf("%s and %s have one version", name, other)
		}
		composed[v] = name
		if got := l.VersionOf(content, false); (got != content) != slices.Contains(plain, name) {
			t.Errorf("%s: the version of an entry as it is: %s", name, got)
		}
		if l.VersionOf(content+1, true) != v+1 {
			t.Errorf("%s: hashes do not add up", name)
		}
	}
	for _, s := range []Shape{Inline, Workload} {
		if got, err := ParseShape(s.String()); got != s || err != nil {
			t.Errorf("ParseShape(%s) is %s, %v", s, got, err)
		}
	}
	if _, err := ParseShape("other"); err == nil {
		t.Error("an unknown shape is accepted")
	}
}

// A resource that is cut off or has a field twice is refused, and named if its
// name is whole and the only one.
func TestParseBroken(t *testing.T) {
	web := testresource.Encode(named("ns/web"), entry("a.example.org"))
	metadata := func(m *mcp.Metadata) []byte { return encoded(t, &mcp.Resource{Metadata: m}) }
	with := func(m *mcp.Metadata, more []byte) []byte {
		b, _ := anypb.New(entry("a.example.org"))
		return append(appendString(nil, resourceMetadata, string(append(encoded(t, m), more...))), encoded(t, &mcp.Resource{Body: b})...)
	}
	for _, tt := range []struct {
		name, legible string
		raw           []byte
	}{
		{"metadata twice", "ns/web", append(slices.Clone(web), metadata(named("ns/web"))...)},
		{"two names", "", append(slices.Clone(web), metadata(named("ns/other"))...)},
		{"body twice", "ns/web", append(slices.Clone(web), encoded(t, &mcp.Resource{Body: &anypb.Any{TypeUrl: "x"}})...)},
		{"name twice", "ns/web", with(named("ns/web"), encoded(t, &mcp.Metadata{Name: "ns/web"}))},
		{"time twice", "ns/web", with(named("ns/web"), encoded(t, &mcp.Metadata{CreateTime: &timestamppb.Timestamp{Seconds: 1}}))},
		{"unknown field", "ns/web", appendString(slices.Clone(web), 3, "x")},
		{"label that is not text", "ns/web", with(named("ns/web"), appendMapEntry(nil, metadataLabels, "a", "\xff"))},
		{"long namespace", strings.Repeat("n", 64) + "/a", testresource.Encode(named(strings.Repeat("n", 64)+"/a"), entry("a"))},
		{"long name", "n/" + strings.Repeat("a", 254), testresource.Encode(named("n/"+strings.Repeat("a", 254)), entry("a"))},
	} {
		_, err := Parse(tt.raw, nil)
		if e, ok := errors.AsType[*Invalid](err); !ok || e.Name != tt.legible {
			t.Errorf("%s: %v, want an error of %q", tt.name, err, tt.legible)
		}
	}
	whole := len(appendString(nil, metadataName, "ns/web")) + 2
	for n := range web {
		_, err := Parse(web[:n], nil)
		e, ok := errors.AsType[*Invalid](err)
		if legible := n >= whole; !ok || (e.Name == "ns/web") != legible || (e.Name == "") == legible {
			t.Errorf("cut off after %d bytes of %d: %v", n, len(web), err)
		}
	}
	longest := strings.Repeat("n", 63) + "/" + strings.Repeat("a", 253)
	if _, err := Parse(testresource.Encode(named(longest), entry("a")), nil); err != nil {
		t.Error(err)
	}
}
