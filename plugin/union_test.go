package plugin_test

import (
	"errors"
	"fmt"
	"testing"

	"github.com/isthmus-mesh/isthmus/plugin"
	"github.com/isthmus-mesh/isthmus/plugin/plugintest"
	"github.com/isthmus-mesh/isthmus/plugin/registry"
)

// snapshotOf returns a service with instances of these IDs.
func snapshotOf(port registry.Port, ids ...string) (registry.Service, []registry.Instance) {
	svc := registry.Service{Key: registry.Key{Name: "web"}, Ports: []registry.Port{port}}
	var all []registry.Instance
	for _, id := range ids {
		all = append(all, registry.Instance{ID: id, Address: "10.0.0.1"})
	}
	return svc, all
}

// TestUnion shows what a catalog gets of parts that have the same service.
func TestUnion(t *testing.T) {
	c := plugintest.NewCatalog()
	parts := plugin.NewUnion(c, "zone", []string{"b", "a"}).Parts()
	want := func(what, ids, ports string) {
		t.Helper()
		c.Look(func(h *plugintest.Held) {
			if h.IDs("web") != ids || ids != "-" && fmt.Sprint(h.Services["web"].Ports) != ports {
				t.Errorf("%s: %s, ports %v; want %s, %s", what, h.IDs("web"), h.Services["web"].Ports, ids, ports)
			}
		})
	}
	parts[1].Set(snapshotOf(registry.Port{Name: "http", Number: 80}, "1"))
	want("one part", "a/1", "[{http 80 }]")
	parts[0].Set(snapshotOf(registry.Port{Name: "rpc", Number: 90}, "1", "2"))
	want("both", "b/1 b/2 a/1", "[{rpc 90 } {http 80 }]")
	parts[0].Set(snapshotOf(registry.Port{Name: "http", Number: 81}))
	want("a port that both have", "a/1", "[{http 81 }]")
	parts[1].Set(registry.Service{Key: registry.Key{Name: "web"}}, []registry.Instance{{ID: "1", Cluster: "own"}})
	c.Look(func(h *plugintest.Held) {
		if got := h.Instances["web"][0].Cluster; got != "own" {
			t.Errorf("an instance's own cluster is %q", got)
		}
	})
	parts[1].Remove(registry.Key{Name: "web"})
	parts[1].Remove(registry.Key{Name: "none"})
	want("a part without it", "", "[{http 81 }]")
	parts[0].Remove(registry.Key{Name: "web"})
	want("none has it", "-", "")

	parts[0].Synced()
	parts[0].Synced()
	c.Look(func(h *plugintest.Held) {
		if h.Synced {
			t.Error("synced before the last part is")
		}
	})
	parts[1].Synced()
	parts[1].Degraded(errors.New("cut"))
	parts[0].Degraded(errors.New("cut"))
	parts[0].Detail("watching x")
	parts[1].Detail("watching y")
	parts[1].Problem("p", "wrong")
	parts[0].LeftOut("l", "left out")
	parts[0].Heard()
	c.Look(func(h *plugintest.Held) {
		if !h.Synced || h.Heard != 1 || h.Degraded != "zone b: cut; zone a: cut" || h.Detail != "b: watching x; a: watching y" || h.Problems["p zone a"] != "wrong" || h.LeftOut["l zone b"] != "left out" {
			t.Errorf("it holds %s; synced %t, detail %q", &c.Held, h.Synced, h.Detail)
		}
	})
	parts[0].Degraded(nil)
	parts[1].Problem("p", "")
	c.Look(func(h *plugintest.Held) {
		if h.Degraded != "zone a: cut" || len(h.Problems) != 0 {
			t.Errorf("degraded %q, problems %v", h.Degraded, h.Problems)
		}
	})
}
