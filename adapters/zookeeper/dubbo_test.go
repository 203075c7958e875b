package zookeeper_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/isthmus-mesh/isthmus/adapters/zookeeper"
	"github.com/isthmus-mesh/isthmus/internal/testenv"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testapp"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testzookeeper"
	"github.com/isthmus-mesh/isthmus/plugin/plugintest"
	"github.com/isthmus-mesh/isthmus/plugin/registry"
)

// ports returns the ports of a service's instances, as names and numbers. The
// addresses are those of the machine: Dubbo refuses to register loopback.
func ports(h *plugintest.Held, key string) string {
	var out []string
	for _, i := range h.Instances[key] {
		for _, p := range i.Ports {
			out = append(out, fmt.Sprintf("%s:%d", p.Name, p.Number))
		}
	}
	return strings.Join(out, " ")
}

// TestDubbo shows that what a real Dubbo writes is what the adapter reads:
// at both levels, at that of applications alone, and beside a consumer.
func TestDubbo(t *testing.T) {
	testenv.SkipIfShort(t)
	t.Parallel()
	server := testzookeeper.Start(t, testzookeeper.Config{})
	at := "zookeeper://" + server.Addr
	c := follow(t, zookeeper.Config{Servers: []string{server.Addr}, AcceptEmpty: true})
	c.AwaitSynced(t, within)
	one, two := [2]int{testenv.FreePort(t), testenv.FreePort(t)}, [2]int{testenv.FreePort(t), testenv.FreePort(t)}
	protocols := func(p [2]int) string { return fmt.Sprintf("dubbo:%d,tri:%d", p[0], p[1]) }
	want := func(p [2]int) string { return fmt.Sprintf("dubbo:%d tri:%d", p[0], p[1]) }
	const plain, versioned = "dubbo/" + testapp.DubboInterface, "dubbo/g1/" + testapp.DubboInterface + ":1.0.0"

	tool, applications := testapp.DubboTool()
	if !applications {
		only := fmt.Sprintf("dubbo:%d", one[0])
		provider := testapp.StartDubbo(t, tool, at, "shop", map[string]string{"protocols": only})
		c.Await(t, within, "registered", func(h *plugintest.Held) bool { return ports(h, plain) == only && len(h.Services) == 1 })
		consumer := testapp.StartDubbo(t, tool, at, "caller", nil)
		testenv.Eventually(t, within, "a call of the consumer", func() (string, bool) {
			return "", strings.Contains(consumer.Output(), "launcher: hello x from shop")
		})
		central(t, server, c, plain, one[0])
		provider.Stop()
		c.AwaitIDs(t, within, "deregistered", plain, "-")
		// Its first, incompatible way to register as an application.
		only = fmt.Sprintf("dubbo:%d", two[0])
		testapp.StartDubbo(t, tool, at+"?registry-type=service", "store", map[string]string{"protocols": only})
		c.Await(t, within, "registered as an application", func(h *plugintest.Held) bool { return ports(h, "store") == only })
		return
	}
	both := testapp.StartDubbo(t, tool, at, "shop", map[string]string{"protocols": protocols(one)})
	c.Await(t, within, "registered at both levels", func(h *plugintest.Held) bool {
		return ports(h, plain) == want(one) && ports(h, "shop") == want(one) && len(h.Services) == 2
	})
	consumer := testapp.StartDubbo(t, tool, at, "caller", nil)
	testenv.Eventually(t, within, "a call of the consumer", func() (string, bool) {
		return "", strings.Contains(consumer.Output(), "launcher: hello x from shop")
	})
	central(t, server, c, plain, one[0])
	application := testapp.StartDubbo(t, tool, at, "store", map[string]string{
		"protocols": protocols(two), "mode": "instance", "metadata": "remote", "report": at, "version": "1.0.0", "group": "g1",
	})
	c.Await(t, within, "registered as an application alone", func(h *plugintest.Held) bool {
		return ports(h, versioned) == want(two) && ports(h, "store") == want(two)
	})
	c.Look(func(h *plugintest.Held) {
		if ports(h, plain) != want(one) || len(h.Problems) != 0 || h.Services[versioned].Meta["methods"] != "greet" {
			t.Errorf("%s; methods %q", h, h.Services[versioned].Meta["methods"])
		}
	})
	application.Stop()
	c.AwaitIDs(t, within, "deregistered", versioned, "-")
	c.AwaitIDs(t, within, "deregistered", "store", "-")
	both.Stop()
	c.AwaitIDs(t, within, "deregistered", plain, "-")
	c.Look(func(h *plugintest.Held) {
		if len(h.Reasons) != 0 {
			t.Errorf("degraded %q", h.Reasons)
		}
	})
}

// central shows that a rule of the configuration center for the providers of
// the application shop is followed: its providers apply it, and register again.
func central(t *testing.T, server *testzookeeper.Server, c *plugintest.Catalog, key string, port int) {
	t.Helper()
	const at = "/dubbo/config/dubbo/shop.configurators"
	server.Put(t, at, testapp.DubboRule("shop", port))
	ruled := func(h *plugintest.Held) bool {
		all := h.Instances[key]
		return len(all) == 1 && all[0].Disabled && all[0].Weight != nil && *all[0].Weight == 3
	}
	c.Await(t, within, "a rule of the configuration center", ruled)
	server.Delete(t, at)
	c.Await(t, within, "no rule", func(h *plugintest.Held) bool {
		all := h.Instances[key]
		return len(all) == 1 && !all[0].Disabled && all[0].Weight == nil
	})
}

// TestSpring shows that what a real application of Spring Cloud writes is what
// the adapter reads, and that both see the same of another one.
func TestSpring(t *testing.T) {
	testenv.SkipIfShort(t)
	t.Parallel()
	server := testzookeeper.Start(t, testzookeeper.Config{})
	c := follow(t, zookeeper.Config{Servers: []string{server.Addr}, Hosts: []string{"applications"}, AcceptEmpty: true})
	c.AwaitSynced(t, within)
	app := testapp.StartSpringZooKeeperApp(t, server, "shop", map[string]string{"spring.cloud.zookeeper.discovery.metadata.zone": "z1"})
	status := func(what string, cond func(registry.Instance) bool) {
		t.Helper()
		c.Await(t, within, what, func(h *plugintest.Held) bool { return len(h.Instances["shop"]) == 1 && cond(h.Instances["shop"][0]) })
	}
	status("registered", func(i registry.Instance) bool {
		return i.Address == "127.0.0.1" && len(i.Ports) == 1 && i.Ports[0].Number == app.Port && i.Meta["zone"] == "z1" && i.Health == registry.HealthPassing && !i.Disabled
	})
	app.SetStatus(t, "OUT_OF_SERVICE")
	status("out of service", func(i registry.Instance) bool { return i.Disabled })
	app.SetStatus(t, "UP")
	status("up", func(i registry.Instance) bool { return !i.Disabled && i.Health == registry.HealthPassing })
	server.Put(t, "/services/web/web-1", curator(1, ""))
	c.AwaitIDs(t, within, "another one", "web", "web-1")
	testenv.Eventually(t, within, "another one, as the application sees it", func() (string, bool) {
		seen := fmt.Sprint(app.Instances(t, "web"))
		return seen, seen == "[web-1]"
	})
	app.Stop()
	c.AwaitIDs(t, within, "stopped", "shop", "-")
	c.Look(func(h *plugintest.Held) {
		if len(h.Problems) != 0 || len(h.Reasons) != 0 {
			t.Errorf("problems %q, degraded %q", h.Problems, h.Reasons)
		}
	})
}
