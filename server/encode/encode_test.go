package encode

import (
	"errors"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/structpb"
	"google.golang.org/protobuf/types/known/timestamppb"
	mcp "istio.io/api/mcp/v1alpha1"
	networking "istio.io/api/networking/v1alpha3"

	"github.com/isthmus-mesh/isthmus/internal/testresource"
	"github.com/isthmus-mesh/isthmus/plugin/collection"
)

func named(name string) *mcp.Metadata {
	return &mcp.Metadata{Name: name, CreateTime: &timestamppb.Timestamp{Seconds: 1e9}, Labels: map[string]string{"a": "b"}}
}

func entry(host string) *networking.ServiceEntry {
	return &networking.ServiceEntry{
		Hosts: []string{host}, Resolution: networking.ServiceEntry_STATIC,
		Ports: []*networking.ServicePort{{Number: 80, Name: "http", Protocol: "HTTP"}},
	}
}

// What a plugin may not send is refused with the field that is wrong, and with
// the name if it can be read.
func TestParseRefuses(t *testing.T) {
	body, _ := anypb.New(entry("a.example.org"))
	foreign, _ := anypb.New(&mcp.Metadata{})
	now := &timestamppb.Timestamp{Seconds: 1}
	web := &mcp.Metadata{Name: "ns/web", CreateTime: now}
	for _, test := range []struct {
		name      string
		res       *mcp.Resource
		want      string
		legible   string
		knownKind bool
	}{
		{"no name", &mcp.Resource{Metadata: &mcp.Metadata{CreateTime: now}, Body: body}, "metadata.name", "", true},
		{"name without namespace", &mcp.Resource{Metadata: &mcp.Metadata{Name: "web", CreateTime: now}, Body: body}, "metadata.name", "web", true},
		{"upper case", &mcp.Resource{Metadata: &mcp.Metadata{Name: "ns/Web", CreateTime: now}, Body: body}, "metadata.name", "ns/Web", true},
		{"no create time", &mcp.Resource{Metadata: &mcp.Metadata{Name: "ns/web"}, Body: body}, "metadata.create_time", "ns/web", true},
		{"no body", &mcp.Resource{Metadata: web}, "body", "ns/web", false},
		{"foreign body", &mcp.Resource{Metadata: web, Body: foreign}, "istio.mcp.v1alpha1.Metadata", "ns/web", false},
		{"broken body", &mcp.Resource{Metadata: web, Body: &anypb.Any{TypeUrl: body.TypeUrl, Value: []byte{0xff}}}, collection.ServiceEntry, "ns/web", true},
		{
			"too large", &mcp.Resource{Metadata: web, Body: &anypb.Any{TypeUrl: body.TypeUrl, Value: make([]byte, MaxSize)}},
			"1 MiB", "ns/web", true,
		},
	} {
		b, err := proto.Marshal(test.res)
		if err != nil {
			t.Fatal(err)
		}
		_, err = Parse(b, nil)
		invalid, _ := err.(*Invalid) //nolint:errorlint // it is never wrapped
		if invalid == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: error %v, want one that names %q", test.name, err, test.want)
			continue
		}
		if invalid.Name != test.legible || (invalid.Collection != "") != test.knownKind || invalid.Nameless() != (test.legible != "ns/web") {
			t.Errorf("%s: name %q of %q, nameless %t", test.name, invalid.Name, invalid.Collection, invalid.Nameless())
		}
	}
}

// The version that a plugin states counts for nothing; labels and annotations
// do.
func TestVersionIsOfContent(t *testing.T) {
	version := func(change func(m *mcp.Metadata)) Hash {
		m := named("ns/web")
		change(m)
		p, err := Parse(testresource.Encode(m, entry("a.example.org")), nil)
		if err != nil {
			t.Fatal(err)
		}
		return p.Hash
	}
	plain := version(func(*mcp.Metadata) {})
	if v := version(func(m *mcp.Metadata) { m.Version = "7" }); v != plain {
		t.Errorf("with a stated version: %s, without: %s", v, plain)
	}
	if v := version(func(m *mcp.Metadata) { m.Annotations = map[string]string{"a": "b"} }); v == plain {
		t.Error("an annotation does not show in the version")
	}
}

