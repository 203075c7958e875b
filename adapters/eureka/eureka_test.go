package eureka_test

import (
	"context"
	"encoding/json"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/isthmus-mesh/isthmus/adapters/eureka"
	"github.com/isthmus-mesh/isthmus/internal/testenv"
	"github.com/isthmus-mesh/isthmus/plugin"
	"github.com/isthmus-mesh/isthmus/plugin/collection"
	"github.com/isthmus-mesh/isthmus/plugin/plugintest"
	"github.com/isthmus-mesh/isthmus/plugin/registry"
)

// within is how long a change may take on a busy machine.
const within = testenv.Patience

// follow runs an adapter until the test ends.
func follow(t *testing.T, c eureka.Config) *plugintest.Catalog {
	t.Helper()
	d := eureka.DefaultConfig
	d.Servers, d.HTTP, d.Interval = c.Servers, c.HTTP, plugin.Duration(time.Second)
	if c.RemoveGrace != 0 {
		d.RemoveGrace = c.RemoveGrace
	}
	d.AcceptEmpty = c.AcceptEmpty
	a, err := eureka.New(d, plugin.Env{})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	catalog := plugintest.NewCatalog()
	done := make(chan error, 1)
	go func() { done <- a.Run(ctx, catalog) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Run: %v", err)
		}
	})
	return catalog
}

func web(n int) testenv.EurekaInstance {
	return testenv.EurekaInstance{App: "WEB", ID: fmt.Sprint("web-", n), IP: fmt.Sprint("10.1.0.", n), Port: 8080}
}

// ids waits until a service has these instances and no others.
func ids(t *testing.T, c *plugintest.Catalog, what, service, want string) {
	t.Helper()
	c.Await(t, within, what, func(h *plugintest.Held) bool { return h.IDs(service) == want })
}

// one waits until an instance is as cond wants it.
func one(t *testing.T, c *plugintest.Catalog, what, service, id string, cond func(registry.Instance) bool) {
	t.Helper()
	c.Await(t, within, what, func(h *plugintest.Held) bool {
		for _, i := range h.Instances[service] {
			if i.ID == id {
				return cond(i)
			}
		}
		return false
	})
}

// wantDegraded waits until the catalog is told a reason with text in it; "" is
// for followed again.
func wantDegraded(t *testing.T, c *plugintest.Catalog, what, text string) {
	t.Helper()
	c.Await(t, within, what, func(h *plugintest.Held) bool {
		return (h.Degraded == "") == (text == "") && strings.Contains(h.Degraded, text)
	})
}

