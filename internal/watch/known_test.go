package watch

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
	mcp "istio.io/api/mcp/v1alpha1"
	networking "istio.io/api/networking/v1alpha3"
)

func changeOf(t *testing.T, name string, body proto.Message) change {
	t.Helper()
	packed, err := anypb.New(body)
	if err != nil {
		t.Fatal(err)
	}
	return change{name: name, res: &mcp.Resource{Metadata: &mcp.Metadata{Name: name}, Body: packed}}
}

// A change is described by what it means, and filters know to which host a
// resource belongs, also of one that is gone.
func TestKnown(t *testing.T) {
	const entries, workloads = "networking.istio.io/ServiceEntry", "networking.istio.io/WorkloadEntry"
	endpoint := func(address string, weight uint32) *networking.WorkloadEntry {
		return &networking.WorkloadEntry{Address: address, Weight: weight, Ports: map[string]uint32{"http": 80}, Labels: map[string]string{serviceLabel: "web"}}
	}
	entry := func(endpoints ...*networking.WorkloadEntry) change {
		return changeOf(t, "a/web", &networking.ServiceEntry{Hosts: []string{"web.example.org"}, Endpoints: endpoints})
	}
	other := changeOf(t, "b/db", &networking.ServiceEntry{Hosts: []string{"db"}})
	type step struct {
		coll    string
		changed []change
		removed []string
		names   []string // to be printed
		said    string   // of the first of these
	}
	for _, tt := range []struct {
		name  string
		o     Options
		steps []step
	}{
		{"inline", Options{Output: "text"}, []step{
			{entries, []change{entry(endpoint("10.0.0.1", 0))}, nil, []string{"a/web"}, "web.example.org  10.0.0.1:80"},
			{entries, []change{entry(endpoint("10.0.0.1", 3), endpoint("10.0.0.2", 0))}, nil, []string{"a/web"}, "web.example.org  10.0.0.1:80 weight 3 (was no weight), +10.0.0.2:80  (2 endpoints)"},
			{entries, []change{entry()}, nil, []string{"a/web"}, "web.example.org  -10.0.0.1:80, -10.0.0.2:80  (0 endpoints)"},
		}},
		{"a host", Options{Output: "json", Host: "*.example.org"}, []step{
			{entries, []change{entry(), other}, nil, []string{"a/web"}, "web.example.org"},
			{workloads, []change{changeOf(t, "a/web-1", endpoint("10.0.0.1", 1)), changeOf(t, "b/web-1", endpoint("10.0.0.9", 1))}, nil, []string{"a/web-1"}, "10.0.0.1:80 weight 1"},
			{workloads, []change{changeOf(t, "a/web-1", endpoint("10.0.0.2", 1))}, nil, []string{"a/web-1"}, "10.0.0.2:80 weight 1, was 10.0.0.1:80 weight 1"},
			{workloads, nil, []string{"a/web-1", "b/web-1"}, []string{"a/web-1"}, "was 10.0.0.2:80 weight 1"},
			{entries, nil, []string{"a/web", "b/db"}, []string{"a/web"}, ""},
			{workloads, []change{changeOf(t, "a/web-1", endpoint("10.0.0.1", 1))}, nil, nil, ""},
		}},
		{"a namespace", Options{Output: "json", Namespace: "b"}, []step{
			{entries, []change{entry(), other}, []string{"a/x"}, []string{"b/db"}, "db"},
		}},
		{"everything, for a program", Options{Output: "json"}, []step{
			{entries, []change{entry(), other}, []string{"a/x"}, []string{"a/web", "b/db", "a/x"}, ""},
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			k := newKnown(tt.o)
			for i, s := range tt.steps {
				changed, removed := k.note(s.coll, s.changed, s.removed)
				var names []string
				for _, c := range changed {
					names = append(names, c.name)
				}
				names = append(names, removed...)
				if diff := cmp.Diff(s.names, names); diff != "" {
					t.Errorf("step %d (-want +got):\n%s", i, diff)
				}
				if len(names) > 0 && k.said[names[0]+" "+s.coll[len("networking.istio.io/"):]] != s.said {
					t.Errorf("step %d: %q, want %q", i, k.said, s.said)
				}
			}
		})
	}
}
