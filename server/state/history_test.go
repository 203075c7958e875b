package state

import (
	"fmt"
	"runtime"
	"slices"
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

// The history keeps the newest changes, in order, and no more memory than for
// its number of them.
func TestHistoryIsBounded(t *testing.T) {
	e := newEnv(t, Options{}, "dc1")
	r := e.Registry("dc1")
	before := heap()
	const more = 500
	table := e.tables["networking.istio.io/WorkloadEntry"]
	e.apply.Lock()
	for n := range maxHistory + more {
		e.record(&touch{table: table, name: fmt.Sprintf("namespace/a-service-with-a-name-%06d", n)}, r, Revision(n), idle{})
	}
	e.apply.Unlock()
	if grown := heap() - before; grown > maxHistory*260 {
		t.Errorf("%d changes take %d bytes", maxHistory, grown)
	} else {
		t.Logf("%d bytes a change", grown/maxHistory)
	}
	all := slices.Collect(e.History())
	if len(all) != maxHistory || all[0].Number != maxHistory+more || all[len(all)-1].Number != more+1 {
		t.Errorf("%d changes from %d to %d", len(all), all[0].Number, all[len(all)-1].Number)
	}
	for i := range all[1:] {
		if all[i+1].Number != all[i].Number-1 {
			t.Fatalf("%d follows %d", all[i+1].Number, all[i].Number)
		}
	}
}

func heap() int {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int(m.HeapAlloc)
}
