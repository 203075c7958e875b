package nacos_test

import (
	"context"
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/isthmus-mesh/isthmus/internal/testenv"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testnacos"
	"github.com/isthmus-mesh/isthmus/plugin/collection"
	"github.com/isthmus-mesh/isthmus/plugin/plugintest"
)

// TestConformance shows that the adapter as a plugin keeps the contract,
// against a real server.
func TestConformance(t *testing.T) {
	testenv.SkipIfShort(t)
	t.Parallel()
	server := testnacos.Start(t, testnacos.Config{})
	app := server.Client(t)
	up := func(n int) testnacos.Instance { return testnacos.Up(fmt.Sprintf("10.1.0.%d", n), 80) }
	app.Register(t, "public", "DEFAULT_GROUP", "web", up(1), up(2))
	app.Register(t, "public", "shop", "Order:v1", up(3))
	config, err := json.Marshal(map[string]any{"servers": []string{server.Addr}})
	if err != nil {
		t.Fatal(err)
	}
	gate := testenv.NewGate(t, server.GRPC)
	gate.Open(t)
	port := func(addr string) (n int) {
		_, text, _ := strings.Cut(addr, ":")
		n, _ = strconv.Atoi(text)
		return n
	}
	flapping, err := json.Marshal(map[string]any{
		"servers": []string{server.Addr}, "protocol": "grpc", "grpc_port_offset": port(gate.Addr) - port(server.Addr), "remove_grace": "6s",
	})
	if err != nil {
		t.Fatal(err)
	}
	joined := []testnacos.Instance{up(1), up(2)}
	instances := func(n int) func(*plugintest.World) error {
		return func(w *plugintest.World) error {
			entries := w.Names(collection.ServiceEntry)
			for _, name := range entries {
				se := w.ServiceEntry(name)
				if se.GetHosts()[0] == "web.default-group.public.nacos" {
					if got := len(w.WorkloadEntries(name)); got != n {
						return fmt.Errorf("%s has %d instances, want %d", name, got, n)
					}
					return nil
				}
			}
			return fmt.Errorf("no host web.default-group.public.nacos among %q", entries)
		}
	}
	plugintest.Conformance(t, plugintest.Config{
		Config: config, Adapter: "nacos", Within: testenv.Patience,
		Changes: []plugintest.Change{
			{
				Name: "scaled out", MaxUpserts: 1, Want: instances(3),
				Do: func(ctx context.Context) error {
					return app.TryRegister(ctx, "public", "DEFAULT_GROUP", "web", up(1), up(2), up(4))
				},
			},
			{
				Name: "scaled in", MaxUpserts: 1, Want: instances(2),
				Do: func(ctx context.Context) error {
					return app.TryRegister(ctx, "public", "DEFAULT_GROUP", "web", up(1), up(2))
				},
			},
			{
				Name: "a host that had to change is listed",
				Do:   func(context.Context) error { return nil },
				Want: func(w *plugintest.World) error {
					for id := range w.Problems {
						if id == "service public/shop/Order:v1" || id == "service public/shop/Order:v1 host" {
							return nil
						}
					}
					return fmt.Errorf("problems are %v", w.Problems)
				},
			},
		},
		Outages: []plugintest.Outage{{
			Name: "restarted without data, registered again",
			Cut:  func(context.Context) error { server.Kill(); return nil },
			Restore: func(context.Context) error {
				server.Restart(t)
				again := server.Client(t)
				again.Register(t, "public", "DEFAULT_GROUP", "web", up(1), up(2))
				again.Register(t, "public", "shop", "Order:v1", up(3))
				app = again
				return nil
			},
		}},
		Flaps: &plugintest.Flaps{
			Config: flapping, Grace: 6 * time.Second,
			Cut:     func(context.Context) error { gate.Shut(); return nil },
			Restore: func(context.Context) error { gate.Open(t); return nil },
			Host:    "web.default-group.public.nacos",
			Join: func(ctx context.Context, n int) error {
				joined = append(joined, up(n))
				return app.TryRegister(ctx, "public", "DEFAULT_GROUP", "web", joined...)
			},
			Leave: func(ctx context.Context, _ int) error {
				joined = joined[:2]
				return app.TryRegister(ctx, "public", "DEFAULT_GROUP", "web", joined...)
			},
		},
	})
}
