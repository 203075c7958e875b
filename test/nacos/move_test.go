package nacos

import (
	"fmt"
	"testing"

	"github.com/isthmus-mesh/isthmus/internal/testenv"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testconsul"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testisthmus"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testistiod"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testnacos"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testproxy"
)

// A service moves from Consul to Nacos by weights, from 100/0 to 0/100, under
// calls of a proxyless gRPC client, none of which fails.
func TestMoveFromConsul(t *testing.T) {
	testenv.SkipIfShort(t)
	t.Parallel()
	consul := testconsul.Start(t, testconsul.Config{})
	server := testnacos.Start(t, testnacos.Config{Version: testnacos.V3})
	var there []testproxy.Backend
	for _, id := range []string{"consul-1", "consul-2"} {
		b := testproxy.StartGRPCBackend(t, id)
		there = append(there, b)
		consul.Register(t, testconsul.Instance{Service: "echo", ID: id, Address: b.Address, Port: b.Port, Tags: []string{"grpc"}})
	}
	app := server.Client(t)
	app.Register(t, "public", "DEFAULT_GROUP", "echo", up(testproxy.StartGRPCBackend(t, "nacos-1")), up(testproxy.StartGRPCBackend(t, "nacos-2")))
	const host = "echo.example.org"
	weights := func(old, next int) string {
		return fmt.Sprintf(`
- {name: old, type: consul, config: {address: "http://%s"}, translate: {host: "{{.Name}}.example.org", ports: [{number: 80}]}}
- {name: new, type: nacos, config: {servers: [%q]}, translate: {host: "{{.Name}}.example.org", ports: [{number: 80}]}}
conflicts: [{hosts: [%s], policy: merge, weights: {old: %d, new: %d}}]
`, consul.Addr, server.Addr, host, old, next)
	}
	isthmus := testisthmus.Start(t, weights(100, 0))
	isthmus.WaitReady(t)
	istiod := testistiod.Start(t, testistiod.Newest, isthmus.Source())
	istiod.WaitReady(t)
	client := testproxy.NewProxyless(t, istiod, host, 80)
	client.WaitReaches(t, "consul-1", "consul-2")
	var c caller
	stop := c.start(t, client)

	isthmus.Configure(t, weights(50, 50))
	client.WaitReaches(t, "consul-1", "consul-2", "nacos-1", "nacos-2")
	isthmus.Configure(t, weights(0, 100))
	client.WaitReaches(t, "nacos-1", "nacos-2")

	// Nothing goes to Consul's instances any more, so that nobody misses them.
	consul.Deregister(t, "consul-1", "consul-2")
	for _, b := range there {
		b.Stop()
	}
	client.WaitReaches(t, "nacos-1", "nacos-2")
	stop()
	c.check(t)
}
