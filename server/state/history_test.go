package state

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/isthmus-mesh/isthmus/plugin/collection"
	pluginv1 "github.com/isthmus-mesh/isthmus/plugin/proto/isthmus/plugin/v1"
	"github.com/isthmus-mesh/isthmus/server/encode"
	"github.com/isthmus-mesh/isthmus/server/state/history"
)

// An endpoint's change says what it was and what it is.
func TestHistoryOfEndpoints(t *testing.T) {
	e := newEnv(t, Options{}, "dc1")
	r := e.Registry("dc1")
	r.Apply(upserts(entry("ns/web", "web.example.org"), instance("ns/web", "ns/web-1", "10.0.0.1")))
	r.Apply(upserts(instance("ns/web", "ns/web-1", "10.0.0.2")))
	r.Apply(&pluginv1.WatchResponse{Removals: []*pluginv1.Removal{gone("networking.istio.io/WorkloadEntry", "ns/web-1")}})
	r.Apply(upserts(instance("ns/web", "ns/web-1", "10.0.0.3")))
	idle := gone("networking.istio.io/WorkloadEntry", "ns/web-1")
	idle.Health, idle.Reason = "critical", "fails its check"
	r.Apply(&pluginv1.WatchResponse{Removals: []*pluginv1.Removal{idle}})
	var got []string
	for c := range e.History() {
		if c.Name == "ns/web-1" {
			got = append(got, strings.TrimSpace(fmt.Sprintf("%s %v %v %s %s", c.Op, c.Old, c.New, c.Health, c.Reason)))
		}
	}
	want := []string{"remove &{10.0.0.3 1} <nil> critical fails its check", "upsert <nil> &{10.0.0.3 1}", "remove &{10.0.0.2 1} <nil>", "upsert &{10.0.0.1 1} &{10.0.0.2 1}", "upsert <nil> &{10.0.0.1 1}"}
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("history (-want +got):\n%s", d)
	}
}

func last(all []history.Sample) history.Sample { return all[len(all)-1] }

// An endpoint that changes is one change, which is how sinks of the shape
// workload have it: its ServiceEntry is another one only where it has the
// endpoints, and where it has more to tell.
func TestHistoryCountsOnce(t *testing.T) {
	e := newEnv(t, Options{Conflicts: []ConflictRule{{Hosts: []string{"both.example.org"}, Policy: Merge}}}, "dc1", "dc2")
	dc1, dc2 := e.Registry("dc1"), e.Registry("dc2")
	changes := func(apply func()) (out []string) {
		before, revision := last(e.Samples()).Changes, e.Revision()
		apply()
		for c := range e.History() {
			if c.Revision > revision {
				out = append(out, c.Op+" "+strings.TrimPrefix(c.Collection, "networking.istio.io/")+" "+c.Name)
			}
		}
		if n := last(e.Samples()).Changes - before; int(n) != len(out) {
			t.Errorf("%d changes are counted: %q", n, out)
		}
		slices.Sort(out)
		return out
	}
	for _, tt := range []struct {
		name  string
		apply func()
		want  []string
	}{
		{"a service", func() {
			dc1.Apply(upserts(entry("ns/web", "web.example.org"), instance("ns/web", "ns/web-1", "10.0.0.1")))
		}, []string{"upsert ServiceEntry ns/web", "upsert WorkloadEntry ns/web-1"}},
		{"an endpoint", func() { dc1.Apply(upserts(instance("ns/web", "ns/web-1", "10.0.0.2"))) }, []string{"upsert WorkloadEntry ns/web-1"}},
		{"the host", func() { dc1.Apply(upserts(entry("ns/web", "other.example.org"))) }, []string{"upsert ServiceEntry ns/web"}},
		{"both", func() {
			dc1.Apply(upserts(entry("ns/web", "web.example.org"), instance("ns/web", "ns/web-2", "10.0.0.3")))
		}, []string{"upsert ServiceEntry ns/web", "upsert WorkloadEntry ns/web-2"}},
		{"one goes", func() {
			dc1.Apply(&pluginv1.WatchResponse{Removals: []*pluginv1.Removal{gone("networking.istio.io/WorkloadEntry", "ns/web-2")}})
		}, []string{"remove WorkloadEntry ns/web-2"}},
		{"merged", func() {
			dc1.Apply(upserts(entry("ns/both", "both.example.org"), instance("ns/both", "ns/both-1", "10.0.1.1")))
			dc2.Apply(upserts(entry("dc2/both", "both.example.org"), instance("dc2/both", "dc2/both-1", "10.0.1.2")))
		}, []string{"upsert ServiceEntry ns/both", "upsert WorkloadEntry ns/both-1", "upsert WorkloadEntry ns/both-1.dc2"}},
		{"an endpoint of another registry", func() { dc2.Apply(upserts(instance("dc2/both", "dc2/both-1", "10.0.1.3"))) }, []string{"upsert WorkloadEntry ns/both-1.dc2"}},
	} {
		if d := cmp.Diff(tt.want, changes(tt.apply)); d != "" {
			t.Errorf("%s (-want +got):\n%s", tt.name, d)
		}
	}
}

// The size is that of what is served: what is shadowed is none of it.
func TestSizeOfServed(t *testing.T) {
	e := newEnv(t, Options{}, "dc1", "dc2")
	e.Registry("dc1").Apply(upserts(entry("dc1/web", "web.example.org"), instance("dc1/web", "dc1/web-1", "10.0.0.1")))
	e.Registry("dc2").Apply(upserts(entry("dc2/web", "web.example.org"), instance("dc2/web", "dc2/web-1", "10.0.0.2"), instance("dc2/web", "dc2/web-2", "10.0.0.3")))
	if now := last(e.Samples()); now.Services != 1 || now.Endpoints != 1 {
		t.Errorf("%d services with %d endpoints, want the one that is served", now.Services, now.Endpoints)
	}
}

// Everything that shows a version of a resource shows the one that tools get.
func TestOneVersion(t *testing.T) {
	e := newEnv(t, Options{}, "dc1")
	e.Registry("dc1").Apply(upserts(entry("ns/web", "web.example.org"), instance("ns/web", "ns/web-1", "10.0.0.1")))
	r, _ := e.Get(Kind{collection.ServiceEntry, encode.Inline}, "ns/web")
	want := r.Encode(encode.NewLayout(encode.Form{})).Version.String()
	got := map[string]string{"explain": e.Explain("web.example.org")[0].Version}
	for s := range e.Services() {
		got["services"] = s.Version
	}
	for c := range e.History() {
		if c.Collection == collection.ServiceEntry {
			got["changes"] = c.Version
		}
	}
	if d := cmp.Diff(map[string]string{"explain": want, "services": want, "changes": want}, got); d != "" {
		t.Errorf("versions (-want +got):\n%s", d)
	}
}