// TestEureka follows a real server through what happens to instances, to the
// connection and to the server itself.
func TestEureka(t *testing.T) {
	testenv.SkipIfShort(t)
	server := testenv.StartEureka(t, testenv.EurekaConfig{})
	u, err := url.Parse(server.URL)
	if err != nil {
		t.Fatal(err)
	}
	server.Register(t, web(1), web(2), testenv.EurekaInstance{App: "OLD", ID: "old", IP: "10.4.0.1", Port: 80}, testenv.EurekaInstance{
		App: "SHOP", ID: "shop-1", Host: "shop.example.org", IP: "10.2.0.1", Port: 80, SecurePort: 8443, VIP: "shop,store", ASG: "shop-v2", Zone: "eu-west-1b",
		Metadata: map[string]string{"version": "v2"},
	})

	t.Run("life", func(t *testing.T) {
		c := follow(t, eureka.Config{Servers: []string{server.URL}})
		c.AwaitSynced(t, within)
		ids(t, c, "the first list", "WEB", "web-1 web-2")
		// A list of the time before the registrations may have come first.
		var reasons int
		c.Look(func(h *plugintest.Held) { reasons = len(h.Reasons) })
		one(t, c, "all fields", "SHOP", "shop-1", func(i registry.Instance) bool {
			return fmt.Sprintf("%+v", i) == fmt.Sprintf("%+v", registry.Instance{
				ID: "shop-1", Address: "10.2.0.1", Ports: []registry.Port{{Number: 80}, {Name: "https", Number: 8443, Protocol: "https"}},
				Meta: map[string]string{"version": "v2"}, Health: registry.HealthPassing, Locality: registry.Locality{Region: "eu-west-1", Zone: "eu-west-1b"},
				Cluster: "shop-v2", Node: "shop.example.org",
			})
		})
		server.Register(t, web(3))
		ids(t, c, "scaled out", "WEB", "web-1 web-2 web-3")
		server.Override(t, "WEB", "web-3", "OUT_OF_SERVICE")
		one(t, c, "overridden", "WEB", "web-3", func(i registry.Instance) bool { return i.Disabled })
		server.Override(t, "WEB", "web-3", "")
		one(t, c, "no more overridden", "WEB", "web-3", func(i registry.Instance) bool { return !i.Disabled && i.Health == registry.HealthPassing })
		for _, status := range []string{"DOWN", "UP", "STARTING"} {
			now := web(3)
			now.Status = status
			server.Register(t, now)
			one(t, c, status, "WEB", "web-3", func(i registry.Instance) bool { return (i.Health == registry.HealthPassing) == (status == "UP") })
		}
		now := web(3)
		now.Port, now.Metadata = 9090, map[string]string{"version": "v3"}
		server.Register(t, now)
		one(t, c, "another port", "WEB", "web-3", func(i registry.Instance) bool { return i.Ports[0].Number == 9090 && i.Meta["version"] == "v3" })
		server.Deregister(t, "WEB", "web-3")
		ids(t, c, "scaled in", "WEB", "web-1 web-2")
		server.Deregister(t, "SHOP", "shop-1")
		ids(t, c, "a service is gone", "SHOP", "-")
		c.Look(func(h *plugintest.Held) {
			if len(h.Reasons) != reasons || h.Degraded != "" || !strings.HasPrefix(h.Detail, "polling "+server.URL) || h.Heard == 0 {
				t.Errorf("degraded %q, detail %q, heard %d", h.Reasons, h.Detail, h.Heard)
			}
		})
	})

	t.Run("cut and frozen", func(t *testing.T) {
		gate := testenv.NewGate(t, u.Host)
		gate.Open(t)
		c := follow(t, eureka.Config{Servers: []string{"http://" + gate.Addr}, HTTP: plugin.HTTP{Timeout: plugin.Duration(5 * time.Second)}})
		ids(t, c, "the first list", "WEB", "web-1 web-2")
		c.ForgetLeast()
		gate.Shut()
		wantDegraded(t, c, "cut off", "connection refused")
		gate.Open(t)
		wantDegraded(t, c, "no more cut off", "")
		server.Freeze()
		wantDegraded(t, c, "frozen", "no whole answer within 5s")
		server.Thaw()
		wantDegraded(t, c, "no more frozen", "")
		server.Register(t, web(4))
		ids(t, c, "it goes on", "WEB", "web-1 web-2 web-4")
		server.Deregister(t, "WEB", "web-4")
		ids(t, c, "it goes on", "WEB", "web-1 web-2")
		c.Look(func(h *plugintest.Held) {
			if h.Least["WEB"] != 2 {
				t.Errorf("WEB had %d instances meanwhile", h.Least["WEB"])
			}
		})
	})

	t.Run("restarted without data", func(t *testing.T) {
		c := follow(t, eureka.Config{Servers: []string{server.URL}, RemoveGrace: plugin.Duration(10 * time.Second)})
		ids(t, c, "the first list", "WEB", "web-1 web-2")
		c.ForgetLeast()
		server.Kill()
		wantDegraded(t, c, "killed", "connection refused")
		server.Start(t)
		wantDegraded(t, c, "empty", "no instance at all")
		c.Look(func(h *plugintest.Held) {
			if h.IDs("WEB") != "web-1 web-2" || h.Least["WEB"] != 2 {
				t.Errorf("an empty server removes: %s", h)
			}
		})
		server.Register(t, web(1))
		wantDegraded(t, c, "half of it is back", "remove_grace")
		ids(t, c, "half of it is back", "WEB", "web-1 web-2")
		ids(t, c, "half of it is back", "OLD", "old")
		ids(t, c, "the time is over", "WEB", "web-1")
		ids(t, c, "the time is over", "OLD", "-")
		wantDegraded(t, c, "the time is over", "")
	})
}

