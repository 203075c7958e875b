package resource_test

import (
	"bytes"
	"fmt"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/timestamppb"
	mcp "istio.io/api/mcp/v1alpha1"
	networking "istio.io/api/networking/v1alpha3"

	"github.com/isthmus-mesh/isthmus/server/resource"
)

func legacyPart(t testing.TB, name string, body proto.Message) *resource.Part {
	t.Helper()
	a, err := anypb.New(body)
	if err != nil {
		t.Fatal(err)
	}
	raw, err := proto.Marshal(&mcp.Resource{
		Metadata: &mcp.Metadata{
			Name: name, CreateTime: &timestamppb.Timestamp{Seconds: 1_600_000_000, Nanos: 99}, Labels: map[string]string{"a": "b"},
			Annotations: map[string]string{"c": "d"},
		},
		Body: a,
	})
	if err != nil {
		t.Fatal(err)
	}
	p, err := resource.Parse(raw)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func legacyEntry(t testing.TB, resolution networking.ServiceEntry_Resolution, endpoints ...*networking.WorkloadEntry) *resource.Part {
	return legacyPart(t, "dc1/web", &networking.ServiceEntry{
		Hosts: []string{"web.example.org"}, Resolution: resolution, Endpoints: endpoints,
		Ports: []*networking.ServicePort{{Number: 80, Name: "http"}, {Number: 9000, Name: "grpc"}},
	})
}

func decodeEncoding(t testing.TB, enc *resource.Encoding) *mcp.Resource {
	t.Helper()
	raw := bytes.Join(enc.Segments, nil)
	if len(raw) != enc.Size {
		t.Errorf("Size is %d, the segments have %d bytes", enc.Size, len(raw))
	}
	var res mcp.Resource
	if err := proto.Unmarshal(raw, &res); err != nil {
		t.Fatal(err)
	}
	if got := res.GetMetadata().GetVersion(); got != enc.Version {
		t.Errorf("the resource states version %q, the encoding %q", got, enc.Version)
	}
	return &res
}

func workload(address string, ports map[string]uint32) *networking.WorkloadEntry {
	return &networking.WorkloadEntry{Address: address, Ports: ports}
}

// The rules of each legacy form for create_time, absence and the selector, for composed entries and for those that carry their endpoints.
func TestLegacyForms(t *testing.T) {
	same := workload("10.0.0.1", map[string]uint32{"http": 80})
	other := workload("10.0.0.2", map[string]uint32{"http": 8080})
	none := workload("10.0.0.3", nil)
	const hashed = -1
	for _, tt := range []struct {
		name       string
		legacy     resource.Legacy
		resolution networking.ServiceEntry_Resolution
		endpoints  []*networking.WorkloadEntry
		nanos      int32
		absent     bool
	}{
		{"dropped", resource.LegacyDrop, networking.ServiceEntry_STATIC, nil, 0, true},
		{"not dropped with endpoints", resource.LegacyDrop, networking.ServiceEntry_STATIC, []*networking.WorkloadEntry{other}, 0, false},
		{"not dropped with DNS", resource.LegacyDrop, networking.ServiceEntry_DNS, nil, 0, false},
		{"empty", resource.LegacyEmpty, networking.ServiceEntry_STATIC, nil, 1, false},
		{"not empty", resource.LegacyEmpty, networking.ServiceEntry_STATIC, []*networking.WorkloadEntry{other}, 0, false},
		{"DNS", resource.LegacyEmpty, networking.ServiceEntry_DNS, nil, 0, false},
		{"empty, by endpoints", resource.LegacyEndpoints, networking.ServiceEntry_STATIC, nil, 1, false},
		{"all ports the service's", resource.LegacyEndpoints, networking.ServiceEntry_STATIC, []*networking.WorkloadEntry{same, none}, 0, false},
		{"another port", resource.LegacyEndpoints, networking.ServiceEntry_STATIC, []*networking.WorkloadEntry{same, other}, hashed, false},
	} {
		check := func(t *testing.T, enc *resource.Encoding) int32 {
			t.Helper()
			if enc.Absent != tt.absent {
				t.Fatalf("absent is %v, want %v", enc.Absent, tt.absent)
			}
			if tt.absent {
				return 0
			}
			res := decodeEncoding(t, enc)
			meta := res.GetMetadata()
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
			var entry networking.ServiceEntry
			if err := res.GetBody().UnmarshalTo(&entry); err != nil {
				t.Fatal(err)
			}
			if len(entry.GetEndpoints()) != len(tt.endpoints) || entry.GetWorkloadSelector() != nil || len(entry.GetAddresses()) != 0 {
				t.Errorf("entry %v", &entry)
			}
			return nanos
		}
		form := resource.Form{Legacy: tt.legacy}
		t.Run(tt.name+"/composed", func(t *testing.T) {
			svc := resource.NewService("dc1", "web")
			svc.SetEntry(legacyEntry(t, tt.resolution))
			svc.SetVIP("241.0.0.1")
			for i, e := range tt.endpoints {
				svc.SetInstance(legacyPart(t, fmt.Sprintf("dc1/web-%d", i), e))
			}
			r := svc.Resource(resource.Inline)
			nanos := check(t, r.Encode(form))
			if tt.nanos == hashed {
				svc.SetInstance(legacyPart(t, "dc1/web-9", other))
				if next := decodeEncoding(t, svc.Resource(resource.Inline).Encode(form)).GetMetadata().GetCreateTime().GetNanos(); next == nanos {
					t.Error("the time does not follow the endpoints")
				}
			}
			if !tt.absent && r.Encode(form).Version == r.Encode(resource.Form{}).Version {
				t.Error("two forms that differ have one version")
			}
		})
		t.Run(tt.name+"/as published", func(t *testing.T) {
			check(t, resource.NewResource(legacyEntry(t, tt.resolution, tt.endpoints...), "dc1").Encode(form))
		})
	}
}

// Only ServiceEntries differ in legacy forms.
func TestLegacyOtherKinds(t *testing.T) {
	r := resource.NewResource(legacyPart(t, "dc1/gw", &networking.Gateway{Selector: map[string]string{"a": "b"}}), "dc1")
	if a, b := r.Encode(resource.Form{}), r.Encode(resource.Form{Legacy: resource.LegacyDrop, Synthetic: true}); a != b {
		t.Error("a Gateway is encoded twice")
	}
}

// The annotations of synthetic entries tell which part changed.
func TestSynthetic(t *testing.T) {
	form := resource.Form{Legacy: resource.LegacyDrop, Synthetic: true}
	svc := resource.NewService("dc1", "web")
	svc.SetEntry(legacyEntry(t, networking.ServiceEntry_STATIC))
	svc.SetInstance(legacyPart(t, "dc1/web-1", workload("10.0.0.1", nil)))
	read := func() (service, endpoints string) {
		a := decodeEncoding(t, svc.Resource(resource.Inline).Encode(form)).GetMetadata().GetAnnotations()
		if a["c"] != "d" {
			t.Errorf("annotations %v", a)
		}
		return a[resource.ServiceVersionAnnotation], a[resource.EndpointsVersionAnnotation]
	}
	s1, e1 := read()
	svc.SetInstance(legacyPart(t, "dc1/web-2", workload("10.0.0.2", nil)))
	s2, e2 := read()
	svc.SetEntry(legacyPart(t, "dc1/web", &networking.ServiceEntry{Hosts: []string{"other.example.org"}, Resolution: networking.ServiceEntry_STATIC}))
	s3, e3 := read()
	if s1 == "" || e1 == "" || s1 != s2 || e1 == e2 || s2 == s3 || e2 != e3 {
		t.Errorf("entry %s, %s, %s; endpoints %s, %s, %s: want a a b and a b b", s1, s2, s3, e1, e2, e3)
	}
}
