package etcd_test

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/isthmus-mesh/isthmus/adapters/etcd"
	"github.com/isthmus-mesh/isthmus/internal/testcert"
	"github.com/isthmus-mesh/isthmus/internal/testenv"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testetcd"
	"github.com/isthmus-mesh/isthmus/plugin"
	"github.com/isthmus-mesh/isthmus/plugin/plugintest"
	"github.com/isthmus-mesh/isthmus/plugin/registry"
)

// within is how long a change may take on a busy machine.
const within = testenv.Patience

// short is a time-out that a server on a busy machine meets.
const short = plugin.Duration(5 * time.Second)

// follow runs an adapter until the test ends.
func follow(t *testing.T, c etcd.Config) *plugintest.Catalog {
	t.Helper()
	catalog, stop := start(t, c)
	t.Cleanup(stop)
	return catalog
}

// start runs an adapter until stop is called for the first time.
func start(t *testing.T, c etcd.Config) (_ *plugintest.Catalog, stop func()) {
	t.Helper()
	c.MinShare = etcd.DefaultConfig.MinShare
	if c.RemoveGrace == 0 {
		c.RemoveGrace = etcd.DefaultConfig.RemoveGrace
	}
	a, err := etcd.New(c, plugin.Env{})
	if err != nil {
		t.Fatal(err)
	}
	return plugintest.Start(t, a)
}

// key is the key of an instance in layout json.
func key(service, id string) string { return "/services/" + service + "/" + id }

// value is the value of an instance in layout json.
func value(n int) string { return fmt.Sprintf(`{"address":"10.1.0.%d","port":8080}`, n) }

// wantLeast checks that web never had less than two instances since the first
// list or ForgetLeast.
func wantLeast(t *testing.T, c *plugintest.Catalog) {
	t.Helper()
	c.Look(func(h *plugintest.Held) {
		if h.Least["web"] != 2 {
			t.Errorf("web had %d instances meanwhile", h.Least["web"])
		}
	})
}