// A hash as text is what it is compared with.
func TestHashText(t *testing.T) {
	for h, want := range map[Hash]string{0: "0000000000000000", 0xfedcba9876543210: "fedcba9876543210", 1: "0000000000000001"} {
		if h.String() != want || !h.Is(want) || h.Is(want[1:]) {
			t.Errorf("%x is %s, want %s", uint64(h), h, want)
		}
	}
}

// nested is an EnvoyFilter with a value in so many lists.
func nested(levels int) []byte {
	v := structpb.NewNumberValue(1)
	for range levels {
		v = structpb.NewListValue(&structpb.ListValue{Values: []*structpb.Value{v}})
	}
	patch := &networking.EnvoyFilter_Patch{Value: &structpb.Struct{Fields: map[string]*structpb.Value{"a": v}}}
	return testresource.Encode(named("ns/deep"), &networking.EnvoyFilter{ConfigPatches: []*networking.EnvoyFilter_EnvoyConfigObjectPatch{{Patch: patch}}})
}

// A body that is nested deeper than Envoy decodes is refused with its name.
func TestParseDepth(t *testing.T) {
	if _, err := Parse(nested(40), nil); err != nil {
		t.Error(err)
	}
	_, err := Parse(nested(60), nil)
	if e, ok := errors.AsType[*Invalid](err); !ok || e.Name != "ns/deep" || !strings.Contains(err.Error(), "recursion depth") {
		t.Errorf("60 lists: %v", err)
	}
}

// Whatever Parse accepts, a sink decodes, with the version that it is given.
func FuzzParse(f *testing.F) {
	f.Add(testresource.Encode(named("ns/web"), entry("web.example.org")))
	f.Add(testresource.Encode(named("ns/web-1"), &networking.WorkloadEntry{Address: "10.0.0.1", Ports: map[string]uint32{"http": 80}}))
	f.Add(testresource.Encode(named("ns/route"), &networking.VirtualService{Hosts: []string{"a.example.org"}}))
	f.Add([]byte{0x0a, 0x00, 0x12, 0x00})
	f.Add(nested(40))
	f.Add(nested(3000))
	f.Fuzz(func(t *testing.T, raw []byte) {
		p, err := Parse(raw, nil)
		if err != nil {
			return
		}
		h := Head{Metadata: p.Metadata, Version: p.Hash, Stated: true, BodyURL: p.BodyURL, Spec: len(p.Spec)}
		b := append(h.Append(nil), p.Spec...)
		if len(b) != h.Size() {
			t.Fatalf("%d bytes, Size is %d", len(b), h.Size())
		}
		var res mcp.Resource
		if err := proto.Unmarshal(b, &res); err != nil {
			t.Fatalf("accepted, but does not decode: %v", err)
		}
		if res.GetMetadata().GetName() != p.Name || res.GetMetadata().GetVersion() != p.Hash.String() || res.GetMetadata().GetCreateTime() == nil {
			t.Fatalf("metadata %v", res.GetMetadata())
		}
		body, err := res.GetBody().UnmarshalNew()
		if err != nil {
			t.Fatal(err)
		}
		switch body := body.(type) {
		case *networking.ServiceEntry:
			if got := Hosts(p.Spec); strings.Join(got, " ") != strings.Join(body.GetHosts(), " ") {
				t.Fatalf("hosts %q, want %q", got, body.GetHosts())
			}
			ServicePorts(p.Spec).HasAll(p.Spec)
		case *networking.WorkloadEntry:
			for i, port := range PortNumbers(p.Spec) {
				if len(body.GetPorts()) > i && i == 0 && len(PortNumbers(p.Spec)) == 1 && port != body.GetPorts()[firstKey(body.GetPorts())] {
					t.Fatalf("port %d of %v", port, body.GetPorts())
				}
			}
		}
		WithNanos(p.Metadata, 7)
	})
}

func firstKey(ports map[string]uint32) string {
	for name := range ports {
		return name
	}
	return ""
}

// BenchmarkParse is a WorkloadEntry taken apart, checked and hashed.
func BenchmarkParse(b *testing.B) {
	r := testresource.Encode(named("consul/web-5"), &networking.WorkloadEntry{
		Address: "10.0.0.5", Ports: map[string]uint32{"http": 80}, Labels: map[string]string{"version": "v1"},
	})
	b.ReportAllocs()
	for b.Loop() {
		if _, err := Parse(r, nil); err != nil {
			b.Fatal(err)
		}
	}
}
