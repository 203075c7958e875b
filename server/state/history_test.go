package state

import (
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	pluginv1 "github.com/isthmus-mesh/isthmus/plugin/proto/isthmus/plugin/v1"
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
