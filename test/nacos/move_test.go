package nacos

import (
	"fmt"
	"testing"

	"github.com/isthmus-mesh/isthmus/internal/testenv"
)

// A service moves from Consul to Nacos by weights, from 100/0 to 0/100, under
// calls of a proxyless gRPC client, none of which fails.
func TestMoveFromConsul(t *testing.T) {
	testenv.SkipIfShort(t)
	consul := testenv.StartConsul(t, testenv.ConsulConfig{})
	server := testenv.StartNacos(t, testenv.NacosConfig{Version: testenv.Nacos3})
	var there []testenv.Backend
	for _, id := range []string{"consul-1", "consul-2"} {
		b := testenv.StartGRPCBackend(t, id)
		there = append(there, b)
		consul.Register(t, testenv.ConsulInstance{Service: "echo", ID: id, Address: b.Address, Port: b.Port, Tags: []string{"grpc"}})
	}
	app := server.Client(t)
	app.Register(t, "public", "DEFAULT_GROUP", "echo", up(testenv.StartGRPCBackend(t, "nacos-1")), up(testenv.StartGRPCBackend(t, "nacos-2")))
	const host = "echo.example.org"
	weights := func(old, next int) string {
		return fmt.Sprintf(`
- {name: old, type: consul, config: {address: "http://%s"}, translate: {host: "{{.Name}}.example.org", ports: [{number: 80}]}}
- {name: new, type: nacos, config: {servers: [%q]}, translate: {host: "{{.Name}}.example.org", ports: [{number: 80}]}}
conflicts: [{hosts: [%s], policy: merge, weights: {old: %d, new: %d}}]
`, consul.Addr, server.Addr, host, old, next)
	}
	isthmus := testenv.StartIsthmus(t, weights(100, 0))
	isthmus.WaitReady(t)
	istiod := testenv.StartIstiod(t, testenv.IstiodNewest, isthmus.Source())
	istiod.WaitReady(t)
	client := testenv.NewProxyless(t, istiod, host, 80)
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
