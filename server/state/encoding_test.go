package state

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/testing/protocmp"
	"google.golang.org/protobuf/types/known/timestamppb"
	mcp "istio.io/api/mcp/v1alpha1"
	networking "istio.io/api/networking/v1alpha3"

	"github.com/isthmus-mesh/isthmus/internal/testresource"
	"github.com/isthmus-mesh/isthmus/plugin/collection"
	pluginv1 "github.com/isthmus-mesh/isthmus/plugin/proto/isthmus/plugin/v1"
	"github.com/isthmus-mesh/isthmus/server/encode"
)

// labelled is a resource whose metadata has more than it must.
func labelled(service, name string, spec proto.Message) *pluginv1.Upsert {
	return &pluginv1.Upsert{Service: service, Resource: testresource.Encode(&mcp.Metadata{
		Name: name, CreateTime: &timestamppb.Timestamp{Seconds: 1_600_000_000, Nanos: 99},
		Labels: map[string]string{"a": "b"}, Annotations: map[string]string{"c": "d"},
	}, spec)}
}

const web = "consul/web"

func webEntry() *networking.ServiceEntry {
	return &networking.ServiceEntry{
		Hosts: []string{"web.service.consul"}, Resolution: networking.ServiceEntry_STATIC,
		Ports: []*networking.ServicePort{{Number: 80, Name: "http", Protocol: "HTTP"}},
	}
}

func webInstance(address string, port uint32) *networking.WorkloadEntry {
	return &networking.WorkloadEntry{Address: address, Ports: map[string]uint32{"http": port}}
}

// say applies upserts of the service web.
func (e env) say(u ...*pluginv1.Upsert) { e.Registry("dc1").Apply(upserts(u...)) }

func (e env) webInstance(n int, address string, port uint32) {
	e.say(labelled(web, fmt.Sprintf("%s-%d", web, n), webInstance(address, port)))
}

// encoded returns a resource as a sink of a form gets it.
func (e env) encoded(coll, name string, f encode.Form, spec proto.Message) (enc Encoding, meta *mcp.Metadata) {
	e.t.Helper()
	r, ok := e.Get(Kind{coll, f.Shape}, name)
	if !ok {
		e.t.Fatalf("%s is not there", name)
	}
	if enc = r.Encode(encode.NewLayout(f)); enc.Absent {
		return enc, nil
	}
	res := decode(e.t, r, f)
	if err := res.GetBody().UnmarshalTo(spec); err != nil {
		e.t.Fatal(err)
	}
	return enc, res.GetMetadata()
}

func (e env) web(f encode.Form) (Encoding, *networking.ServiceEntry, *mcp.Metadata) {
	e.t.Helper()
	se := new(networking.ServiceEntry)
	enc, meta := e.encoded(collection.ServiceEntry, web, f, se)
	return enc, se, meta
}

// The inline shape is the ServiceEntry with its instances as endpoints, ordered
// by address, port and name.
func TestInline(t *testing.T) {
	e := newEnv(t, Options{}, "dc1")
	e.say(labelled(web, web, webEntry()))
	e.webInstance(0, "10.0.0.2", 80)
	e.webInstance(1, "10.0.0.1", 81)
	e.webInstance(2, "10.0.0.1", 80)
	enc, got, meta := e.web(encode.Form{})
	want := webEntry()
	for _, i := range []*networking.WorkloadEntry{webInstance("10.0.0.1", 80), webInstance("10.0.0.1", 81), webInstance("10.0.0.2", 80)} {
		i.Labels = map[string]string{encode.SelectorLabel: "web"}
		want.Endpoints = append(want.Endpoints, i)
	}
	if d := cmp.Diff(want, got, protocmp.Transform()); d != "" {
		t.Errorf("ServiceEntry (-want +got):\n%s", d)
	}
	wantMeta := &mcp.Metadata{
		Name: web, Version: enc.Version.String(), CreateTime: &timestamppb.Timestamp{Seconds: 1_600_000_000, Nanos: 99},
		Labels: map[string]string{"a": "b"}, Annotations: map[string]string{"c": "d"},
	}
	if d := cmp.Diff(wantMeta, meta, protocmp.Transform()); d != "" {
		t.Errorf("Metadata (-want +got):\n%s", d)
	}
}

