package nacos

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"

	"github.com/isthmus-mesh/isthmus/internal/testenv"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testconsul"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testisthmus"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testistiod"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testnacos"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testproxy"
)

// caller makes calls, one after the other, until it is stopped.
type caller struct {
	mu     sync.Mutex // guards everything below
	calls  int
	failed []string
}

// start calls until the returned function does, which waits for the last one.
func (c *caller) start(t *testing.T, client *testproxy.Proxyless) (stop func()) {
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() {
		for ctx.Err() == nil {
			_, err := client.Call(t)
			c.mu.Lock()
			if c.calls++; err != nil && ctx.Err() == nil {
				c.failed = append(c.failed, err.Error())
			}
			c.mu.Unlock()
		}
	})
	return func() { cancel(); wg.Wait() }
}

// check fails the test if any call failed, or hardly any was made.
func (c *caller) check(t *testing.T) {
	t.Helper()
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.failed) > 0 || c.calls < 10 {
		t.Errorf("%d of %d calls failed: %.5q", len(c.failed), c.calls, c.failed)
	}
	t.Logf("%d calls, none failed", c.calls)
}

func up(b testproxy.Backend) testnacos.Instance {
	i := testnacos.Up(b.Address, b.Port)
	i.Metadata = map[string]string{"protocol": "grpc"}
	return i
}

// Calls of a proxyless gRPC client follow a scale-out and a scale-in in Nacos
// without one that fails.
func TestCallsFollowNacos(t *testing.T) {
	testenv.SkipIfShort(t)
	t.Parallel()
	for _, version := range testnacos.Versions() {
		server := testnacos.Start(t, testnacos.Config{Version: version})
		for _, istio := range testistiod.Versions() {
			t.Run(version.Name+"/"+istio.Name, func(t *testing.T) {
				app := server.Client(t)
				one, two, three := testproxy.StartGRPCBackend(t, "one"), testproxy.StartGRPCBackend(t, "two"), testproxy.StartGRPCBackend(t, "three")
				app.Register(t, "public", "DEFAULT_GROUP", "echo", up(one), up(two))
				isthmus := testisthmus.Start(t, fmt.Sprintf(
					`- {name: nacos, type: nacos, config: {servers: [%q], list_interval: 1s}, translate: {ports: [{number: 80}]}}`, server.Addr))
				isthmus.WaitReady(t)
				istiod := testistiod.Start(t, istio, isthmus.Source())
				istiod.WaitReady(t)
				const host = "echo.default-group.public.nacos"
				if hosts := istiod.Hosts(t); !slices.Contains(hosts, host) {
					t.Fatalf("istiod has hosts %v, want %s", hosts, host)
				}
				client := testproxy.NewProxyless(t, istiod, host, 80)
				client.WaitReaches(t, "one", "two")
				var c caller
				stop := c.start(t, client)
				app.Register(t, "public", "DEFAULT_GROUP", "echo", up(one), up(two), up(three))
				client.WaitReaches(t, "one", "two", "three")
				app.Register(t, "public", "DEFAULT_GROUP", "echo", up(three))
				client.WaitReaches(t, "three")
				// Nothing goes to them any more, so that nobody misses them.
				one.Stop()
				two.Stop()
				client.WaitReaches(t, "three")
				stop()
				c.check(t)
			})
		}
	}
}

// Consul and two Nacos clusters are followed by one Isthmus at once.
func TestConsulAndNacosTogether(t *testing.T) {
	testenv.SkipIfShort(t)
	t.Parallel()
	consul := testconsul.Start(t, testconsul.Config{})
	new3 := testnacos.Start(t, testnacos.Config{Version: testnacos.V3})
	old2 := testnacos.Start(t, testnacos.Config{Version: testnacos.V2})
	a, b, c := testproxy.StartGRPCBackend(t, "consul"), testproxy.StartGRPCBackend(t, "nacos3"), testproxy.StartGRPCBackend(t, "nacos2")
	consul.Register(t, testconsul.Instance{Service: "echo", ID: "1", Address: a.Address, Port: a.Port, Tags: []string{"grpc"}})
	new3.Client(t).Register(t, "public", "G", "echo", up(b))
	old2.Client(t).Register(t, "public", "G", "echo", up(c))
	isthmus := testisthmus.Start(t, fmt.Sprintf(`
- {name: dc1, type: consul, config: {address: "http://%s"}, translate: {ports: [{number: 80}]}}
- {name: new, type: nacos, config: {servers: [%q]}, translate: {ports: [{number: 80}], host: "{{.Name}}.new.nacos"}}
- {name: old, type: nacos, config: {servers: [%q]}, translate: {ports: [{number: 80}], host: "{{.Name}}.old.nacos"}}`,
		consul.Addr, new3.Addr, old2.Addr))
	isthmus.WaitReady(t)
	istiod := testistiod.Start(t, testistiod.Newest, isthmus.Source())
	istiod.WaitReady(t)
	for host, want := range map[string]string{"echo.service.consul": "consul", "echo.new.nacos": "nacos3", "echo.old.nacos": "nacos2"} {
		testproxy.NewProxyless(t, istiod, host, 80).WaitReaches(t, want)
	}
}
