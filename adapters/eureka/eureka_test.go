package eureka_test

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/isthmus-mesh/isthmus/adapters/eureka"
	"github.com/isthmus-mesh/isthmus/internal/testenv"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testapp"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testeureka"
	"github.com/isthmus-mesh/isthmus/plugin"
	"github.com/isthmus-mesh/isthmus/plugin/plugintest"
	"github.com/isthmus-mesh/isthmus/plugin/registry"
)

// within is how long a change may take on a busy machine.
const within = testenv.Patience

// follow runs an adapter until the test ends, with the interval of a second.
func follow(t *testing.T, c eureka.Config) *plugintest.Catalog {
	t.Helper()
	catalog, stop := followUntil(t, c)
	t.Cleanup(stop)
	return catalog
}

// followUntil is follow until stop.
func followUntil(t *testing.T, c eureka.Config) (_ *plugintest.Catalog, stop func()) {
	t.Helper()
	d := eureka.DefaultConfig
	d.Servers, d.HTTP, d.Interval, d.ServiceBy = c.Servers, c.HTTP, plugin.Duration(time.Second), c.ServiceBy
	if c.RemoveGrace != 0 {
		d.RemoveGrace = c.RemoveGrace
	}
	a, err := eureka.New(d, plugin.Env{})
	if err != nil {
		t.Fatal(err)
	}
	return plugintest.Start(t, a)
}

func web(n int) testeureka.Instance {
	return testeureka.Instance{App: "WEB", ID: fmt.Sprint("web-", n), IP: fmt.Sprint("10.1.0.", n), Port: 8080}
}

// relay passes requests on to a real server. It records them, and may change
// the answers.
type relay struct {
	url string

	mu    sync.Mutex // guards everything below
	asked []string   // paths
	with  func(path, answer string) string
}

func newRelay(t *testing.T, server *testeureka.Server) *relay {
	t.Helper()
	target, err := url.Parse(server.URL)
	if err != nil {
		t.Fatal(err)
	}
	r := &relay{}
	transport := &http.Transport{}
	proxy := &httputil.ReverseProxy{
		Transport: transport,
		Rewrite: func(p *httputil.ProxyRequest) {
			p.Out.URL.Scheme, p.Out.URL.Host = target.Scheme, target.Host
			p.Out.Header.Del("Accept-Encoding") // then the transport reads what is compressed
		},
		ModifyResponse: func(res *http.Response) error {
			path := strings.TrimPrefix(res.Request.URL.Path, "/eureka")
			r.mu.Lock()
			r.asked = append(r.asked, path)
			with := r.with
			r.mu.Unlock()
			if with == nil {
				return nil
			}
			answer, err := io.ReadAll(res.Body)
			if err != nil {
				return err
			}
			res.Body.Close()
			text := with(path, string(answer))
			res.Body, res.ContentLength = io.NopCloser(strings.NewReader(text)), int64(len(text))
			res.Header.Set("Content-Length", fmt.Sprint(len(text)))
			return nil
		},
	}
	s := httptest.NewServer(proxy)
	t.Cleanup(transport.CloseIdleConnections)
	t.Cleanup(s.Close)
	r.url = s.URL + "/eureka"
	return r
}

// answer changes the answers from now on, and forgets the requests so far; nil
// changes none.
func (r *relay) answer(with func(path, answer string) string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.with, r.asked = with, nil
}

// took returns the paths of the requests since the last answer.
func (r *relay) took() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.asked)
}

// heard waits for so many more answers.
func heard(t *testing.T, c *plugintest.Catalog, more int) {
	t.Helper()
	var from int
	c.Look(func(h *plugintest.Held) { from = h.Heard })
	c.Await(t, within, "more answers", func(h *plugintest.Held) bool { return h.Heard >= from+more })
}

