package main

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/isthmus-mesh/isthmus/plugin/plugintest"
)

// The test binary is the plugin too.
func TestMain(m *testing.M) {
	plugintest.Self(main)
	m.Run()
}

// The adapter keeps the contract, sees changes, and forgets nothing while the
// registry is away.
func TestConformance(t *testing.T) {
	var down atomic.Bool
	var answer atomic.Value // of the registry
	registry := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		text, _ := answer.Load().(string)
		if down.Load() || r.URL.Path != "/services" {
			http.Error(w, "out of order", http.StatusServiceUnavailable)
			return
		}
		fmt.Fprint(w, text)
	}))
	defer registry.Close()
	several, joined := 2, []int(nil)
	has := func(hosts int) func(context.Context) error {
		return func(context.Context) error {
			several = hosts
			var list []string
			for i := range hosts {
				list = append(list, fmt.Sprintf(`{"id": "web-%d", "address": "192.0.2.%d", "port": 8080, "healthy": true}`, i, i+1))
			}
			for _, n := range joined {
				list = append(list, fmt.Sprintf(`{"id": "web-%d", "address": "192.0.2.%d", "port": 8080, "healthy": true}`, n, n))
			}
			answer.Store(`{"services": [{"name": "web", "hosts": [` + strings.Join(list, ",") + `]}]}`)
			return nil
		}
	}
	instances := func(want int) func(*plugintest.World) error {
		return func(w *plugintest.World) error {
			if n := len(w.WorkloadEntries("conformance/web")); n != want {
				return fmt.Errorf("web has %d instances, want %d", n, want)
			}
			return nil
		}
	}
	if err := has(2)(t.Context()); err != nil {
		t.Fatal(err)
	}
	cut := func(context.Context) error { down.Store(true); return nil }
	restore := func(context.Context) error { down.Store(false); return nil }
	plugintest.Conformance(t, plugintest.Config{
		Config: fmt.Appendf(nil, `{"servers": [%q], "interval": "100ms", "remove_grace": "1s"}`, registry.URL),
		Within: time.Minute,
		Changes: []plugintest.Change{
			{Name: "a host more", Do: has(3), Want: instances(3), MaxUpserts: 1},
			{Name: "two hosts less", Do: has(1), Want: instances(1)},
		},
		Outages: []plugintest.Outage{{Name: "the registry fails", Cut: cut, Restore: restore}},
		Flaps: &plugintest.Flaps{
			Config: fmt.Appendf(nil, `{"servers": [%q], "interval": "100ms", "remove_grace": "6s"}`, registry.URL), Grace: 6 * time.Second,
			Cut: cut, Restore: restore, Host: "web.conformance",
			Join: func(ctx context.Context, n int) error {
				joined = append(joined, n)
				return has(several)(ctx)
			},
			Leave: func(ctx context.Context, _ int) error {
				joined = nil
				return has(several)(ctx)
			},
		},
	})
}