// TestEtcd follows a real server through what happens to keys, to the
// connection and to the server itself.
func TestEtcd(t *testing.T) {
	testenv.SkipIfShort(t)
	t.Parallel()
	server := testetcd.Start(t, testetcd.Config{Old: testenv.Compat()})
	server.Put(t, key("web", "web-1"), value(1))
	server.Put(t, key("web", "web-2"), value(2))
	server.Put(t, key("old", "old"), `{"address":"10.4.0.1","port":80}`)
	server.Put(t, "/servicesnot/web/web-9", value(9))
	server.Put(t, key("shop", "shop-1"), `{"address":"10.2.0.1","ports":[{"name":"http","number":80,"protocol":"http"},{"name":"admin","number":9000}],
		"meta":{"version":"v2","n":3},"tags":["a"],"weight":2.5,"health":"warning","disabled":true,"locality":"eu/eu-1/r1","cluster":"blue","node":"n1","unknown":{}}`)

	t.Run("life", func(t *testing.T) {
		c, stop := start(t, etcd.Config{Endpoints: []string{server.URL}})
		defer stop()
		c.AwaitSynced(t, within)
		c.AwaitIDs(t, within, "the first list", "web", "web-1 web-2")
		c.AwaitInstance(t, within, "all fields", "shop", "shop-1", func(i registry.Instance) bool {
			weight := i.Weight
			i.Weight = nil
			return weight != nil && *weight == 2.5 && fmt.Sprintf("%+v", i) == fmt.Sprintf("%+v", registry.Instance{
				ID: "shop-1", Address: "10.2.0.1", Ports: []registry.Port{{Name: "http", Number: 80, Protocol: "http"}, {Name: "admin", Number: 9000}},
				Meta: map[string]string{"version": "v2", "n": "3"}, Tags: []string{"a"}, Health: registry.HealthWarning, Disabled: true,
				Locality: registry.Locality{Region: "eu", Zone: "eu-1", SubZone: "r1"}, Cluster: "blue", Node: "n1",
			})
		})
		server.Put(t, key("web", "web-3"), value(3))
		c.AwaitIDs(t, within, "scaled out", "web", "web-1 web-2 web-3")
		server.Put(t, key("web", "web-3"), `{"address":"10.1.0.3","port":9090,"health":"critical"}`)
		c.AwaitInstance(t, within, "changed", "web", "web-3", func(i registry.Instance) bool {
			return i.Ports[0].Number == 9090 && i.Health == registry.HealthCritical
		})
		server.Put(t, key("web", "web-3"), `{"address":`)
		c.Await(t, within, "a value that cannot be read", func(h *plugintest.Held) bool {
			return strings.Contains(h.Problems["service web"], `"web/web-3"`) && h.IDs("web") == "web-1 web-2 web-3"
		})
		server.Put(t, key("web", "web-3"), value(3))
		c.Await(t, within, "it is mended", func(h *plugintest.Held) bool { return h.Problems["service web"] == "" })
		server.Delete(t, key("web", "web-3"))
		c.AwaitIDs(t, within, "scaled in", "web", "web-1 web-2")
		server.Put(t, "/services/lonely", value(1))
		c.Await(t, within, "a key of no service", func(h *plugintest.Held) bool { return strings.Contains(h.Problems["keys"], "lonely") })
		server.Delete(t, "/services/lonely")
		c.Await(t, within, "it is gone", func(h *plugintest.Held) bool { return len(h.Problems) == 0 })
		server.Put(t, key("brief", "brief-1"), value(1), server.Grant(t, time.Second))
		c.AwaitIDs(t, within, "with a lease", "brief", "brief-1")
		c.AwaitIDs(t, within, "the lease is over", "brief", "-")
		server.Delete(t, key("shop", "shop-1"))
		c.AwaitIDs(t, within, "a service is gone", "shop", "-")
		var heard int
		c.Look(func(h *plugintest.Held) {
			heard = h.Heard
			if len(h.Reasons) != 0 || h.Detail != "watching "+server.URL {
				t.Errorf("degraded %q, detail %q", h.Reasons, h.Detail)
			}
		})
		c.Await(t, within, "progress of a quiet registry", func(h *plugintest.Held) bool { return h.Heard > heard })
		if n := server.Metric(t, "etcd_debugging_mvcc_watcher_total"); n != 1 {
			t.Errorf("%v watches, want 1", n)
		}
		stop()
		testenv.Eventually(t, within, "no watch and no lease left", func() (string, bool) {
			leases, err := server.Client.Leases(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			n := server.Metric(t, "etcd_debugging_mvcc_watcher_total")
			return fmt.Sprintf("%v watches, %d leases", n, len(leases.Leases)), n == 0 && len(leases.Leases) == 0
		})
	})

	t.Run("selected", func(t *testing.T) {
		c := follow(t, etcd.Config{Endpoints: []string{server.URL}, Services: plugin.Selection{Exclude: plugin.Globs{"o*"}}})
		c.AwaitSynced(t, within)
		c.Look(func(h *plugintest.Held) {
			if h.IDs("web") != "web-1 web-2" || h.IDs("old") != "-" || len(h.Services) != 1 {
				t.Errorf("%s", h)
			}
			if got := h.LeftOut["config.services.exclude"]; got != `1 name left out by config.services.exclude: "old"` {
				t.Errorf("left out: %q", h.LeftOut)
			}
		})
		server.Put(t, key("other", "other"), value(9))
		c.Await(t, within, "another one that is left out", func(h *plugintest.Held) bool {
			return strings.HasPrefix(h.LeftOut["config.services.exclude"], `2 names `)
		})
		server.Delete(t, key("other", "other"))
	})

	t.Run("cut and frozen", func(t *testing.T) {
		gate := testenv.NewGate(t, server.Addr)
		gate.Open(t)
		c := follow(t, etcd.Config{Endpoints: []string{"http://" + gate.Addr}, Timeout: short})
		c.AwaitIDs(t, within, "the first list", "web", "web-1 web-2")
		c.ForgetLeast()
		gate.Shut()
		c.AwaitDegraded(t, within, "cut off", "connection refused")
		server.Put(t, key("web", "web-5"), value(5))
		server.Delete(t, key("web", "web-1"))
		gate.Open(t)
		c.AwaitIDs(t, within, "no more cut off", "web", "web-1 web-2 web-5")
		c.AwaitDegraded(t, within, "what is missing is kept", "remove_grace")
		server.Put(t, key("web", "web-1"), value(1))
		c.AwaitDegraded(t, within, "it is back", "")
		server.Delete(t, key("web", "web-5"))
		c.AwaitIDs(t, within, "removed once it was listed", "web", "web-1 web-2")
		server.Pause()
		c.AwaitDegraded(t, within, "frozen", "nothing was heard")
		server.Continue()
		c.AwaitDegraded(t, within, "no more frozen", "")
		wantLeast(t, c)
	})

	t.Run("restarted with data", func(t *testing.T) {
		c := follow(t, etcd.Config{Endpoints: []string{server.URL}, RemoveGrace: plugin.Duration(time.Second)})
		c.AwaitIDs(t, within, "the first list", "web", "web-1 web-2")
		c.ForgetLeast()
		server.Kill()
		c.AwaitDegraded(t, within, "killed", "connection refused")
		server.Restart(t)
		c.AwaitDegraded(t, within, "it is back", "")
		server.Put(t, key("web", "web-3"), value(3))
		c.AwaitIDs(t, within, "it goes on", "web", "web-1 web-2 web-3")
		server.Delete(t, key("web", "web-3"))
		c.AwaitIDs(t, within, "it goes on", "web", "web-1 web-2")
		wantLeast(t, c)
	})

	t.Run("restarted without data", func(t *testing.T) {
		c := follow(t, etcd.Config{Endpoints: []string{server.URL}, RemoveGrace: plugin.Duration(5 * time.Second)})
		c.AwaitIDs(t, within, "the first list", "web", "web-1 web-2")
		c.ForgetLeast()
		server.Kill()
		c.AwaitDegraded(t, within, "killed", "connection refused")
		server.RestartEmpty(t)
		c.AwaitDegraded(t, within, "empty", "no instance at all")
		wantLeast(t, c)
		server.Put(t, key("web", "web-1"), value(1))
		c.Await(t, within, "half of it is back", hadReason("remove_grace"))
		c.Look(func(h *plugintest.Held) {
			if !strings.Contains(h.Degraded, "the revision went back from") {
				t.Errorf("degraded: %s", h.Degraded)
			}
		})
		c.AwaitIDs(t, within, "the time is over", "web", "web-1")
		c.AwaitIDs(t, within, "the time is over", "old", "-")
		c.AwaitDegraded(t, within, "the time is over", "")
	})
}

// hadReason waits for a reason with all parts that may be over by the time that
// the test looks.
func hadReason(parts ...string) func(*plugintest.Held) bool {
	return func(h *plugintest.Held) bool {
		return slices.ContainsFunc(h.Reasons, func(reason string) bool {
			return !slices.ContainsFunc(parts, func(part string) bool { return !strings.Contains(reason, part) })
		})
	}
}

// TestEmpty shows that a registry that is empty at the start is believed after
// remove_grace, with the first instance, or at once if that is accepted.
func TestEmpty(t *testing.T) {
	testenv.SkipIfShort(t)
	t.Parallel()
	server := testetcd.Start(t, testetcd.Config{Old: testenv.Compat()})
	at := []string{server.URL}
	follow(t, etcd.Config{Endpoints: at, AcceptEmpty: true, RemoveGrace: plugin.Duration(time.Hour)}).AwaitSynced(t, within)
	c := follow(t, etcd.Config{Endpoints: at, RemoveGrace: plugin.Duration(time.Second)})
	c.Await(t, within, "empty", hadReason("no instance at all"))
	c.AwaitSynced(t, within)
	c.AwaitDegraded(t, within, "believed", "")
	c = follow(t, etcd.Config{Endpoints: at, RemoveGrace: plugin.Duration(time.Hour)})
	c.AwaitDegraded(t, within, "empty", "no instance at all")
	c.Look(func(h *plugintest.Held) {
		if h.Synced {
			t.Error("an empty registry is believed at once")
		}
	})
	server.Put(t, key("web", "web-1"), value(1))
	c.AwaitSynced(t, within)
	c.AwaitIDs(t, within, "the first instance", "web", "web-1")
	c.AwaitDegraded(t, within, "the first instance", "")
	server.Delete(t, key("web", "web-1"))
	c.AwaitIDs(t, within, "a removal that the watch reports", "web", "-")
}

// TestCompacted shows that a watch that has to go on from a compacted revision
// begins anew, without an outage and without a removal that did not happen.
func TestCompacted(t *testing.T) {
	testenv.SkipIfShort(t)
	t.Parallel()
	server := testetcd.Start(t, testetcd.Config{Old: testenv.Compat()})
	for _, id := range []string{"web-1", "web-2", "web-3"} {
		server.Put(t, key("web", id), value(1))
	}
	gate := testenv.NewGate(t, server.Addr)
	gate.Open(t)
	c := follow(t, etcd.Config{Endpoints: []string{"http://" + gate.Addr}, RemoveGrace: plugin.Duration(time.Second)})
	c.AwaitIDs(t, within, "the first list", "web", "web-1 web-2 web-3")
	c.ForgetLeast()
	gate.Shut()
	c.AwaitDegraded(t, within, "cut off", "connection refused")
	server.Delete(t, key("web", "web-3"))
	var last int64
	for n := range 50 {
		res, err := server.Client.Put(t.Context(), key("web", "web-4"), value(n+1))
		if err != nil {
			t.Fatal(err)
		}
		last = res.Header.Revision
	}
	if _, err := server.Client.Compact(t.Context(), last, clientv3.WithCompactPhysical()); err != nil {
		t.Fatal(err)
	}
	gate.Open(t)
	c.AwaitIDs(t, within, "listed again", "web", "web-1 web-2 web-4")
	c.AwaitDegraded(t, within, "followed again", "")
	c.Look(func(h *plugintest.Held) {
		if h.Least["web"] < 3 {
			t.Errorf("web had %d instances meanwhile", h.Least["web"])
		}
	})
}

// TestAuth follows a server that wants a user.
func TestAuth(t *testing.T) {
	testenv.SkipIfShort(t)
	t.Parallel()
	server := testetcd.Start(t, testetcd.Config{Old: testenv.Compat(), TokenTTL: time.Second, Args: []string{"--log-level=debug"}})
	server.Put(t, key("web", "web-1"), value(1))
	server.Put(t, key("web", "web-2"), value(2))
	gate := testenv.NewGate(t, server.Addr)
	gate.Open(t)
	at := []string{"http://" + gate.Addr}
	file := filepath.Join(t.TempDir(), "password")
	password := func(text string) {
		if err := os.WriteFile(file, []byte(text+"\n"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	password("wrong")
	c := follow(t, etcd.Config{Endpoints: at, Username: "isthmus", PasswordFile: file, Timeout: short})
	c.AwaitIDs(t, within, "authentication is off", "web", "web-1 web-2")
	c.ForgetLeast()

	server.EnableAuth(t, "isthmus", "right", "/services/")
	gate.Shut()
	gate.Open(t)
	c.AwaitDegraded(t, within, "a wrong password", "check username and password_file")
	nobody := follow(t, etcd.Config{Endpoints: at})
	nobody.AwaitDegraded(t, within, "nobody", "it wants a user")
	nobody.Look(func(h *plugintest.Held) {
		if h.Synced {
			t.Error("a refusal is taken for an empty registry")
		}
	})
	password("right")
	c.AwaitDegraded(t, within, "the right password", "")
	elsewhere := follow(t, etcd.Config{Endpoints: at, Prefix: "/elsewhere", Username: "isthmus", PasswordFile: file})
	elsewhere.AwaitDegraded(t, within, "another prefix", "permission denied: grant")

	// Longer than a login counts: the watch goes on, and so does a new session.
	testenv.Eventually(t, within, "the end of the token", func() (string, bool) {
		return "", strings.Contains(server.Output(), `"deleted a simple token","user-name":"isthmus"`)
	})
	server.Login(t)
	server.Put(t, key("web", "web-3"), value(3))
	c.AwaitIDs(t, within, "the token is over", "web", "web-1 web-2 web-3")
	gate.Shut()
	c.AwaitDegraded(t, within, "cut off", "connection refused")
	gate.Open(t)
	c.AwaitDegraded(t, within, "a new login", "")
	password("wrong again")
	gate.Shut()
	gate.Open(t)
	c.AwaitDegraded(t, within, "wrong again", "check username and password_file")
	wantLeast(t, c)
}

// TestTLS follows a server that wants a client certificate, while the files of
// both sides are renewed.
func TestTLS(t *testing.T) {
	testenv.SkipIfShort(t)
	t.Parallel()
	dir := t.TempDir()
	write := func(name string, from ...string) string {
		var all []byte
		for _, f := range from {
			b, err := os.ReadFile(f)
			if err != nil {
				t.Fatal(err)
			}
			all = append(all, b...)
		}
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, all, 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	before, after := testcert.New(t, "localhost"), testcert.New(t, "localhost")
	first, second := testcert.New(t, "isthmus"), testcert.New(t, "isthmus")
	cert, private := write("server.pem", before.Cert), write("server.key", before.Key)
	server := testetcd.Start(t, testetcd.Config{Old: testenv.Compat(), CertFile: cert, KeyFile: private, ClientCA: write("clients.pem", first.Cert, second.Cert)})
	files := plugin.TLS{CAFile: write("ca.pem", before.Cert), CertFile: write("client.pem", first.Cert), KeyFile: write("client.key", first.Key)}
	config, err := files.Config("tls")
	if err != nil {
		t.Fatal(err)
	}
	server.ConnectTLS(t, config)
	server.Put(t, key("web", "web-1"), value(1))
	server.Put(t, key("web", "web-2"), value(2))
	_, port, err := net.SplitHostPort(server.Addr)
	if err != nil {
		t.Fatal(err)
	}
	gate := testenv.NewGate(t, "127.0.0.1:"+port)
	gate.Open(t)
	_, port, err = net.SplitHostPort(gate.Addr)
	if err != nil {
		t.Fatal(err)
	}
	at := []string{"https://localhost:" + port}

	follow(t, etcd.Config{Endpoints: at, TLS: plugin.TLS{CAFile: files.CAFile}}).AwaitDegraded(t, within, "no client certificate", "tls: ")
	follow(t, etcd.Config{Endpoints: []string{"http://localhost:" + port}, Timeout: plugin.Duration(time.Second)}).AwaitDegraded(t, within, "no TLS", "localhost")
	c := follow(t, etcd.Config{Endpoints: at, TLS: files})
	c.AwaitIDs(t, within, "the first list", "web", "web-1 web-2")
	c.ForgetLeast()

	write("client.pem")
	gate.Shut()
	gate.Open(t)
	c.AwaitDegraded(t, within, "a client certificate that is half written", "cert_file")
	write("client.key", second.Key)
	write("client.pem", second.Cert)
	c.AwaitDegraded(t, within, "the renewed client certificate", "")
	write("server.key", after.Key)
	write("server.pem", after.Cert)
	gate.Shut()
	gate.Open(t)
	c.AwaitDegraded(t, within, "another server certificate", "x509")
	write("ca.pem", after.Cert)
	c.AwaitDegraded(t, within, "the renewed authority", "")
	wantLeast(t, c)
}

// TestFailOver follows three members of one etcd, of which one after the other
// is killed or hangs.
func TestFailOver(t *testing.T) {
	testenv.SkipIfShort(t)
	t.Parallel()
	members := testetcd.StartCluster(t, testenv.Compat(), 3)
	members[0].Put(t, key("web", "web-1"), value(1))
	members[0].Put(t, key("web", "web-2"), value(2))
	var urls []string
	for _, m := range members {
		urls = append(urls, m.URL)
	}
	c := follow(t, etcd.Config{Endpoints: urls, Timeout: short})
	c.AwaitIDs(t, within, "the first list", "web", "web-1 web-2")
	c.ForgetLeast()
	inUse := func(what string, url string) {
		t.Helper()
		c.Await(t, within, what, func(h *plugintest.Held) bool { return strings.HasPrefix(h.Detail, "watching "+url) })
	}
	inUse("the first member", urls[0])
	members[0].Kill()
	c.Await(t, within, "another member", func(h *plugintest.Held) bool {
		return strings.HasPrefix(h.Detail, "watching "+urls[1]) && strings.Contains(h.Detail, urls[0]+" cannot be used since")
	})
	testenv.Eventually(t, within, "a change at the rest", func() (string, bool) {
		_, err := members[1].Client.Put(t.Context(), key("web", "web-3"), value(3)) // they may be electing a leader
		return fmt.Sprint(err), err == nil
	})
	c.AwaitIDs(t, within, "a change at the rest", "web", "web-1 web-2 web-3")
	members[0].Restart(t)
	members[1].Pause()
	c.Await(t, within, "one that answers", func(h *plugintest.Held) bool {
		return strings.HasPrefix(h.Detail, "watching "+urls[2]) || strings.HasPrefix(h.Detail, "watching "+urls[0])
	})
	members[1].Continue()
	testenv.Eventually(t, within, "another change", func() (string, bool) {
		_, err := members[2].Client.Delete(t.Context(), key("web", "web-3"))
		return fmt.Sprint(err), err == nil
	})
	c.AwaitIDs(t, within, "another change", "web", "web-1 web-2")

	// Without a majority, a member that still answers knows nothing new.
	members[0].Kill()
	members[1].Kill()
	c.AwaitDegraded(t, within, "no majority", members[2].URL)
	members[0].Restart(t)
	c.AwaitDegraded(t, within, "a majority", "")
	wantLeast(t, c)
}

// TestCutAtEachPoint cuts the connection after more and more bytes of what the
// server sends: within its settings, the listing, the watch and what comes
// then.
func TestCutAtEachPoint(t *testing.T) {
	testenv.SkipIfShort(t)
	t.Parallel()
	server := testetcd.Start(t, testetcd.Config{Old: testenv.Compat()})
	for n := range 2 {
		server.Put(t, key("web", fmt.Sprint("web-", n+1)), value(n+1))
	}
	for n := range 20 {
		server.Put(t, key("other", fmt.Sprint("other-", n)), value(n))
	}
	proxy := testenv.NewGate(t, server.Addr)
	proxy.Open(t)
	c := follow(t, etcd.Config{Endpoints: []string{"http://" + proxy.Addr}, Timeout: short, RemoveGrace: plugin.Duration(time.Millisecond)})
	c.AwaitIDs(t, within, "the first list", "web", "web-1 web-2")
	c.ForgetLeast()
	for _, n := range []int{0, 1, 15, 40, 80, 120, 200, 400, 800, 1200, 1600, 2000, 2100, 2200, 2400, 2800, 3200} {
		var reasons int
		c.Look(func(h *plugintest.Held) { reasons = len(h.Reasons) })
		proxy.CutAfter(n)
		c.Await(t, within, fmt.Sprint("cut after ", n), func(h *plugintest.Held) bool { return len(h.Reasons) >= reasons+3 || h.Degraded != "" })
		server.Put(t, key("web", "web-3"), value(n%250))
		proxy.CutAfter(-1)
		c.AwaitIDs(t, within, fmt.Sprint("whole after ", n), "web", "web-1 web-2 web-3")
		c.AwaitDegraded(t, within, fmt.Sprint("whole after ", n), "")
		server.Delete(t, key("web", "web-3"))
		c.AwaitIDs(t, within, fmt.Sprint("whole after ", n), "web", "web-1 web-2")
	}
	c.Look(func(h *plugintest.Held) {
		if h.Least["web"] != 2 || h.Least["other"] != 20 {
			t.Errorf("meanwhile there were %d and %d instances", h.Least["web"], h.Least["other"])
		}
	})
}

// TestNoAnswer shows what a server is taken for that is none of etcd, or none
// at all.
func TestNoAnswer(t *testing.T) {
	for what, say := range map[string]string{
		"http": "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}", "garbage": strings.Repeat("\x00\xff", 100), "end": "", "settings only": "\x00\x00\x00\x04\x00\x00\x00\x00\x00",
	} {
		t.Run(what, func(t *testing.T) {
			l, err := net.Listen("tcp", "127.0.0.1:0")
			if err != nil {
				t.Fatal(err)
			}
			var running sync.WaitGroup
			running.Go(func() {
				for {
					conn, err := l.Accept()
					if err != nil {
						return
					}
					_, _ = conn.Write([]byte(say))
					if what == "settings only" { // hangs
						running.Go(func() {
							_, _ = conn.Read(make([]byte, 1<<20))
							<-t.Context().Done()
							conn.Close()
						})
						continue
					}
					conn.Close()
				}
			})
			t.Cleanup(func() {
				l.Close()
				running.Wait()
			})
			c := follow(t, etcd.Config{Endpoints: []string{"http://" + l.Addr().String()}, Timeout: plugin.Duration(time.Second)})
			c.AwaitDegraded(t, within, what, l.Addr().String())
			c.Look(func(h *plugintest.Held) {
				if h.Synced || h.Heard != 0 {
					t.Errorf("synced %t, heard %d", h.Synced, h.Heard)
				}
			})
		})
	}
}

// TestEtcdMany shows that 10,000 services of ten instances are followed within
// bounds of memory, and that a change among them is one service.
func TestEtcdMany(t *testing.T) {
	testenv.SkipIfShort(t)
	const services, each = 10_000, 10
	server := testetcd.Start(t, testetcd.Config{})
	begin := time.Now()
	for s := 0; s < services; s += 12 {
		var all []clientv3.Op // at most 128
		for n := s; n < min(s+12, services); n++ {
			for i := range each {
				all = append(all, clientv3.OpPut(key(fmt.Sprint("app-", n), fmt.Sprintf("app-%d-%d", n, i)),
					fmt.Sprintf(`{"address":"10.%d.%d.%d","port":8080,"meta":{"version":"v1"}}`, n/250, n%250, i+1)))
			}
		}
		if _, err := server.Client.Txn(t.Context()).Then(all...).Commit(); err != nil {
			t.Fatal(err)
		}
	}
	t.Logf("registered in %v", time.Since(begin).Round(time.Millisecond))
	heap := func() uint64 {
		var m runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&m)
		return m.HeapAlloc
	}
	before := heap()
	begin = time.Now()
	c := follow(t, etcd.Config{Endpoints: []string{server.URL}})
	c.Await(t, 4*within, "the first list", func(h *plugintest.Held) bool { return h.Synced && len(h.Services) == services })
	used := heap() - before
	t.Logf("listed in %v; %d MiB, of which the test's own catalog is about a half", time.Since(begin).Round(time.Millisecond), used>>20)
	if used > 400<<20 {
		t.Errorf("%d MiB are held for %d instances", used>>20, services*each)
	}
	c.Look(func(h *plugintest.Held) { h.Sets = 0 })
	begin = time.Now()
	server.Delete(t, key("app-7", "app-7-3"))
	c.Await(t, within, "a change", func(h *plugintest.Held) bool { return len(h.Instances["app-7"]) == each-1 })
	t.Logf("a change was seen after %v", time.Since(begin).Round(time.Microsecond))
	c.Look(func(h *plugintest.Held) {
		if h.Sets != 1 || h.Removes != 0 {
			t.Errorf("one change came to %d sets and %d removals", h.Sets, h.Removes)
		}
	})
	// A burst is taken as it comes.
	begin = time.Now()
	server.Delete(t, "/services/", clientv3.WithPrefix())
	c.Await(t, 4*within, "all are gone", func(h *plugintest.Held) bool { return len(h.Services) == 0 })
	t.Logf("100,000 removals in one revision were seen after %v", time.Since(begin).Round(time.Millisecond))
}

// TestConformance shows that the adapter as a plugin keeps the contract,
// against a real server.
func TestConformance(t *testing.T) {
	testenv.SkipIfShort(t)
	t.Parallel()
	server := testetcd.Start(t, testetcd.Config{Old: testenv.Compat()})
	gate := testenv.NewGate(t, server.Addr)
	gate.Open(t)
	register := func() {
		for k, v := range map[string]string{key("web", "web-1"): value(1), key("web", "web-2"): value(2), key("db_main", "db"): `{"address":"10.3.0.1","port":5432}`} {
			server.Put(t, k, v)
		}
	}
	register()
	config := json.RawMessage(fmt.Sprintf(`{"endpoints": ["http://%s"]}`, gate.Addr))
	endpoints := func(want int) func(*plugintest.World) error {
		return func(w *plugintest.World) error { return w.WantInstances("web.etcd", want) }
	}
	plugintest.Conformance(t, plugintest.Config{
		Config: config, Adapter: "etcd", Within: within,
		Changes: []plugintest.Change{
			{Name: "scaled out", MaxUpserts: 1, Want: endpoints(3), Do: func(context.Context) error { server.Put(t, key("web", "web-3"), value(3)); return nil }},
			{Name: "scaled in", Want: endpoints(2), Do: func(context.Context) error { server.Delete(t, key("web", "web-3")); return nil }},
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
					server.RestartEmpty(t)
					register()
					return nil
				},
			},
		},
		Flaps: &plugintest.Flaps{
			Config: json.RawMessage(fmt.Sprintf(`{"endpoints": ["http://%s"], "remove_grace": "6s"}`, gate.Addr)), Grace: 6 * time.Second,
			Cut:     func(context.Context) error { gate.Shut(); return nil },
			Restore: func(context.Context) error { gate.Open(t); return nil },
			Host:    "web.etcd",
			Join: func(_ context.Context, n int) error {
				server.Put(t, key("web", fmt.Sprint("web-", n)), value(n))
				return nil
			},
			Leave: func(_ context.Context, n int) error {
				server.Delete(t, key("web", fmt.Sprint("web-", n)))
				return nil
			},
		},
	})
}

// TestClients shows that what the libraries of Kratos, go-micro and etcd itself
// write is what the adapter reads, from registration to deregistration.
func TestClients(t *testing.T) {
	testenv.SkipIfShort(t)
	t.Parallel()
	server := testetcd.Start(t, testetcd.Config{Old: testenv.Compat()})
	for layout, want := range map[string]registry.Instance{
		"kratos": {
			ID: "a/1", Address: "10.0.0.1", Ports: []registry.Port{{Name: "grpc", Number: 9000, Protocol: "grpc"}},
			Meta: map[string]string{"zone": "a", "version": "v1"},
		},
		"go-micro": {
			ID: "a-1", Address: "10.0.0.1", Ports: []registry.Port{{Number: 9000}},
			Meta: map[string]string{"team": "x", "protocol": "grpc", "registry": "etcd", "version": "v1"},
		},
		"grpc": {
			ID: "1", Address: "10.0.0.1", Ports: []registry.Port{{Number: 9000, Protocol: "grpc"}},
			Meta: map[string]string{"version": "v1", "weight": "3"},
		},
	} {
		t.Run(layout, func(t *testing.T) {
			service, prefix := "shop.orders", ""
			if layout == "grpc" {
				service, prefix = "grpc/orders/a", "grpc"
			}
			name := strings.TrimPrefix(service, "grpc/")
			id := map[string]string{"grpc": "1"}[layout]
			if id == "" {
				id = "a/1"
			}
			deregister := server.RegisterWith(t, layout, service, id, "10.0.0.1:9000")
			c := follow(t, etcd.Config{Endpoints: []string{server.URL}, Layout: layout, Prefix: prefix})
			c.AwaitInstance(t, within, "registered", name, want.ID, func(i registry.Instance) bool {
				return plugin.EqualInstances([]registry.Instance{i}, []registry.Instance{want})
			})
			c.AwaitIDs(t, within, "registered", name, want.ID)
			deregister()
			c.AwaitIDs(t, within, "deregistered", name, "-")
			c.Look(func(h *plugintest.Held) {
				if len(h.Problems) != 0 || len(h.Reasons) != 0 {
					t.Errorf("problems %q, degraded %q", h.Problems, h.Reasons)
				}
			})
		})
	}
}
