package nacos_test

import (
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"testing"

	"github.com/isthmus-mesh/isthmus/adapters/nacos"
	"github.com/isthmus-mesh/isthmus/internal/testenv"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testapp"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testnacos"
	"github.com/isthmus-mesh/isthmus/plugin/registry"
)

// TestDubbo shows that the services of a real Dubbo are those of its
// interfaces, with Dubbo 3 beside its application, that consumers are none, and
// that a rule of the configuration center is followed, for providers apply it
// themselves.
func TestDubbo(t *testing.T) {
	testenv.SkipIfShort(t)
	server := testnacos.Start(t, testnacos.Config{})
	c := follow(t, server, func(c *nacos.Config) { c.Dubbo, c.AcceptEmpty = true, true })
	c.awaitSynced(t)
	tool, applications := testapp.DubboTool()
	one, two := testenv.FreePort(t), testenv.FreePort(t)
	at := "nacos://" + server.Addr
	want := []registry.Port{{Name: "dubbo", Number: one, Protocol: "dubbo"}}
	properties := map[string]string{"protocols": fmt.Sprintf("dubbo:%d", one), "version": "1.0.0", "group": "g1"}
	if applications {
		want = append(want, registry.Port{Name: "tri", Number: two, Protocol: "tri"})
		properties["protocols"] += fmt.Sprintf(",tri:%d", two)
	}
	provider := testapp.StartDubbo(t, tool, at, "shop", properties)
	const key, plain = "dubbo/g1/" + testapp.DubboInterface + ":1.0.0", "dubbo/" + testapp.DubboInterface
	ports := func(all []registry.Instance) bool {
		return len(all) == 1 && slices.Equal(all[0].Ports, want)
	}
	c.awaitService(t, "the interface, with a port for each protocol", key, ports)
	if applications {
		c.awaitService(t, "the application", "public/DEFAULT_GROUP/shop", ports)
	}
	c.awaitService(t, "what Dubbo says", key, func(all []registry.Instance) bool {
		i := all[0]
		return i.Meta["application"] == "shop" && i.Meta["side"] == "provider" && i.Meta["methods"] == "" && i.Meta["path"] == "" && i.Weight == nil && i.Health == registry.HealthUnknown
	})
	c.await(t, "what Dubbo says of the service", func() bool {
		m := c.Held.Services[key].Meta
		return m["interface"] == testapp.DubboInterface && m["methods"] == "greet" && m["version"] == "1.0.0" && m["group"] == "g1"
	})
	consumer := testapp.StartDubbo(t, tool, at, "caller", map[string]string{"version": "1.0.0", "group": "g1"})
	testenv.Eventually(t, within, "a call of the consumer", func() (string, bool) {
		return "", strings.Contains(consumer.Output(), "launcher: hello x from shop")
	})

	rule := url.Values{"namespaceId": {"public"}, "groupName": {"dubbo"}, "dataId": {"shop.configurators"}, "content": {testapp.DubboRule("shop", one)}}
	server.Admin(t, http.MethodPost, "/v3/admin/cs/config", rule)
	c.awaitService(t, "a rule of the configuration center", key, func(all []registry.Instance) bool {
		return len(all) == 1 && all[0].Disabled && all[0].Weight != nil && *all[0].Weight == 3
	})
	server.Admin(t, http.MethodDelete, "/v3/admin/cs/config", rule)
	c.awaitService(t, "no rule", key, func(all []registry.Instance) bool {
		return len(all) == 1 && !all[0].Disabled && all[0].Weight == nil
	})

	// As another version of Dubbo, or another language, writes it.
	client := server.Client(t)
	other := testnacos.Up("10.1.0.1", 20880)
	other.Metadata = map[string]string{"protocol": "dubbo", "category": "providers", "path": testapp.DubboInterface, "interface": testapp.DubboInterface, "weight": "50", "application": "old"}
	client.Register(t, "public", "DEFAULT_GROUP", "providers:"+testapp.DubboInterface+"::", other)
	client.Register(t, "public", "DEFAULT_GROUP", "consumers:"+testapp.DubboInterface+"::", testnacos.Up("10.1.0.9", 1))
	c.awaitService(t, "without version and group", plain, func(all []registry.Instance) bool {
		return len(all) == 1 && all[0].ID == "10.1.0.1:20880" && all[0].Weight != nil && *all[0].Weight == 0.5
	})
	provider.Stop()
	c.awaitService(t, "deregistered", key, func(all []registry.Instance) bool { return len(all) == 0 })
	c.await(t, "nothing of consumers", func() bool {
		for key := range c.Held.Services {
			if strings.Contains(key, "consumers") || strings.Contains(key, "providers") {
				return false
			}
		}
		return true
	})
}