// The workload shape is the ServiceEntry with a selector that its instances,
// resources of their own, match.
func TestWorkload(t *testing.T) {
	e := newEnv(t, Options{}, "dc1")
	e.say(labelled(web, web, webEntry()))
	e.webInstance(0, "10.0.0.2", 80)
	_, got, _ := e.web(encode.Form{Shape: encode.Workload})
	want := webEntry()
	want.WorkloadSelector = &networking.WorkloadSelector{Labels: map[string]string{encode.SelectorLabel: "web"}}
	if d := cmp.Diff(want, got, protocmp.Transform()); d != "" {
		t.Errorf("ServiceEntry (-want +got):\n%s", d)
	}
	var we networking.WorkloadEntry
	enc, meta := e.encoded(collection.WorkloadEntry, web+"-0", encode.Form{Shape: encode.Workload}, &we)
	if meta.GetName() != web+"-0" || meta.GetVersion() != enc.Version.String() || we.GetLabels()[encode.SelectorLabel] != "web" {
		t.Errorf("WorkloadEntry: %v %v", meta, &we)
	}
}

// An instance that has the label of its service is left as it is; of a label
// that is there twice the last counts, as for every reader.
func TestLabelOfService(t *testing.T) {
	e := newEnv(t, Options{}, "dc1")
	e.say(labelled(web, web, webEntry()))
	for value, want := range map[string]int{"web": 1, "other": 2} {
		i := webInstance("10.0.0.1", 80)
		i.Labels = map[string]string{encode.SelectorLabel: value}
		e.say(labelled(web, web+"-0", i))
		var we networking.WorkloadEntry
		enc, _ := e.encoded(collection.WorkloadEntry, web+"-0", encode.Form{Shape: encode.Workload}, &we)
		if n := strings.Count(string(enc.Append(nil)), encode.SelectorLabel); n != want || we.GetLabels()[encode.SelectorLabel] != "web" {
			t.Errorf("with label %s: %d labels, %v", value, n, we.GetLabels())
		}
	}
}

// Without endpoints the inline shape has an empty list, or, where old endpoints
// would be kept then, a selector that nothing matches.
func TestInlineWithoutEndpoints(t *testing.T) {
	for _, f := range []encode.Form{{}, {EmptySelector: true}} {
		e := newEnv(t, Options{}, "dc1")
		e.say(labelled(web, web, webEntry()))
		e.webInstance(0, "10.0.0.2", 80)
		before, _, _ := e.web(f)
		e.Registry("dc1").Apply(&pluginv1.WatchResponse{Removals: []*pluginv1.Removal{gone(collection.WorkloadEntry, web+"-0")}})
		enc, got, _ := e.web(f)
		if selects := got.GetWorkloadSelector().GetLabels()[encode.SelectorLabel] == "web"; selects != f.EmptySelector || len(got.GetEndpoints()) != 0 {
			t.Errorf("form %v: %v", f, got)
		}
		if before.Version == enc.Version {
			t.Errorf("form %v: the version did not change", f)
		}
		e.webInstance(0, "10.0.0.2", 80)
		if after, got, _ := e.web(f); got.GetWorkloadSelector() != nil || len(got.GetEndpoints()) != 1 || after.Version != before.Version {
			t.Errorf("form %v, with an endpoint again: %v", f, got)
		}
	}
}

// Each workaround of a form shows in what it encodes and, since content
// differs, in the version.
func TestForms(t *testing.T) {
	e := newEnv(t, Options{}, "dc1")
	e.say(labelled(web, web, webEntry()))
	e.webInstance(0, "10.0.0.1", 80)
	e.webInstance(1, "10.0.0.1", 81)
	e.webInstance(2, "10.0.0.2", 80)
	plain, _, _ := e.web(encode.Form{})

	enc, se, _ := e.web(encode.Form{Address: true})
	if a, err := netip.ParseAddr(strings.Join(se.GetAddresses(), ",")); err != nil || a.As4()[0] < 241 || a.As4()[0] > 250 || enc.Version == plain.Version {
		t.Errorf("address: %v, version %s beside %s", se.GetAddresses(), enc.Version, plain.Version)
	}

	enc, se, _ = e.web(encode.Form{PortSets: true})
	label := func(n int) string { return se.GetEndpoints()[n].GetLabels()[encode.PortsLabel] }
	first := label(0)
	if first == "" || label(0) != label(1) || label(2) != "" || enc.Version == plain.Version {
		t.Errorf("port sets: %q %q %q", label(0), label(1), label(2))
	}
	e.webInstance(1, "10.0.0.1", 82)
	if _, se, _ = e.web(encode.Form{PortSets: true}); label(0) == first {
		t.Error("another set of ports has the same label")
	}

	enc, _, meta := e.web(encode.Form{OmitVersion: true})
	if meta.GetVersion() != "" || enc.Version == 0 {
		t.Errorf("omit version: metadata has %q, the encoding %q", meta.GetVersion(), enc.Version)
	}
}