// TestEureka follows two real servers that are peers of each other, through
// what happens to instances, to connections and to the servers.
func TestEureka(t *testing.T) {
	testenv.SkipIfShort(t)
	t.Parallel()
	server, other := testeureka.StartPair(t, testeureka.Config{Properties: map[string]string{
		// For the instance whose lease ends.
		"eureka.server.enable-self-preservation": "false", "eureka.server.eviction-interval-timer-in-ms": "500",
	}})
	u, err := url.Parse(server.URL)
	if err != nil {
		t.Fatal(err)
	}
	server.Register(t, web(1), web(2), testeureka.Instance{App: "OLD", ID: "old", IP: "10.4.0.1", Port: 80}, testeureka.Instance{
		App: "SHOP", ID: "shop-1", Host: "shop.example.org", IP: "10.2.0.1", Port: 80, SecurePort: 8443, VIP: "shop,store", ASG: "shop-v2", Zone: "eu-west-1b",
		Metadata: map[string]string{"version": "v2"},
	})

	t.Run("life", func(t *testing.T) {
		c := follow(t, eureka.Config{Servers: []string{server.URL}})
		c.AwaitSynced(t, within)
		c.AwaitIDs(t, within, "the first list", "WEB", "web-1 web-2")
		// A list of the time before the registrations may have come first.
		var reasons int
		c.Look(func(h *plugintest.Held) { reasons = len(h.Reasons) })
		c.AwaitInstance(t, within, "all fields", "SHOP", "shop-1", func(i registry.Instance) bool {
			return fmt.Sprintf("%+v", i) == fmt.Sprintf("%+v", registry.Instance{
				ID: "shop-1", Address: "10.2.0.1", Ports: []registry.Port{{Number: 80}, {Name: "https", Number: 8443, Protocol: "https"}},
				Meta: map[string]string{"version": "v2"}, Health: registry.HealthPassing, Locality: registry.Locality{Region: "eu-west-1", Zone: "eu-west-1b"},
				Cluster: "shop-v2", Node: "shop.example.org",
			})
		})
		server.Register(t, web(3))
		c.AwaitIDs(t, within, "scaled out", "WEB", "web-1 web-2 web-3")
		server.Override(t, "WEB", "web-3", "OUT_OF_SERVICE")
		c.AwaitInstance(t, within, "overridden", "WEB", "web-3", func(i registry.Instance) bool { return i.Disabled })
		server.Override(t, "WEB", "web-3", "")
		c.AwaitInstance(t, within, "no more overridden", "WEB", "web-3", func(i registry.Instance) bool { return !i.Disabled && i.Health == registry.HealthPassing })
		for _, status := range []string{"DOWN", "UP", "STARTING"} {
			now := web(3)
			now.Status = status
			server.Register(t, now)
			c.AwaitInstance(t, within, status, "WEB", "web-3", func(i registry.Instance) bool { return (i.Health == registry.HealthPassing) == (status == "UP") })
		}
		now := web(3)
		now.Port, now.Metadata = 9090, map[string]string{"version": "v3"}
		server.Register(t, now)
		c.AwaitInstance(t, within, "another port", "WEB", "web-3", func(i registry.Instance) bool { return i.Ports[0].Number == 9090 && i.Meta["version"] == "v3" })
		server.Deregister(t, "WEB", "web-3")
		c.AwaitIDs(t, within, "scaled in", "WEB", "web-1 web-2")
		server.Deregister(t, "SHOP", "shop-1")
		c.AwaitIDs(t, within, "a service is gone", "SHOP", "-")
		brief := testeureka.Instance{App: "BRIEF", ID: "brief", IP: "10.4.0.2", Port: 80, LeaseSeconds: 1}
		testenv.Eventually(t, within, "an instance that is not to be renewed", func() (string, bool) {
			server.Register(t, brief)
			heard(t, c, 1)
			var got string
			c.Look(func(h *plugintest.Held) { got = h.IDs("BRIEF") })
			return got, got == "brief"
		})
		c.AwaitIDs(t, within, "its lease ends", "BRIEF", "-")
		c.Look(func(h *plugintest.Held) {
			if len(h.Reasons) != reasons || h.Degraded != "" || !strings.HasPrefix(h.Detail, "polling "+server.URL) || h.Heard == 0 {
				t.Errorf("degraded %q, detail %q, heard %d", h.Reasons, h.Detail, h.Heard)
			}
		})
	})

	t.Run("requests", func(t *testing.T) {
		r := newRelay(t, server)
		c := follow(t, eureka.Config{Servers: []string{r.url}})
		c.AwaitIDs(t, within, "the first list", "WEB", "web-1 web-2")
		heard(t, c, 1)
		r.answer(nil)
		heard(t, c, 3)
		if asked := r.took(); len(asked) < 3 || slices.ContainsFunc(asked, func(path string) bool { return path != "/apps/delta" }) {
			t.Errorf("three times nothing changed, at the cost of %q", asked)
		}

		// A change that the server no longer tells is noticed by the hash code.
		told := regexp.MustCompile(`"application":\[.*\]`)
		r.answer(func(path, answer string) string {
			if path == "/apps/delta" {
				return told.ReplaceAllString(answer, `"application":[]`)
			}
			return answer
		})
		server.Register(t, web(5))
		c.AwaitIDs(t, within, "a change that is not told", "WEB", "web-1 web-2 web-5")
		if asked := r.took(); !slices.Contains(asked, "/apps") {
			t.Errorf("a change that is not told was seen by %q", asked)
		}
		r.answer(nil)
		server.Deregister(t, "WEB", "web-5")
		c.AwaitIDs(t, within, "a change that is told", "WEB", "web-1 web-2")

		c.ForgetLeast()
		for what, with := range map[string]func(path, answer string) string{
			"unexpected EOF":    func(_, answer string) string { return answer[:len(answer)/2] },
			"invalid character": func(string, string) string { return "<html>so sorry</html>" },
			"not a list of applications; does the URL end with the path of the API": func(string, string) string { return "{}" },
		} {
			r.answer(with)
			c.AwaitDegraded(t, within, what, what)
			r.answer(nil)
			c.AwaitDegraded(t, within, "no more "+what, "")
		}
		c.Look(func(h *plugintest.Held) {
			if h.Least["WEB"] != 2 {
				t.Errorf("WEB had %d instances meanwhile", h.Least["WEB"])
			}
		})
		follow(t, eureka.Config{Servers: []string{server.URL + "/apps"}}).AwaitDegraded(t, within, "another path", "status 404")
	})

	t.Run("cut and frozen", func(t *testing.T) {
		gate := testenv.NewGate(t, u.Host)
		gate.Open(t)
		c, stop := followUntil(t, eureka.Config{Servers: []string{"http://" + gate.Addr}, HTTP: plugin.HTTP{Timeout: plugin.Duration(2 * time.Second)}})
		defer stop()
		c.AwaitIDs(t, within, "the first list", "WEB", "web-1 web-2")
		c.ForgetLeast()
		gate.Shut()
		c.AwaitDegraded(t, within, "cut off", "connection refused")
		gate.Open(t)
		c.AwaitDegraded(t, within, "no more cut off", "")
		server.Pause()
		c.AwaitDegraded(t, within, "frozen", "no whole answer within 2s")
		server.Continue()
		c.AwaitDegraded(t, within, "no more frozen", "")
		server.Register(t, web(4))
		c.AwaitIDs(t, within, "it goes on", "WEB", "web-1 web-2 web-4")
		server.Deregister(t, "WEB", "web-4")
		c.AwaitIDs(t, within, "it goes on", "WEB", "web-1 web-2")
		c.Look(func(h *plugintest.Held) {
			if h.Least["WEB"] != 2 {
				t.Errorf("WEB had %d instances meanwhile", h.Least["WEB"])
			}
		})
	})

	t.Run("no connection is left", func(t *testing.T) {
		gate := testenv.NewGate(t, u.Host)
		gate.Open(t)
		c, stop := followUntil(t, eureka.Config{Servers: []string{"http://" + gate.Addr}})
		c.AwaitIDs(t, within, "the first list", "WEB", "web-1 web-2")
		heard(t, c, 1)
		if n := len(gate.LocalPorts()); n != 1 {
			t.Errorf("%d connections to the server, want one for all requests", n)
		}
		stop()
		testenv.Eventually(t, within, "the end of the connection", func() (string, bool) {
			return fmt.Sprint(gate.LocalPorts()), len(gate.LocalPorts()) == 0
		})
	})

	t.Run("restarted with the data of its peer", func(t *testing.T) {
		at := func(server *testeureka.Server) *plugintest.Catalog {
			return follow(t, eureka.Config{Servers: []string{server.URL}})
		}
		at(other).AwaitIDs(t, within, "replicated", "WEB", "web-1 web-2")
		c := follow(t, eureka.Config{Servers: []string{server.URL, other.URL}})
		c.AwaitIDs(t, within, "the first list", "WEB", "web-1 web-2")
		c.ForgetLeast()
		server.Kill()
		c.Await(t, within, "fail-over", func(h *plugintest.Held) bool {
			return strings.HasPrefix(h.Detail, "polling "+other.URL) && strings.Contains(h.Detail, server.URL+" cannot be used since")
		})
		other.Register(t, web(3))
		c.AwaitIDs(t, within, "a change at the other one", "WEB", "web-1 web-2 web-3")
		server.Restart(t)
		at(server).AwaitIDs(t, within, "started again, with its data", "WEB", "web-1 web-2 web-3")
		other.Kill()
		c.Await(t, within, "back again", func(h *plugintest.Held) bool { return strings.HasPrefix(h.Detail, "polling "+server.URL) })
		c.AwaitIDs(t, within, "back again", "WEB", "web-1 web-2 web-3")
		c.Look(func(h *plugintest.Held) {
			if h.Least["WEB"] != 2 {
				t.Errorf("WEB had %d instances meanwhile", h.Least["WEB"])
			}
		})
	})

	t.Run("restarted without data", func(t *testing.T) {
		c := follow(t, eureka.Config{Servers: []string{server.URL}, RemoveGrace: plugin.Duration(3 * time.Second)})
		c.AwaitIDs(t, within, "the first list", "WEB", "web-1 web-2 web-3")
		c.ForgetLeast()
		server.Kill()
		c.AwaitDegraded(t, within, "killed", "connection refused")
		server.Restart(t) // and its peer is gone
		c.AwaitDegraded(t, within, "empty", "no instance at all")
		c.Look(func(h *plugintest.Held) {
			if h.IDs("WEB") != "web-1 web-2 web-3" || h.Least["WEB"] != 3 || h.Removes > 0 {
				t.Errorf("an empty server removes: %s", h)
			}
		})
		server.Register(t, web(1))
		c.AwaitIDs(t, within, "the time is over", "WEB", "web-1")
		c.AwaitIDs(t, within, "the time is over", "OLD", "-")
		c.AwaitDegraded(t, within, "the time is over", "")
		c.Look(func(h *plugintest.Held) {
			if !slices.ContainsFunc(h.Reasons, func(reason string) bool { return strings.Contains(reason, "remove_grace") }) {
				t.Errorf("what was missing was not kept for a time: %q", h.Reasons)
			}
		})
	})
}

