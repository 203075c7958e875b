package zookeeper_test

import (
	"fmt"
	"net"
	"net/url"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/isthmus-mesh/isthmus/adapters/zookeeper"
	"github.com/isthmus-mesh/isthmus/internal/testenv"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testzookeeper"
	"github.com/isthmus-mesh/isthmus/plugin"
	"github.com/isthmus-mesh/isthmus/plugin/plugintest"
	"github.com/isthmus-mesh/isthmus/plugin/registry"
)

// within is how long a change may take on a busy machine.
const within = testenv.Patience

// short is a time-out that a server on a busy machine meets.
const short = plugin.Duration(5 * time.Second)

// follow runs an adapter until the test ends.
func follow(t *testing.T, c zookeeper.Config) *plugintest.Catalog {
	t.Helper()
	catalog, stop := start(t, c)
	t.Cleanup(stop)
	return catalog
}

// start runs an adapter until stop is called for the first time.
func start(t *testing.T, c zookeeper.Config) (_ *plugintest.Catalog, stop func()) {
	t.Helper()
	c.MinShare = zookeeper.DefaultConfig.MinShare
	if c.RemoveGrace == 0 {
		c.RemoveGrace = zookeeper.DefaultConfig.RemoveGrace
	}
	a, err := zookeeper.New(c, plugin.Env{})
	if err != nil {
		t.Fatal(err)
	}
	return plugintest.Start(t, a)
}

const iface = "org.example.Greeter"

// greeter is the key of iface in a catalog.
const greeter = "dubbo/" + iface

// provider is the path of a provider of iface.
func provider(n int, params string) string {
	return "/dubbo/" + iface + "/providers/" + url.QueryEscape(fmt.Sprintf("dubbo://10.1.0.%d:20880/%s?application=shop&interface=%s&methods=greet&side=provider&timestamp=%d%s", n, iface, iface, 1000+n, params))
}

// ids are the IDs of providers.
func ids(all ...int) string {
	var out []string
	for _, n := range all {
		out = append(out, fmt.Sprintf("10.1.0.%d:20880", n))
	}
	return strings.Join(out, " ")
}

// curator is the data of an instance of Curator's service discovery.
func curator(n int, metadata string) string {
	return fmt.Sprintf(`{"name":"web","id":"web-%d","address":"10.2.0.%d","port":8080,"sslPort":null,"payload":{"@class":"org.springframework.cloud.zookeeper.discovery.ZookeeperInstance","id":"web","name":"web","metadata":{%s}},"registrationTimeUTC":1,"serviceType":"DYNAMIC","uriSpec":null}`, n, n, metadata)
}

// dubboApp is the data of an instance of a Dubbo application.
func dubboApp(n int, revision, storage string) string {
	return fmt.Sprintf(`{"name":"shop3","id":"10.3.0.%d:20880","address":"10.3.0.%d","port":20880,"payload":{"@class":"org.apache.dubbo.registry.zookeeper.ZookeeperInstance","metadata":{"dubbo.endpoints":"[{\"port\":20880,\"protocol\":\"dubbo\"},{\"port\":50051,\"protocol\":\"tri\"}]","dubbo.metadata.revision":%q,"dubbo.metadata.storage-type":%q,"timestamp":"1"}}}`, n, n, revision, storage)
}

// wantLeast checks that iface never had less than so many instances since the
// first list or ForgetLeast.
func wantLeast(t *testing.T, c *plugintest.Catalog, n int) {
	t.Helper()
	c.Look(func(h *plugintest.Held) {
		if h.Least[greeter] != n {
			t.Errorf("there were %d instances meanwhile, want %d", h.Least[greeter], n)
		}
	})
}