// The rules of each legacy form for create_time, absence and the selector, for
// composed entries and for those that carry their endpoints.
func TestLegacyForms(t *testing.T) {
	legacyEntry := func(resolution networking.ServiceEntry_Resolution, endpoints ...*networking.WorkloadEntry) *networking.ServiceEntry {
		return &networking.ServiceEntry{
			Hosts: []string{"web.example.org"}, Resolution: resolution, Endpoints: endpoints,
			Ports: []*networking.ServicePort{{Number: 80, Name: "http"}, {Number: 9000, Name: "grpc"}},
		}
	}
	same := &networking.WorkloadEntry{Address: "10.0.0.1", Ports: map[string]uint32{"http": 80}}
	other := &networking.WorkloadEntry{Address: "10.0.0.2", Ports: map[string]uint32{"http": 8080}}
	none := &networking.WorkloadEntry{Address: "10.0.0.3"}
	const static, dns = networking.ServiceEntry_STATIC, networking.ServiceEntry_DNS
	const hashed = -1
	for _, tt := range []struct {
		name       string
		legacy     encode.Legacy
		resolution networking.ServiceEntry_Resolution
		endpoints  []*networking.WorkloadEntry
		nanos      int32
		absent     bool
	}{
		{"dropped", encode.LegacyDrop, static, nil, 0, true},
		{"not dropped with endpoints", encode.LegacyDrop, static, []*networking.WorkloadEntry{other}, 0, false},
		{"not dropped with DNS", encode.LegacyDrop, dns, nil, 0, false},
		{"empty", encode.LegacyEmpty, static, nil, 1, false},
		{"not empty", encode.LegacyEmpty, static, []*networking.WorkloadEntry{other}, 0, false},
		{"DNS", encode.LegacyEmpty, dns, nil, 0, false},
		{"empty, by endpoints", encode.LegacyEndpoints, static, nil, 1, false},
		{"all ports the service's", encode.LegacyEndpoints, static, []*networking.WorkloadEntry{same, none}, 0, false},
		{"another port", encode.LegacyEndpoints, static, []*networking.WorkloadEntry{same, other}, hashed, false},
	} {
		form := encode.Form{Legacy: tt.legacy}
		check := func(t *testing.T, e env) int32 {
			t.Helper()
			enc, entry, meta := e.web(form)
			if enc.Absent != tt.absent {
				t.Fatalf("absent is %v, want %v", enc.Absent, tt.absent)
			}
			if tt.absent {
				return 0
			}
			if meta.GetLabels()["a"] != "b" || meta.GetAnnotations()["c"] != "d" || meta.GetCreateTime().GetSeconds() != 1_600_000_000 {
				t.Errorf("metadata %v", meta)
			}
			nanos := meta.GetCreateTime().GetNanos()
			if tt.nanos == hashed {
				if nanos < 2 || nanos > 999_999_999 {
					t.Errorf("nanos %d", nanos)
				}
			} else if nanos != tt.nanos {
				t.Errorf("nanos %d, want %d", nanos, tt.nanos)
			}
			if !meta.GetCreateTime().IsValid() {
				t.Errorf("create_time %v is no time", meta.GetCreateTime().AsTime().Format(time.RFC3339Nano))
			}
			if len(entry.GetEndpoints()) != len(tt.endpoints) || entry.GetWorkloadSelector() != nil || len(entry.GetAddresses()) != 0 {
				t.Errorf("entry %v", entry)
			}
			return nanos
		}
		t.Run(tt.name+"/composed", func(t *testing.T) {
			e := newEnv(t, Options{}, "dc1")
			e.say(labelled(web, web, legacyEntry(tt.resolution)))
			for i, endpoint := range tt.endpoints {
				e.say(labelled(web, fmt.Sprintf("%s-%d", web, i), endpoint))
			}
			nanos := check(t, e)
			if !tt.absent {
				a, _, _ := e.web(form)
				if b, _, _ := e.web(encode.Form{}); a.Version == b.Version {
					t.Error("two forms that differ have one version")
				}
			}
			if tt.nanos == hashed {
				e.say(labelled(web, web+"-9", other))
				if _, _, meta := e.web(form); meta.GetCreateTime().GetNanos() == nanos {
					t.Error("the time does not follow the endpoints")
				}
			}
		})
		t.Run(tt.name+"/as published", func(t *testing.T) {
			e := newEnv(t, Options{}, "dc1")
			e.say(labelled("", web, legacyEntry(tt.resolution, tt.endpoints...)))
			check(t, e)
		})
	}
}

