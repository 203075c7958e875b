package zookeeper_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/go-zookeeper/zk"

	"github.com/isthmus-mesh/isthmus/adapters/zookeeper"
	"github.com/isthmus-mesh/isthmus/internal/testcert"
	"github.com/isthmus-mesh/isthmus/internal/testenv"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testzookeeper"
	"github.com/isthmus-mesh/isthmus/plugin"
	"github.com/isthmus-mesh/isthmus/plugin/plugintest"
)

// write writes a file with the content of others, or a text, and returns its
// path.
func write(t *testing.T, path, text string, from ...string) string {
	t.Helper()
	all := []byte(text)
	for _, f := range from {
		b, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, b...)
	}
	if err := os.WriteFile(path, all, 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// TestACL follows a server on which nodes may be read by one user alone.
func TestACL(t *testing.T) {
	testenv.SkipIfShort(t)
	t.Parallel()
	server := testzookeeper.Start(t, testzookeeper.Config{})
	server.Put(t, provider(1, ""), "")
	server.Put(t, provider(2, ""), "")
	server.Put(t, "/services/web/web-1", curator(1, ""))
	password := filepath.Join(t.TempDir(), "password")
	write(t, password, "wrong\n")
	gate := testenv.NewGate(t, server.Addr)
	gate.Open(t)
	config := zookeeper.Config{Servers: []string{gate.Addr}, Username: "isthmus", PasswordFile: password, Timeout: short, RemoveGrace: plugin.Duration(time.Millisecond)}
	c := follow(t, config)
	c.AwaitIDs(t, within, "everyone may read", greeter, ids(1, 2))
	c.AwaitSynced(t, within)
	c.ForgetLeast()

	owned := append(zk.DigestACL(zk.PermAll, "isthmus", "right"), zk.DigestACL(zk.PermAll, "owner", "x")...)
	if err := server.Client.AddAuth("digest", []byte("owner:x")); err != nil {
		t.Fatal(err)
	}
	protect := func(path string, acl []zk.ACL) {
		if _, err := server.Client.SetACL(path, acl, -1); err != nil {
			t.Fatal(err)
		}
	}
	protect("/dubbo/"+iface+"/providers", owned)
	gate.Shut()
	gate.Open(t)
	c.AwaitDegraded(t, within, "a wrong password", "read /dubbo/"+iface+"/providers: not authorized")
	protect("/services", owned)
	gate.Shut()
	gate.Open(t)
	c.AwaitDegraded(t, within, "a root that may not be read", "/services: not authorized")
	nobody := follow(t, zookeeper.Config{Servers: []string{server.Addr}})
	nobody.AwaitDegraded(t, within, "nobody", "not authorized")
	nobody.Look(func(h *plugintest.Held) {
		if h.Synced {
			t.Error("a refusal is taken for an empty registry")
		}
	})
	write(t, password, "right\n")
	c.AwaitDegraded(t, within, "the right password", "")
	server.Put(t, provider(3, ""), "")
	c.AwaitIDs(t, within, "it is followed", greeter, ids(1, 2, 3))
	wantLeast(t, c, 2)
}

// TestSASL follows a server that wants SASL.
func TestSASL(t *testing.T) {
	testenv.SkipIfShort(t)
	t.Parallel()
	server := testzookeeper.Start(t, testzookeeper.Config{Users: map[string]string{"isthmus": "right"}})
	password := filepath.Join(t.TempDir(), "password")
	write(t, password, "wrong\n")
	at := []string{server.Addr}
	c := follow(t, zookeeper.Config{Servers: at, Auth: "sasl", Username: "isthmus", PasswordFile: password, AcceptEmpty: true, Timeout: short})
	c.AwaitDegraded(t, within, "a wrong password", "check username and password_file")
	nobody := follow(t, zookeeper.Config{Servers: at, AcceptEmpty: true, Timeout: short})
	nobody.AwaitDegraded(t, within, "nobody", "set auth to sasl")
	write(t, password, "right\n")
	c.AwaitSynced(t, within)
	c.AwaitDegraded(t, within, "the right password", "")
	nobody.Look(func(h *plugintest.Held) {
		if h.Synced {
			t.Error("a refusal is taken for an empty registry")
		}
	})
}

// TestTLS follows a server that wants a client certificate.
func TestTLS(t *testing.T) {
	testenv.SkipIfShort(t)
	t.Parallel()
	dir := t.TempDir()
	theirs, ours, strange := testcert.New(t, "localhost"), testcert.New(t, "isthmus"), testcert.New(t, "strange")
	server := testzookeeper.Start(t, testzookeeper.Config{
		KeyStore:   write(t, filepath.Join(dir, "server.pem"), "", theirs.Key, theirs.Cert),
		TrustStore: write(t, filepath.Join(dir, "clients.pem"), "", ours.Cert),
	})
	_, port, err := net.SplitHostPort(server.Addr)
	if err != nil {
		t.Fatal(err)
	}
	config := zookeeper.Config{Servers: []string{"localhost:" + port}, AcceptEmpty: true, Timeout: short}
	plain := follow(t, config)
	config.TLS.Enabled, config.TLS.CAFile = true, theirs.Cert
	without := follow(t, config)
	config.TLS.CertFile, config.TLS.KeyFile = write(t, filepath.Join(dir, "client.pem"), "", strange.Cert), write(t, filepath.Join(dir, "client.key"), "", strange.Key)
	c := follow(t, config)
	config.TLS.CAFile = strange.Cert
	other := follow(t, config)
	other.AwaitDegraded(t, within, "a server that is not to be trusted", "unknown authority")
	for what, catalog := range map[string]*plugintest.Catalog{"no TLS": plain, "no client certificate": without, "a strange client certificate": c} {
		catalog.Await(t, within, what, func(h *plugintest.Held) bool { return h.Degraded != "" && !h.Synced })
	}
	write(t, filepath.Join(dir, "client.key"), "", ours.Key)
	write(t, filepath.Join(dir, "client.pem"), "", ours.Cert)
	c.AwaitSynced(t, within)
	c.AwaitDegraded(t, within, "the right certificate", "")
}

// TestOld follows a server that has no persistent watches.
func TestOld(t *testing.T) {
	testenv.SkipIfShort(t)
	t.Parallel()
	server := testzookeeper.Start(t, testzookeeper.Config{Old: true})
	c := follow(t, zookeeper.Config{Servers: []string{server.Addr}, AcceptEmpty: true})
	c.AwaitSynced(t, within)
	server.Put(t, provider(1, ""), "")
	c.AwaitIDs(t, within, "the first path", greeter, ids(1))
	server.Put(t, provider(2, ""), "")
	c.AwaitIDs(t, within, "a provider", greeter, ids(1, 2))
	server.Put(t, "/services/web/web-1", curator(1, ""))
	c.AwaitIDs(t, within, "an application", "web", "web-1")
	server.Put(t, "/services/web/web-1", curator(1, `"instance_status":"OUT_OF_SERVICE"`))
	c.Await(t, within, "other data", func(h *plugintest.Held) bool { return len(h.Instances["web"]) == 1 && h.Instances["web"][0].Disabled })
	server.Delete(t, "/services/web/web-1")
	c.AwaitIDs(t, within, "it is gone", "web", "-")
	server.Put(t, "/dubbo/mapping/org.example.Waver", "shop3")
	server.Put(t, "/services/shop3/10.3.0.2:20880", dubboApp(2, "r2", "remote"))
	c.AwaitIDs(t, within, "metadata not there yet", "dubbo/org.example.Waver", "10.3.0.2:20880")
	server.Put(t, "/dubbo/metadata/shop3/r2", `{"services":{"org.example.Waver:1:tri":{"name":"org.example.Waver","version":"1","protocol":"tri"}}}`)
	c.AwaitIDs(t, within, "metadata", "dubbo/org.example.Waver:1", "10.3.0.2:50051")
	server.Kill()
	c.AwaitDegraded(t, within, "killed", "connection refused")
	server.Restart(t)
	c.AwaitDegraded(t, within, "it is back", "")
	server.Delete(t, provider(2, ""))
	c.AwaitIDs(t, within, "it goes on", greeter, ids(1))
	c.Look(func(h *plugintest.Held) {
		if h.Least[greeter] != 1 {
			t.Errorf("there were %d instances meanwhile", h.Least[greeter])
		}
	})
}

// TestSeveralServers shows that the next server is used while one is away.
func TestSeveralServers(t *testing.T) {
	testenv.SkipIfShort(t)
	t.Parallel()
	server := testzookeeper.Start(t, testzookeeper.Config{})
	server.Put(t, provider(1, ""), "")
	one, two := testenv.NewGate(t, server.Addr), testenv.NewGate(t, server.Addr)
	one.Open(t)
	two.Open(t)
	c := follow(t, zookeeper.Config{Servers: []string{one.Addr, two.Addr}})
	c.AwaitIDs(t, within, "the first list", greeter, ids(1))
	one.Shut()
	c.Await(t, within, "the other server", func(h *plugintest.Held) bool {
		return strings.HasPrefix(h.Detail, "watching "+two.Addr) && h.Degraded == ""
	})
	server.Put(t, provider(2, ""), "")
	c.AwaitIDs(t, within, "it is followed", greeter, ids(1, 2))
}

// TestEnsemble follows three servers of one ZooKeeper, of which the leader is
// killed, and then another one, so that there is no majority.
func TestEnsemble(t *testing.T) {
	testenv.SkipIfShort(t)
	testenv.Wide(t)
	t.Parallel()
	servers := testzookeeper.StartEnsemble(t, 3)
	servers[1].Put(t, provider(1, ""), "")
	servers[1].Put(t, "/services/web/web-1", curator(1, ""))
	var at []string
	for _, s := range servers {
		at = append(at, s.Addr)
	}
	c := follow(t, zookeeper.Config{Servers: at, Timeout: short, RemoveGrace: plugin.Duration(time.Millisecond)})
	c.AwaitIDs(t, within, "the first list", greeter, ids(1))
	c.AwaitIDs(t, within, "the first list", "web", "web-1")
	c.Await(t, within, "the leader", func(h *plugintest.Held) bool { return strings.HasPrefix(h.Detail, "watching "+at[0]) })
	c.ForgetLeast()
	servers[0].Kill()
	c.Await(t, within, "another server", func(h *plugintest.Held) bool {
		return h.Degraded == "" && (strings.HasPrefix(h.Detail, "watching "+at[1]) || strings.HasPrefix(h.Detail, "watching "+at[2]))
	})
	servers[1].Put(t, provider(2, ""), "")
	c.AwaitIDs(t, within, "it is followed", greeter, ids(1, 2))

	// Without a majority, a server that is left closes its connections.
	servers[2].Kill()
	c.AwaitDegraded(t, within, "no majority", at[1])
	servers[0].Restart(t)
	c.AwaitDegraded(t, within, "a majority", "")
	servers[1].Put(t, provider(3, ""), "")
	c.AwaitIDs(t, within, "it is followed", greeter, ids(1, 2, 3))
	c.Look(func(h *plugintest.Held) {
		if h.Least[greeter] != 1 || h.Least["web"] != 1 {
			t.Errorf("meanwhile there were %d and %d instances", h.Least[greeter], h.Least["web"])
		}
	})
}

// TestCutAtEachPoint cuts the connection after more and more bytes of what the
// server sends: within the first answer, the watches, the listing and what
// comes then.
func TestCutAtEachPoint(t *testing.T) {
	testenv.SkipIfShort(t)
	t.Parallel()
	server := testzookeeper.Start(t, testzookeeper.Config{})
	for n := range 5 {
		server.Put(t, provider(n, ""), "")
		server.Put(t, fmt.Sprint("/services/web/web-", n), curator(n, ""))
	}
	proxy := testenv.NewGate(t, server.Addr)
	proxy.Open(t)
	c := follow(t, zookeeper.Config{Servers: []string{proxy.Addr}, Timeout: short, RemoveGrace: plugin.Duration(time.Millisecond)})
	c.AwaitIDs(t, within, "the first list", greeter, ids(0, 1, 2, 3, 4))
	c.AwaitSynced(t, within)
	c.ForgetLeast()
	for n := 0; n < 3600; n = n*4/3 + 7 {
		var reasons int
		c.Look(func(h *plugintest.Held) { reasons = len(h.Reasons) })
		proxy.CutAfter(n)
		c.Await(t, within, fmt.Sprint("cut after ", n), func(h *plugintest.Held) bool { return len(h.Reasons) >= reasons+3 || h.Degraded != "" })
		proxy.CutAfter(-1)
		server.Put(t, provider(9, ""), "")
		c.AwaitIDs(t, within, fmt.Sprint("whole after ", n), greeter, ids(0, 1, 2, 3, 4, 9))
		c.AwaitDegraded(t, within, fmt.Sprint("whole after ", n), "")
		server.Delete(t, provider(9, ""))
		c.AwaitIDs(t, within, fmt.Sprint("whole after ", n), greeter, ids(0, 1, 2, 3, 4))
	}
	c.Look(func(h *plugintest.Held) {
		if h.Least[greeter] != 5 || h.Least["web"] != 5 {
			t.Errorf("meanwhile there were %d and %d instances", h.Least[greeter], h.Least["web"])
		}
	})
}

// TestConformance shows that the adapter as a plugin keeps the contract,
// against a real server.
func TestConformance(t *testing.T) {
	testenv.SkipIfShort(t)
	t.Parallel()
	server := testzookeeper.Start(t, testzookeeper.Config{})
	gate := testenv.NewGate(t, server.Addr)
	gate.Open(t)
	register := func() {
		server.Put(t, provider(1, ""), "")
		server.Put(t, provider(2, ""), "")
		server.Put(t, "/services/web/web-1", curator(1, ""))
	}
	register()
	config := func(grace string) json.RawMessage {
		return json.RawMessage(fmt.Sprintf(`{"servers": [%q], "timeout": "4s", "remove_grace": %q}`, gate.Addr, grace))
	}
	endpoints := func(want int) func(*plugintest.World) error {
		return func(w *plugintest.World) error {
			return errors.Join(w.WantInstances("org.example.greeter.dubbo", want), w.WantInstances("web.zookeeper", 1))
		}
	}
	plugintest.Conformance(t, plugintest.Config{
		Config: config("1m"), Adapter: "zookeeper", Within: within,
		Changes: []plugintest.Change{
			{Name: "scaled out", MaxUpserts: 1, Want: endpoints(3), Do: func(context.Context) error { server.Put(t, provider(3, ""), ""); return nil }},
			{Name: "scaled in", Want: endpoints(2), Do: func(context.Context) error { server.Delete(t, provider(3, "")); return nil }},
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
			Config: config("6s"), Grace: 6 * time.Second,
			Cut:     func(context.Context) error { gate.Shut(); return nil },
			Restore: func(context.Context) error { gate.Open(t); return nil },
			Host:    "org.example.greeter.dubbo",
			Join:    func(_ context.Context, n int) error { server.Put(t, provider(n, ""), ""); return nil },
			Leave:   func(_ context.Context, n int) error { server.Delete(t, provider(n, "")); return nil },
		},
	})
}

// TestZooKeeperMany shows that 10,000 interfaces of ten providers are followed
// within bounds of memory and of watches, and that a change among them is one
// service. For make compat these are applications of ten instances, each of
// which is a read of its own.
func TestZooKeeperMany(t *testing.T) {
	testenv.SkipIfShort(t)
	const services, each = 10_000, 10
	path := func(s, i int) string {
		name := fmt.Sprint("org.example.App", s)
		return "/dubbo/" + name + "/providers/" + url.QueryEscape(fmt.Sprintf("dubbo://10.%d.%d.%d:20880/%s?application=app-%d&interface=%s&methods=greet&side=provider&timestamp=1", s/250, s%250, i+1, name, s, name))
	}
	of, gone, changed := func(s int) map[string]string {
		nodes := map[string]string{fmt.Sprintf("/dubbo/org.example.App%d/configurators", s): ""}
		for i := range each {
			nodes[path(s, i)] = ""
		}
		return nodes
	}, path(7, 3), "dubbo/org.example.App7"
	if testenv.Compat() {
		of = func(s int) map[string]string {
			nodes := map[string]string{}
			for i := range each {
				nodes[fmt.Sprintf("/services/app-%d/app-%d-%d", s, s, i)] = curator(i, "")
			}
			return nodes
		}
		gone, changed = "/services/app-7/app-7-3", "app-7"
	}
	server := testzookeeper.Start(t, testzookeeper.Config{})
	begin := time.Now()
	server.Load(t, services, of)
	t.Logf("registered in %v", time.Since(begin).Round(time.Millisecond))
	heap := func() uint64 {
		var m runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&m)
		return m.HeapAlloc
	}
	before := heap()
	begin = time.Now()
	c := follow(t, zookeeper.Config{Servers: []string{server.Addr}})
	c.Await(t, 4*within, "the first list", func(h *plugintest.Held) bool { return h.Synced && len(h.Services) == services })
	used := heap() - before
	t.Logf("listed in %v; %d MiB, of which the test's own catalog is about a half", time.Since(begin).Round(time.Millisecond), used>>20)
	if used > 600<<20 {
		t.Errorf("%d MiB are held for %d instances", used>>20, services*each)
	}
	if n := server.Metric(t, "zk_watch_count"); n != "2" {
		t.Errorf("%s watches, want 2", n)
	}
	c.Look(func(h *plugintest.Held) { h.Sets = 0 })
	begin = time.Now()
	server.Delete(t, gone)
	c.Await(t, within, "a change", func(h *plugintest.Held) bool { return len(h.Instances[changed]) == each-1 })
	t.Logf("a change was seen after %v", time.Since(begin).Round(time.Microsecond))
	c.Look(func(h *plugintest.Held) {
		if h.Sets != 1 || h.Removes != 0 {
			t.Errorf("one change came to %d sets and %d removals", h.Sets, h.Removes)
		}
	})
}