// TestSelfPreservation follows a server whose clients send no heart-beat any
// more. With self-preservation it ends no lease, and nothing goes; without, it
// ends one after the other, and is believed.
func TestSelfPreservation(t *testing.T) {
	testenv.SkipIfShort(t)
	t.Parallel()
	const all = "web-1 web-2 web-3 web-4 web-5"
	for _, preserves := range []bool{true, false} {
		t.Run(fmt.Sprintf("preserves=%t", preserves), func(t *testing.T) {
			t.Parallel()
			server := testeureka.Start(t, testeureka.Config{Properties: map[string]string{
				"eureka.server.enable-self-preservation": fmt.Sprint(preserves), "eureka.server.eviction-interval-timer-in-ms": "500",
				"logging.level.com.netflix.eureka.registry": "DEBUG",
			}})
			server.Register(t, web(5)) // whose lease is an hour
			c := follow(t, eureka.Config{Servers: []string{server.URL}})
			testenv.Eventually(t, within, "instances with leases of a second", func() (string, bool) {
				for n := 1; n < 5; n++ {
					brief := web(n)
					brief.LeaseSeconds = 1
					server.Register(t, brief)
				}
				heard(t, c, 1)
				var got string
				c.Look(func(h *plugintest.Held) { got = h.IDs("WEB") })
				return got, got == all
			})
			c.ForgetLeast()
			var reasons int
			c.Look(func(h *plugintest.Held) { reasons = len(h.Reasons) })
			if preserves {
				// A lease lasts two seconds, the server looks each half one.
				const refusal = "lease expiration is currently disabled"
				before := strings.Count(server.Output(), refusal)
				testenv.Eventually(t, within, "leases that the server does not end", func() (string, bool) {
					n := strings.Count(server.Output(), refusal) - before
					return fmt.Sprint(n, " times"), n >= 8
				})
				heard(t, c, 3)
				c.Look(func(h *plugintest.Held) {
					if h.IDs("WEB") != all || h.Least["WEB"] != 5 {
						t.Errorf("a server that preserves itself: %s", h)
					}
				})
			} else {
				c.AwaitIDs(t, within, "all but one have gone", "WEB", "web-5")
			}
			c.Look(func(h *plugintest.Held) {
				if len(h.Reasons) != reasons || h.Degraded != "" {
					t.Errorf("degraded: %q", h.Reasons)
				}
			})
		})
	}
}