// Only ServiceEntries differ in legacy forms.
func TestLegacyOtherKinds(t *testing.T) {
	const gateways = "networking.istio.io/Gateway"
	e := newEnv(t, Options{}, "dc1")
	e.say(labelled("", "dc1/gw", &networking.Gateway{Selector: map[string]string{"a": "b"}}))
	var g networking.Gateway
	a, _ := e.encoded(gateways, "dc1/gw", encode.Form{}, &g)
	b, _ := e.encoded(gateways, "dc1/gw", encode.Form{Legacy: encode.LegacyDrop, Synthetic: true}, &g)
	if a.Version != b.Version || string(a.Append(nil)) != string(b.Append(nil)) {
		t.Error("a Gateway differs")
	}
}

// The annotations of synthetic entries tell which part changed.
func TestSynthetic(t *testing.T) {
	e := newEnv(t, Options{}, "dc1")
	e.say(labelled(web, web, webEntry()), labelled(web, web+"-1", webInstance("10.0.0.1", 80)))
	read := func() (service, endpoints string) {
		_, _, meta := e.web(encode.Form{Legacy: encode.LegacyDrop, Synthetic: true})
		a := meta.GetAnnotations()
		if a["c"] != "d" {
			t.Errorf("annotations %v", a)
		}
		return a[encode.ServiceVersionAnnotation], a[encode.EndpointsVersionAnnotation]
	}
	s1, e1 := read()
	e.webInstance(2, "10.0.0.2", 80)
	s2, e2 := read()
	other := webEntry()
	other.Ports[0].Number = 81
	e.say(labelled(web, web, other))
	s3, e3 := read()
	if s1 == "" || e1 == "" || s1 != s2 || e1 == e2 || s2 == s3 || e2 != e3 {
		t.Errorf("entry %s, %s, %s; endpoints %s, %s, %s: want a a b and a b b", s1, s2, s3, e1, e2, e3)
	}
}

// Nothing of a message lives on in what was taken out of it.
func TestRecordKeepsNothingOfTheMessage(t *testing.T) {
	e := newEnv(t, Options{}, "dc1")
	u := labelled("", web, webEntry())
	e.say(u)
	a, _, _ := e.web(encode.Form{})
	want := string(a.Append(nil))
	clear(u.Resource)
	if b, _, _ := e.web(encode.Form{}); string(b.Append(nil)) != want {
		t.Error("the record changed with the message")
	}
}

// BenchmarkComposeOne is one changed instance of a service of a size, to the
// segments of its inline ServiceEntry.
func BenchmarkComposeOne(b *testing.B) {
	for _, size := range []int{10, 1_000, 20_000} {
		b.Run(fmt.Sprintf("endpoints=%d", size), func(b *testing.B) {
			e := newEnv(b, Options{}, "dc1")
			m := upserts(labelled(web, web, webEntry()))
			for i := range size {
				m.Upserts = append(m.Upserts, labelled(web, fmt.Sprintf("%s-%d", web, i), webInstance(fmt.Sprintf("10.%d.%d.%d", i>>16, i>>8&255, i&255), 80)))
			}
			e.Registry("dc1").Apply(m)
			changed := [2]*pluginv1.WatchResponse{
				upserts(labelled(web, web+"-5", webInstance("10.0.0.5", 81))), upserts(labelled(web, web+"-5", webInstance("10.0.0.5", 82))),
			}
			l := encode.NewLayout(encode.Form{})
			b.ReportAllocs()
			i := 0
			for b.Loop() {
				e.Registry("dc1").Apply(changed[i&1])
				r, _ := e.Get(Kind{Collection: collection.ServiceEntry}, web)
				enc := r.Encode(l)
				enc.Segments(nil)
				i++
			}
		})
	}
}