// TestAuth follows a server with basic authentication, which Spring Security
// does for a real one, and what a Spring Cloud application registers there.
func TestAuth(t *testing.T) {
	testenv.SkipIfShort(t)
	server := testenv.StartEureka(t, testenv.EurekaConfig{User: "isthmus", Password: "right", Properties: map[string]string{
		// It is a Spring Cloud application too, and registers itself.
		"spring.application.name": "shop-app", "eureka.client.register-with-eureka": "true",
		"eureka.instance.metadata-map.version": "v7", "eureka.instance.prefer-ip-address": "true", "eureka.instance.ip-address": "127.0.0.1",
		"eureka.instance.instance-id": "shop-1",
	}})
	server.Register(t, web(1))
	file := filepath.Join(t.TempDir(), "password")
	password := func(text string) {
		if err := os.WriteFile(file, []byte(text+"\n"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	wantDegraded(t, follow(t, eureka.Config{Servers: []string{server.URL}}), "nobody", "status 401")
	password("wrong")
	c := follow(t, eureka.Config{Servers: []string{server.URL}, HTTP: plugin.HTTP{Username: "isthmus", PasswordFile: file}})
	wantDegraded(t, c, "a wrong password", "status 401: it wants a user")
	c.Look(func(h *plugintest.Held) {
		if h.Synced {
			t.Error("a refusal is taken for an empty registry")
		}
	})
	password("right")
	ids(t, c, "the right password", "WEB", "web-1")
	wantDegraded(t, c, "the right password", "")
	c.Await(t, within, "what Spring Cloud registers", func(h *plugintest.Held) bool {
		all := h.Instances["SHOP-APP"]
		return len(all) == 1 && all[0].ID == "shop-1" && all[0].Address == "127.0.0.1" &&
			len(all[0].Ports) == 1 && all[0].Ports[0].Number == server.Port && all[0].Health == registry.HealthPassing && all[0].Meta["version"] == "v7"
	})
	password("wrong")
	wantDegraded(t, c, "wrong again", "status 401")
	ids(t, c, "wrong again", "WEB", "web-1")
}

// TestPeersOfOne follows two servers that are peers: one that is killed is left
// for the other, and comes back with its data.
func TestPeersOfOne(t *testing.T) {
	testenv.SkipIfShort(t)
	a, b := testenv.StartEurekaPair(t, testenv.EurekaConfig{})
	a.Register(t, web(1), web(2))
	at := func(server *testenv.Eureka) *plugintest.Catalog {
		return follow(t, eureka.Config{Servers: []string{server.URL}})
	}
	ids(t, at(b), "replicated", "WEB", "web-1 web-2")
	c := follow(t, eureka.Config{Servers: []string{a.URL, b.URL}})
	ids(t, c, "the first list", "WEB", "web-1 web-2")
	c.ForgetLeast()
	a.Kill()
	c.Await(t, within, "fail-over", func(h *plugintest.Held) bool {
		return strings.HasPrefix(h.Detail, "polling "+b.URL) && strings.Contains(h.Detail, a.URL+" cannot be used since")
	})
	b.Register(t, web(3))
	ids(t, c, "a change at the other one", "WEB", "web-1 web-2 web-3")
	a.Start(t)
	ids(t, at(a), "started again, with its data", "WEB", "web-1 web-2 web-3")
	b.Kill()
	c.Await(t, within, "back again", func(h *plugintest.Held) bool { return strings.HasPrefix(h.Detail, "polling "+a.URL) })
	ids(t, c, "back again", "WEB", "web-1 web-2 web-3")
	c.Look(func(h *plugintest.Held) {
		if h.Least["WEB"] != 2 {
			t.Errorf("WEB had %d instances meanwhile", h.Least["WEB"])
		}
	})
}

// TestEurekaMany shows that 10,000 services of ten instances are followed
// within bounds of memory, and that a change among them is one service.
func TestEurekaMany(t *testing.T) {
	testenv.SkipIfShort(t)
	const services, each = 10_000, 10
	server := testenv.StartEureka(t, testenv.EurekaConfig{HeapMB: 1400, Properties: map[string]string{
		"eureka.server.response-cache-update-interval-ms": "5000", // it takes a server seconds to write 100,000 instances
		// Only the changes of the last seconds, as after a load they are many.
		"eureka.server.retention-time-in-m-s-in-delta-queue": "5000", "eureka.server.delta-retention-timer-interval-in-ms": "1000",
	}})
	var all []testenv.EurekaInstance
	for s := range services {
		for i := range each {
			all = append(all, testenv.EurekaInstance{App: fmt.Sprint("APP-", s), ID: fmt.Sprintf("app-%d-%d", s, i), IP: fmt.Sprintf("10.%d.%d.%d", s/250, s%250, i+1), Port: 8080})
		}
	}
	begin := time.Now()
	server.RegisterMany(t, all)
	t.Logf("registered in %v", time.Since(begin).Round(time.Millisecond))
	heap := func() uint64 {
		var m runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&m)
		return m.HeapAlloc
	}
	before := heap()
	begin = time.Now()
	c := follow(t, eureka.Config{Servers: []string{server.URL}})
	c.Await(t, 4*within, "the first list", func(h *plugintest.Held) bool { return h.Synced && len(h.Services) == services })
	used := heap() - before
	t.Logf("listed in %v; %d MiB, of which the test's own catalog is about a half", time.Since(begin).Round(time.Millisecond), used>>20)
	if used > 400<<20 {
		t.Errorf("%d MiB are held for %d instances", used>>20, services*each)
	}
	c.Look(func(h *plugintest.Held) { h.Sets = 0 })
	begin = time.Now()
	server.Deregister(t, "APP-7", "app-7-3")
	c.Await(t, within, "a change", func(h *plugintest.Held) bool { return len(h.Instances["APP-7"]) == each-1 })
	t.Logf("a change was seen after %v", time.Since(begin).Round(time.Millisecond))
	c.Look(func(h *plugintest.Held) {
		if h.Sets != 1 || h.Removes != 0 {
			t.Errorf("one change came to %d sets and %d removals", h.Sets, h.Removes)
		}
	})
}

// TestConformance shows that the adapter as a plugin keeps the contract,
// against a real server.
func TestConformance(t *testing.T) {
	testenv.SkipIfShort(t)
	server := testenv.StartEureka(t, testenv.EurekaConfig{})
	u, err := url.Parse(server.URL)
	if err != nil {
		t.Fatal(err)
	}
	gate := testenv.NewGate(t, u.Host)
	gate.Open(t)
	server.Register(t, web(1), web(2), testenv.EurekaInstance{App: "DB_MAIN", ID: "db", IP: "10.3.0.1", Port: 5432})
	config, err := json.Marshal(map[string]any{"servers": []string{"http://" + gate.Addr + "/eureka"}, "interval": "1s"})
	if err != nil {
		t.Fatal(err)
	}
	endpoints := func(want int) func(*plugintest.World) error {
		return func(w *plugintest.World) error {
			for _, name := range w.Names(collection.ServiceEntry) {
				if w.ServiceEntry(name).GetHosts()[0] == "web.eureka" {
					if n := len(w.WorkloadEntries(name)); n != want {
						return fmt.Errorf("%s has %d instances, want %d", name, n, want)
					}
					return nil
				}
			}
			return fmt.Errorf("no host web.eureka among %q", w.Names(collection.ServiceEntry))
		}
	}
	plugintest.Conformance(t, plugintest.Config{
		Config: config, Adapter: "eureka", Within: within,
		Changes: []plugintest.Change{
			{Name: "scaled out", MaxUpserts: 1, Want: endpoints(3), Do: func(ctx context.Context) error { return server.TryRegister(ctx, web(3)) }},
			{Name: "scaled in", Want: endpoints(2), Do: func(ctx context.Context) error { return server.TryDeregister(ctx, "WEB", "web-3") }},
		},
		Outages: []plugintest.Outage{
			{
				Name: "cut off", Want: endpoints(2),
				Cut:     func(context.Context) error { gate.Shut(); return nil },
				Restore: func(context.Context) error { gate.Open(t); return nil },
			},
			{
				Name: "restarted without data, registered again",
				Cut:  func(context.Context) error { server.Kill(); return nil },
				Restore: func(context.Context) error {
					server.Start(t)
					server.Register(t, web(1), web(2), testenv.EurekaInstance{App: "DB_MAIN", ID: "db", IP: "10.3.0.1", Port: 5432})
					return nil
				},
			},
		},
	})
}