// TestSpring follows what a real application of Spring Cloud registers, at a
// server with basic authentication by Spring Security.
func TestSpring(t *testing.T) {
	testenv.SkipIfShort(t)
	t.Parallel()
	server := testeureka.Start(t, testeureka.Config{User: "isthmus", Password: "right"})
	server.Register(t, web(1))
	file := filepath.Join(t.TempDir(), "password")
	password := func(text string) {
		if err := os.WriteFile(file, []byte(text+"\n"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	follow(t, eureka.Config{Servers: []string{server.URL}}).AwaitDegraded(t, within, "nobody", "status 401")
	password("wrong")
	user := plugin.HTTP{Username: "isthmus", PasswordFile: file}
	c := follow(t, eureka.Config{Servers: []string{server.URL}, HTTP: user})
	c.AwaitDegraded(t, within, "a wrong password", "status 401: it wants a user")
	c.Look(func(h *plugintest.Held) {
		if h.Synced {
			t.Error("a refusal is taken for an empty registry")
		}
	})
	password("right")
	c.AwaitIDs(t, within, "the right password", "WEB", "web-1")
	c.AwaitDegraded(t, within, "the right password", "")

	app := testapp.StartSpringApp(t, server, "shop-app", map[string]string{
		"eureka.instance.prefer-ip-address": "true", "eureka.instance.ip-address": "127.0.0.1",
		"eureka.instance.metadata-map.zone": "zone-a", "eureka.instance.metadata-map.version": "v7",
		"eureka.instance.secure-port-enabled": "true", "eureka.instance.secure-port": "8443",
		"eureka.client.registry-fetch-interval-seconds": "1",
	})
	const service = "SHOP-APP"
	id := ""
	c.Await(t, within, "what Spring Cloud registers", func(h *plugintest.Held) bool {
		all := h.Instances[service]
		if len(all) == 1 {
			id = all[0].ID
		}
		return len(all) == 1 && all[0].Health == registry.HealthPassing
	})
	port := fmt.Sprint(app.Port)
	if !strings.HasSuffix(id, ":shop-app:"+port) {
		t.Errorf("its instanceId is %q, want Spring's HOST:NAME:PORT", id)
	}
	c.Look(func(h *plugintest.Held) {
		want := []registry.Instance{{
			ID: id, Address: "127.0.0.1", Ports: []registry.Port{{Number: app.Port}, {Name: "https", Number: 8443, Protocol: "https"}},
			Meta: map[string]string{"zone": "zone-a", "version": "v7", "management.port": port}, Health: registry.HealthPassing, Node: "127.0.0.1",
		}}
		if diff := cmp.Diff(want, h.Instances[service]); diff != "" {
			t.Errorf("what Spring Cloud registers (-want +got):\n%s", diff)
		}
	})
	for _, by := range []string{"vip", "secure_vip"} {
		follow(t, eureka.Config{Servers: []string{server.URL}, HTTP: user, ServiceBy: by}).AwaitIDs(t, within, "by "+by, "shop-app", service+"/"+id)
	}
	testenv.Eventually(t, within, "the same by its own client", func() (string, bool) {
		got := app.Instances(t, "shop-app")
		return fmt.Sprint(got), slices.Equal(got, []string{id})
	})
	app.SetStatus(t, "OUT_OF_SERVICE")
	c.AwaitInstance(t, within, "out of service by the actuator", service, id, func(i registry.Instance) bool { return i.Disabled })
	app.SetStatus(t, "DOWN")
	c.AwaitInstance(t, within, "down by the actuator", service, id, func(i registry.Instance) bool { return !i.Disabled && i.Health == registry.HealthCritical })
	app.SetStatus(t, "CANCEL_OVERRIDE")
	c.AwaitInstance(t, within, "no longer by the actuator", service, id, func(i registry.Instance) bool { return !i.Disabled && i.Health == registry.HealthPassing })
	app.Stop()
	c.AwaitIDs(t, within, "it ends", service, "-")

	password("wrong")
	c.AwaitDegraded(t, within, "wrong again", "status 401")
	c.AwaitIDs(t, within, "wrong again", "WEB", "web-1")
}

// TestEurekaMany shows that 10,000 services of ten instances are followed
// within bounds of memory, and that a change among them is one service.
func TestEurekaMany(t *testing.T) {
	testenv.SkipIfShort(t)
	const services, each = 10_000, 10
	server := testeureka.Start(t, testeureka.Config{HeapMB: 1400, Properties: map[string]string{
		"eureka.server.response-cache-update-interval-ms": "5000", // it takes a server seconds to write 100,000 instances
		// Only the changes of the last seconds, as after a load they are many.
		"eureka.server.retention-time-in-m-s-in-delta-queue": "5000", "eureka.server.delta-retention-timer-interval-in-ms": "1000",
	}})
	var all []testeureka.Instance
	for s := range services {
		for i := range each {
			all = append(all, testeureka.Instance{App: fmt.Sprint("APP-", s), ID: fmt.Sprintf("app-%d-%d", s, i), IP: fmt.Sprintf("10.%d.%d.%d", s/250, s%250, i+1), Port: 8080})
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
	t.Parallel()
	server := testeureka.Start(t, testeureka.Config{})
	u, err := url.Parse(server.URL)
	if err != nil {
		t.Fatal(err)
	}
	gate := testenv.NewGate(t, u.Host)
	gate.Open(t)
	all := []testeureka.Instance{web(1), web(2), {App: "DB_MAIN", ID: "db", IP: "10.3.0.1", Port: 5432}}
	server.RegisterListed(t, all...)
	config := func(grace string) json.RawMessage {
		return json.RawMessage(fmt.Sprintf(`{"servers": ["http://%s/eureka"], "interval": "1s", "remove_grace": %q}`, gate.Addr, grace))
	}
	endpoints := func(want int) func(*plugintest.World) error {
		return func(w *plugintest.World) error { return w.WantInstances("web.eureka", want) }
	}
	plugintest.Conformance(t, plugintest.Config{
		Config: config("2m"), Adapter: "eureka", Within: within,
		Changes: []plugintest.Change{
			{Name: "scaled out", MaxUpserts: 1, Want: endpoints(3), Do: func(context.Context) error { server.Register(t, web(3)); return nil }},
			{Name: "scaled in", Want: endpoints(2), Do: func(context.Context) error { server.Deregister(t, "WEB", "web-3"); return nil }},
		},
		Outages: []plugintest.Outage{
			{
				Name: "cut off", Want: endpoints(2), Lasts: 2 * time.Second,
				Cut:     func(context.Context) error { gate.Shut(); return nil },
				Restore: func(context.Context) error { gate.Open(t); return nil },
			},
			{
				Name: "restarted without data, registered again", Lasts: time.Second,
				Cut: func(context.Context) error { server.Kill(); return nil },
				Restore: func(context.Context) error {
					server.Restart(t)
					server.RegisterListed(t, all...)
					return nil
				},
			},
		},
		Flaps: &plugintest.Flaps{
			Config: config("6s"), Grace: 6 * time.Second,
			Cut:     func(context.Context) error { gate.Shut(); return nil },
			Restore: func(context.Context) error { gate.Open(t); return nil },
			Host:    "web.eureka",
			Join:    func(_ context.Context, n int) error { server.Register(t, web(n)); return nil },
			Leave:   func(_ context.Context, n int) error { server.Deregister(t, "WEB", fmt.Sprint("web-", n)); return nil },
		},
	})
}
