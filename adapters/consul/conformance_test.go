package consul_test

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/isthmus-mesh/isthmus/internal/testenv"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testconsul"
	"github.com/isthmus-mesh/isthmus/plugin/collection"
	"github.com/isthmus-mesh/isthmus/plugin/plugintest"
)

// TestConformance runs the adapter as a plugin against a real server: one
// changed instance is one resource on the wire.
func TestConformance(t *testing.T) {
	t.Parallel()
	server := startConsul(t, testconsul.Config{})
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	gate := testenv.NewGate(t, strings.TrimPrefix(server.Addr, "http://"))
	gate.Open(t)
	web := func(id, port int) testconsul.Instance {
		return testconsul.Instance{Service: "web", ID: "web-" + strconv.Itoa(id), Address: "10.1.0." + strconv.Itoa(id), Port: port}
	}
	server.Register(t, web(1, 80), web(2, 80), web(3, 80),
		testconsul.Instance{Service: "db", ID: "db-1", Address: "10.1.1.1", Port: 5432})
	endpoints := func(want int) func(*plugintest.World) error {
		return func(w *plugintest.World) error {
			if n := len(w.Names(collection.WorkloadEntry)); n != want {
				return fmt.Errorf("%d WorkloadEntries, want %d", n, want)
			}
			return nil
		}
	}
	plugintest.Conformance(t, plugintest.Config{
		Command: []string{self}, Env: []string{"ISTHMUS_TEST_CONSUL=1"}, Adapter: "consul", Within: testenv.Patience,
		Config: json.RawMessage(fmt.Sprintf(`{"address": "http://%s"}`, gate.Addr)),
		Changes: []plugintest.Change{
			{Name: "instance added", MaxUpserts: 1, Want: endpoints(5), Do: func(context.Context) error { server.Register(t, web(4, 80)); return nil }},
			{Name: "instance removed", Want: endpoints(4), Do: func(context.Context) error { server.Deregister(t, "web-4"); return nil }},
		},
		Outages: []plugintest.Outage{{
			Name:    "cut off",
			Cut:     func(context.Context) error { gate.Shut(); return nil },
			Restore: func(context.Context) error { gate.Open(t); return nil },
		}},
		Flaps: &plugintest.Flaps{
			Config: json.RawMessage(fmt.Sprintf(`{"address": "http://%s", "remove_grace": "6s"}`, gate.Addr)), Grace: 6 * time.Second,
			Cut:     func(context.Context) error { gate.Shut(); return nil },
			Restore: func(context.Context) error { gate.Open(t); return nil },
			Host:    "web.service.consul",
			Join:    func(_ context.Context, n int) error { server.Register(t, web(n, 80)); return nil },
			Leave:   func(_ context.Context, n int) error { server.Deregister(t, "web-"+strconv.Itoa(n)); return nil },
		},
	})
}
