package plugin

import (
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	pluginv1 "github.com/isthmus-mesh/isthmus/plugin/proto/isthmus/plugin/v1"
	"github.com/isthmus-mesh/isthmus/plugin/registry"
	"github.com/isthmus-mesh/isthmus/plugin/shard"
	"github.com/isthmus-mesh/isthmus/translate"
)

func explained(t *testing.T, s *server, host string) []*pluginv1.ExplainedService {
	t.Helper()
	resp, err := s.Explain(t.Context(), &pluginv1.ExplainRequest{Host: host})
	if err != nil {
		t.Fatal(err)
	}
	if size := proto.Size(resp); size > maxExplainedSize+1<<20 {
		t.Errorf("the answer has %d bytes", size)
	}
	return resp.GetServices()
}

// An adapter that retains what it said, by Grace or of its own, is explained in
// the registry's words; any other by what was made of them.
func TestExplain(t *testing.T) {
	svc := registry.Service{Key: registry.Key{Name: "web"}}
	instances := []registry.Instance{
		{ID: "a", Address: "10.0.0.1", Ports: []registry.Port{{Number: 80}}, Meta: map[string]string{"team": "x", "user.password": "hunter2"}, Health: registry.HealthPassing},
		{ID: "b", Address: "10.0.0.2", Ports: []registry.Port{{Number: 80}}, Disabled: true},
	}
	for name, set := range map[string]func(*catalog){
		"grace":   func(c *catalog) { NewGrace(c, 0, nil).Set(svc, instances) },
		"nothing": func(c *catalog) { c.Set(svc, instances) },
		"grace of a part": func(c *catalog) {
			NewGrace(&sharded{c, c.translator.(*translate.Translator), shard.Set{Of: 1}}, 0, nil).Set(svc, instances)
		},
		"own": func(c *catalog) {
			Recall(c, func(key registry.Key) (Snapshot, bool) { return Snapshot{svc, instances}, key == svc.Key })
			c.Set(svc, instances)
		},
	} {
		t.Run(name, func(t *testing.T) {
			s := testServer(t, nil)
			set(s.catalog)
			original := name != "nothing"
			host := s.catalog.services[svc.Key].result.Host()
			for _, asked := range []string{host, strings.ToUpper(host), "web", "r/web"} {
				all := explained(t, s, asked)
				if len(all) != 1 {
					t.Fatalf("asked for %s: %v", asked, all)
				}
				e := all[0]
				if e.GetHost() != host || e.GetEntry() != "r/web" || e.GetKey() != "web" || e.GetOriginal() != original || len(e.GetInstances()) != 2 {
					t.Errorf("asked for %s: %v", asked, e)
				}
				a, b := e.GetInstances()[0], e.GetInstances()[1]
				if a.GetAddress() != "10.0.0.1" || a.GetResource() == "" || b.GetResource() != "" || len(b.GetSteps()) != 1 || !strings.Contains(b.GetSteps()[0].GetText(), "disabled") {
					t.Errorf("asked for %s: %v and %v", asked, a, b)
				}
				if original && (a.GetHealth() != "passing" || a.GetMeta()["team"] != "x" || a.GetMeta()["user.password"] != hidden || !b.GetDisabled() || b.GetSteps()[0].GetRule() != "maintenance") {
					t.Errorf("asked for %s: %v and %v", asked, a, b)
				}
			}
			if all := explained(t, s, "other.example.org"); len(all) != 0 {
				t.Errorf("a host that nobody has: %v", all)
			}
		})
	}
}

// What is retained although the registry lacks it says so, with its age since
// the first answer that lacked it, outages included, and what is left.
func TestExplainRetained(t *testing.T) {
	for name, x := range map[string]struct {
		id string
		of func(*catalog) Catalog
	}{
		"alone":      {"b", func(c *catalog) Catalog { return c }},
		"of a union": {"z/b", func(c *catalog) Catalog { return NewUnion(c, "zone", []string{"y", "z"}).Parts()[1] }},
	} {
		t.Run(name, func(t *testing.T) { testExplainRetained(t, x.id, x.of) })
	}
}

func testExplainRetained(t *testing.T, id string, of func(*catalog) Catalog) {
	synctest.Test(t, func(t *testing.T) {
		s := testServer(t, nil)
		g := NewGrace(of(s.catalog), time.Minute, nil)
		svc := registry.Service{Key: registry.Key{Name: "web"}}
		a := registry.Instance{ID: "a", Address: "10.0.0.1", Ports: []registry.Port{{Number: 80}}}
		b := registry.Instance{ID: "b", Address: "10.0.0.2", Ports: []registry.Port{{Number: 80}}}
		says := func(want string) {
			t.Helper()
			got := map[string]string{}
			for _, i := range explained(t, s, "web")[0].GetInstances() {
				for _, step := range i.GetSteps() {
					if step.GetRule() == "remove_grace" {
						got[i.GetId()] += step.GetText()
					}
				}
			}
			if len(got) != 1 || got[id] != want {
				t.Errorf("explained as %q, want %q of %s", got, want, id)
			}
		}
		g.Set(svc, []registry.Instance{a, b})
		g.Away()
		g.Back()
		g.Set(svc, []registry.Instance{a})
		time.Sleep(20 * time.Second)
		says("missing from the registry for 20s after an outage, and kept for another 40s (remove_grace is 1m0s)")
		g.Away()
		time.Sleep(time.Hour)
		says("missing from the registry for 1h0m20s after an outage, and kept for another 40s, counted from when the registry answers again (remove_grace is 1m0s)")
		g.Back()
		time.Sleep(10 * time.Second)
		g.Add(svc, []registry.Instance{a})
		time.Sleep(time.Hour)
		says("missing from the registry for 2h0m30s after an outage, and kept for another 30s, counted from its next complete answer (remove_grace is 1m0s)")
	})
}

// An answer is bounded whatever the service, and counts what it leaves out.
func TestExplainIsBounded(t *testing.T) {
	s := testServer(t, nil)
	g := NewGrace(s.catalog, 0, nil)
	var instances []registry.Instance
	for i := range maxExplainedInstances + 200 {
		meta := map[string]string{}
		for k := range maxExplainedValues + 2 - min(i, maxExplainedValues) {
			meta[fmt.Sprint("key", k)] = strings.Repeat("v", 2*maxExplainedBytes)
		}
		instances = append(instances, registry.Instance{ID: fmt.Sprintf("i%05d", i), Address: "10.0.0.1", Ports: []registry.Port{{Number: 80}}, Meta: meta})
	}
	g.Set(registry.Service{Key: registry.Key{Name: "web"}}, instances)
	e := explained(t, s, "web")[0]
	if n := uint64(len(e.GetInstances())) + e.GetMore(); n != uint64(len(instances)) {
		t.Errorf("%d instances are listed or counted of %d", n, len(instances))
	}
	for i := range 2 * maxExplained {
		s.catalog.Set(registry.Service{Key: registry.Key{Name: "twin", Group: fmt.Sprint(i)}}, instances[:1])
	}
	if n := len(explained(t, s, "twin")); n != maxExplained {
		t.Errorf("%d services are listed, want %d", n, maxExplained)
	}
}

func TestExplainUnconfigured(t *testing.T) {
	if _, err := new(server).Explain(t.Context(), &pluginv1.ExplainRequest{}); status.Code(err) != codes.FailedPrecondition {
		t.Errorf("before Configure: %v", err)
	}
}