// TestZooKeeper follows a real server through what happens to nodes, to
// sessions, to the connection and to the server itself.
func TestZooKeeper(t *testing.T) {
	testenv.SkipIfShort(t)
	t.Parallel()
	server := testzookeeper.Start(t, testzookeeper.Config{})
	config := zookeeper.Config{Servers: []string{server.Addr}}
	server.Put(t, provider(1, ""), "")
	server.Put(t, provider(2, ""), "")
	server.Put(t, "/services/web/web-1", curator(1, `"instance_status":"UP","zone":"z1"`))
	server.Put(t, "/servicesnot/web/web-9", curator(9, ""))

	t.Run("interfaces", func(t *testing.T) {
		c, stop := start(t, config)
		defer stop()
		c.AwaitSynced(t, within)
		c.AwaitIDs(t, within, "the first list", greeter, ids(1, 2))
		c.AwaitInstance(t, within, "all fields", greeter, ids(1), func(i registry.Instance) bool {
			return fmt.Sprintf("%+v", i) == fmt.Sprintf("%+v", registry.Instance{
				ID: ids(1), Address: "10.1.0.1", Ports: []registry.Port{{Name: "dubbo", Number: 20880, Protocol: "dubbo"}},
				Meta: map[string]string{"application": "shop", "side": "provider", "timestamp": "1001"},
			})
		})
		server.Put(t, provider(3, "&weight=200"), "")
		c.AwaitInstance(t, within, "scaled out", greeter, ids(3), func(i registry.Instance) bool { return i.Weight != nil && *i.Weight == 2 })
		rule := "/dubbo/" + iface + "/configurators/" + url.QueryEscape("override://10.1.0.3/"+iface+"?category=configurators&dynamic=false&enabled=true&weight=50&disabled=true")
		server.Put(t, rule, "")
		c.AwaitInstance(t, within, "an operator's rule", greeter, ids(3), func(i registry.Instance) bool { return i.Disabled && *i.Weight == 0.5 })
		server.Delete(t, rule)
		c.AwaitInstance(t, within, "no rule", greeter, ids(3), func(i registry.Instance) bool { return !i.Disabled && *i.Weight == 2 })
		server.Put(t, "/dubbo/"+iface+"/providers/nonsense", "")
		c.Await(t, within, "a provider that cannot be read", func(h *plugintest.Held) bool {
			return strings.Contains(h.Problems["interface "+iface], `"nonsense"`)
		})
		server.Delete(t, "/dubbo/"+iface+"/providers/nonsense")
		c.Await(t, within, "it is gone", func(h *plugintest.Held) bool { return len(h.Problems) == 0 })
		server.Delete(t, provider(3, "&weight=200"))
		c.AwaitIDs(t, within, "scaled in", greeter, ids(1, 2))

		triple := "/dubbo/" + iface + "/providers/" + url.QueryEscape("tri://10.1.0.1:50051/"+iface+"?application=shop&interface="+iface+"&methods=greet,wave")
		server.Put(t, triple, "")
		c.AwaitInstance(t, within, "a second protocol", greeter, ids(1), func(i registry.Instance) bool { return len(i.Ports) == 2 && i.Ports[1].Name == "tri" })
		c.Look(func(h *plugintest.Held) {
			if m := h.Services[greeter].Meta["methods"]; m != "greet,wave" {
				t.Errorf("methods %q", m)
			}
		})
		server.Delete(t, triple)
		other := "/dubbo/org.example.Other/providers/" + url.QueryEscape("dubbo://10.4.0.1:20880/org.example.Other?group=g&version=1.0.0")
		server.Put(t, other, "")
		c.AwaitIDs(t, within, "a new interface", "dubbo/g/org.example.Other:1.0.0", "10.4.0.1:20880")
		server.Delete(t, other)
		c.AwaitIDs(t, within, "without a provider", "dubbo/g/org.example.Other:1.0.0", "-")
		server.Put(t, other, "")
		c.AwaitIDs(t, within, "again", "dubbo/g/org.example.Other:1.0.0", "10.4.0.1:20880")
		server.Delete(t, other)
		server.Delete(t, "/dubbo/org.example.Other/providers")
		server.Delete(t, "/dubbo/org.example.Other")
		c.AwaitIDs(t, within, "the interface is gone", "dubbo/g/org.example.Other:1.0.0", "-")
		wantLeast(t, c, 2)

		var heard int
		c.Look(func(h *plugintest.Held) {
			heard = h.Heard
			if len(h.Reasons) != 0 || h.Detail != "watching "+server.Addr {
				t.Errorf("degraded %q, detail %q", h.Reasons, h.Detail)
			}
		})
		c.Await(t, within, "a quiet registry", func(h *plugintest.Held) bool { return h.Heard > heard })
		if n := server.Metric(t, "zk_watch_count"); n != "2" {
			t.Errorf("%s watches, want 2", n)
		}
		before := server.Metric(t, "zk_global_sessions")
		stop()
		testenv.Eventually(t, within, "no session and no watch left", func() (string, bool) {
			now, watches := server.Metric(t, "zk_global_sessions"), server.Metric(t, "zk_watch_count")
			return now + " sessions, before " + before + ", watches " + watches, now != before && watches == "0"
		})
	})

	t.Run("applications", func(t *testing.T) {
		c := follow(t, config)
		c.AwaitIDs(t, within, "the first list", "web", "web-1")
		c.AwaitInstance(t, within, "all fields", "web", "web-1", func(i registry.Instance) bool {
			return fmt.Sprintf("%+v", i) == fmt.Sprintf("%+v", registry.Instance{
				ID: "web-1", Address: "10.2.0.1", Ports: []registry.Port{{Number: 8080}}, Meta: map[string]string{"zone": "z1"}, Health: registry.HealthPassing,
			})
		})
		server.Put(t, "/services/web/web-1", curator(1, `"instance_status":"OUT_OF_SERVICE"`))
		c.AwaitInstance(t, within, "out of service", "web", "web-1", func(i registry.Instance) bool { return i.Disabled })
		server.Put(t, "/services/web/web-1", `{"address":`)
		c.Await(t, within, "data that cannot be read", func(h *plugintest.Held) bool {
			return strings.Contains(h.Problems["application web"], `"web-1"`) && h.IDs("web") == "web-1"
		})
		server.Put(t, "/services/web/web-1", curator(1, `"instance_status":"UP"`))
		c.Await(t, within, "it is mended", func(h *plugintest.Held) bool { return len(h.Problems) == 0 })
		server.Put(t, "/services/web/web-2", curator(2, ""))
		c.AwaitIDs(t, within, "scaled out", "web", "web-1 web-2")
		server.Delete(t, "/services/web/web-2")
		c.AwaitIDs(t, within, "scaled in", "web", "web-1")
		server.Put(t, "/services/late/late-1", curator(3, ""))
		c.AwaitIDs(t, within, "a new application", "late", "late-1")
		server.Delete(t, "/services/late/late-1")
		server.Delete(t, "/services/late")
		c.AwaitIDs(t, within, "it is gone", "late", "-")
	})

	t.Run("application level of Dubbo", func(t *testing.T) {
		const wave, waver = "org.example.Waver", "dubbo/org.example.Waver"
		c := follow(t, config)
		only := follow(t, zookeeper.Config{Servers: []string{server.Addr}, Hosts: []string{"interfaces"}})
		for _, c := range []*plugintest.Catalog{c, only} {
			c.AwaitSynced(t, within)
		}
		server.Put(t, "/dubbo/mapping/"+wave, "shop3")
		server.Put(t, "/services/shop3/10.3.0.1:20880", dubboApp(1, "r0", "local"))
		for _, c := range []*plugintest.Catalog{c, only} {
			c.AwaitInstance(t, within, "metadata that the registry does not have", waver, "10.3.0.1:20880", func(i registry.Instance) bool {
				return len(i.Ports) == 2 && i.Ports[0].Name == "dubbo" && i.Ports[1].Name == "tri" && i.Ports[1].Number == 50051
			})
		}
		c.AwaitIDs(t, within, "the application", "shop3", "10.3.0.1:20880")
		only.AwaitIDs(t, within, "interfaces only", "shop3", "-")
		only.AwaitIDs(t, within, "interfaces only", "web", "-")

		metadata := func(iface string) string {
			return fmt.Sprintf(`{"app":"shop3","revision":"r1","services":{"g/%s:2.0.0:tri":{"name":%q,"group":"g","version":"2.0.0","protocol":"tri","port":1,"params":{"methods":"wave","group":"g","version":"2.0.0"}}}}`, iface, iface)
		}
		server.Put(t, "/dubbo/metadata/shop3/r1", metadata(wave))
		server.Put(t, "/services/shop3/10.3.0.1:20880", dubboApp(1, "r1", "remote"))
		c.AwaitInstance(t, within, "with metadata", "dubbo/g/"+wave+":2.0.0", "10.3.0.1:50051", func(i registry.Instance) bool {
			return len(i.Ports) == 1 && i.Ports[0].Name == "tri" && i.Meta["application"] == "shop3"
		})
		c.AwaitIDs(t, within, "with metadata", waver, "-")
		// The revision's node may come after the instance's.
		server.Put(t, "/services/shop3/10.3.0.2:20880", dubboApp(2, "r2", "remote"))
		c.AwaitIDs(t, within, "metadata not there yet", waver, "10.3.0.2:20880")
		server.Put(t, "/dubbo/metadata/shop3/r2", metadata("org.example.Else"))
		c.AwaitIDs(t, within, "it does not offer it", waver, "-")
		c.AwaitIDs(t, within, "it does not offer it", "shop3", "10.3.0.1:20880 10.3.0.2:20880")

		// Registered at both levels, as Dubbo 3 does by itself.
		server.Put(t, "/dubbo/"+wave+"/providers/"+url.QueryEscape("tri://10.3.0.1:50051/"+wave+"?application=shop3&group=g&version=2.0.0&pid=7"), "")
		c.AwaitInstance(t, within, "at both levels", "dubbo/g/"+wave+":2.0.0", "10.3.0.1:50051", func(i registry.Instance) bool { return i.Meta["pid"] == "7" })
		server.Put(t, "/dubbo/mapping/"+wave, "another")
		server.Delete(t, "/services/shop3/10.3.0.1:20880")
		server.Delete(t, "/services/shop3/10.3.0.2:20880")
		c.AwaitIDs(t, within, "gone", "shop3", "-")
	})

	t.Run("selected", func(t *testing.T) {
		for _, c := range []struct {
			config zookeeper.Config
			want   map[string]string
		}{
			{zookeeper.Config{Services: plugin.Selection{Exclude: plugin.Globs{"org.example.*"}}}, map[string]string{"web": "web-1"}},
			{zookeeper.Config{Hosts: []string{"applications"}}, map[string]string{"web": "web-1"}},
			{zookeeper.Config{Chroot: "/services", Apps: "/web", AcceptEmpty: true}, map[string]string{}},
		} {
			c.config.Servers = config.Servers
			catalog := follow(t, c.config)
			catalog.AwaitSynced(t, within)
			catalog.WantIDs(t, fmt.Sprintf("%+v", c.config), c.want)
		}
	})

	t.Run("a provider's session", func(t *testing.T) {
		c := follow(t, config)
		c.AwaitIDs(t, within, "the first list", greeter, ids(1, 2))
		session := server.Connect(t)
		server.PutEphemeral(t, session, provider(7, ""), "")
		c.AwaitIDs(t, within, "registered", greeter, ids(1, 2, 7))
		session.Close()
		c.AwaitIDs(t, within, "its session is over", greeter, ids(1, 2))
	})

	t.Run("cut and frozen", func(t *testing.T) {
		gate := testenv.NewGate(t, server.Addr)
		gate.Open(t)
		c := follow(t, zookeeper.Config{Servers: []string{gate.Addr}, Timeout: short})
		c.AwaitIDs(t, within, "the first list", greeter, ids(1, 2))
		c.ForgetLeast()
		gate.Shut()
		c.AwaitDegraded(t, within, "cut off", "connection refused")
		server.Put(t, provider(5, ""), "")
		server.Delete(t, provider(1, ""))
		gate.Open(t)
		c.AwaitIDs(t, within, "no more cut off", greeter, ids(1, 2, 5))
		c.AwaitDegraded(t, within, "what is missing is kept", "remove_grace")
		server.Put(t, provider(1, ""), "")
		c.AwaitDegraded(t, within, "it is back", "")
		server.Delete(t, provider(5, ""))
		c.AwaitIDs(t, within, "removed once it was listed", greeter, ids(1, 2))
		server.Pause()
		c.AwaitDegraded(t, within, "frozen", "nothing was heard")
		server.Continue()
		c.AwaitDegraded(t, within, "no more frozen", "")
		wantLeast(t, c, 2)
	})

	t.Run("restarted with data", func(t *testing.T) {
		c := follow(t, zookeeper.Config{Servers: []string{server.Addr}, RemoveGrace: plugin.Duration(time.Second)})
		c.AwaitIDs(t, within, "the first list", greeter, ids(1, 2))
		c.ForgetLeast()
		server.Kill()
		c.AwaitDegraded(t, within, "killed", "connection refused")
		server.Restart(t)
		c.AwaitDegraded(t, within, "it is back", "")
		server.Put(t, provider(3, ""), "")
		c.AwaitIDs(t, within, "it goes on", greeter, ids(1, 2, 3))
		server.Delete(t, provider(3, ""))
		c.AwaitIDs(t, within, "it goes on", greeter, ids(1, 2))
		wantLeast(t, c, 2)
	})

	t.Run("restarted without data", func(t *testing.T) {
		c := follow(t, zookeeper.Config{Servers: []string{server.Addr}, RemoveGrace: plugin.Duration(5 * time.Second)})
		c.AwaitIDs(t, within, "the first list", greeter, ids(1, 2))
		c.ForgetLeast()
		server.Kill()
		c.AwaitDegraded(t, within, "killed", "connection refused")
		server.RestartEmpty(t)
		c.AwaitDegraded(t, within, "empty", "no instance at all")
		wantLeast(t, c, 2)
		server.Put(t, provider(1, ""), "")
		c.Await(t, within, "half of it is back", hadReason("remove_grace", "transaction id went back from"))
		c.AwaitIDs(t, within, "the time is over", greeter, ids(1))
		c.AwaitIDs(t, within, "the time is over", "web", "-")
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
	server := testzookeeper.Start(t, testzookeeper.Config{})
	at := []string{server.Addr}
	follow(t, zookeeper.Config{Servers: at, AcceptEmpty: true, RemoveGrace: plugin.Duration(time.Hour)}).AwaitSynced(t, within)
	c := follow(t, zookeeper.Config{Servers: at, RemoveGrace: plugin.Duration(time.Second)})
	c.Await(t, within, "empty", hadReason("no instance at all"))
	c.AwaitSynced(t, within)
	c.AwaitDegraded(t, within, "believed", "")
	c = follow(t, zookeeper.Config{Servers: at, RemoveGrace: plugin.Duration(time.Hour)})
	c.AwaitDegraded(t, within, "empty", "no instance at all")
	c.Look(func(h *plugintest.Held) {
		if h.Synced {
			t.Error("an empty registry is believed at once")
		}
	})
	server.Put(t, provider(1, ""), "")
	c.AwaitSynced(t, within)
	c.AwaitIDs(t, within, "the first instance", greeter, ids(1))
	c.AwaitDegraded(t, within, "the first instance", "")
	server.Delete(t, provider(1, ""))
	c.AwaitIDs(t, within, "a removal that is watched", greeter, "-")
}

// TestNoAnswer shows what a server is taken for that is none of ZooKeeper, or
// none at all.
func TestNoAnswer(t *testing.T) {
	connected := "\x00\x00\x00\x25\x00\x00\x00\x00\x00\x00\x27\x10\x00\x00\x00\x00\x00\x00\x00\x01\x00\x00\x00\x10" + strings.Repeat("x", 16) + "\x00"
	for what, c := range map[string]struct{ say, want string }{
		"http":            {"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}", "none of ZooKeeper"},
		"garbage":         {strings.Repeat("\x00\xff", 100), "none of ZooKeeper"},
		"end":             {"", "closed the connection"},
		"hangs":           {"\x00\x00", "no answer within"},
		"refused":         {"\x00\x00\x00\x25" + strings.Repeat("\x00", 37), "refused the session"},
		"short message":   {connected + "\x00\x00\x00\x04\xff\xff\xff\xff", "none of ZooKeeper"},
		"long message":    {connected + "\x7f\xff\xff\xff", "none of ZooKeeper"},
		"broken event":    {connected + "\x00\x00\x00\x11\xff\xff\xff\xff" + strings.Repeat("\x00", 13), "none of ZooKeeper"},
		"connected, then": {connected, "nothing was heard"},
	} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
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
					running.Go(func() {
						defer conn.Close()
						buf := make([]byte, 1<<10)
						_, _ = conn.Read(buf)
						_, _ = conn.Write([]byte(c.say))
						if what == "end" {
							return
						}
						for err == nil {
							_, err = conn.Read(buf) // to the end
						}
					})
				}
			})
			t.Cleanup(func() {
				l.Close()
				running.Wait()
			})
			catalog, stop := start(t, zookeeper.Config{Servers: []string{l.Addr().String()}, Timeout: plugin.Duration(time.Second)})
			defer stop()
			catalog.AwaitDegraded(t, within, what, c.want)
			catalog.Look(func(h *plugintest.Held) {
				if h.Synced || !strings.Contains(h.Degraded, l.Addr().String()) {
					t.Errorf("synced %t, degraded %q", h.Synced, h.Degraded)
				}
			})
		})
	}
}
