package e2e

import (
	"fmt"
	"sync"
	"testing"

	"github.com/isthmus-mesh/isthmus/internal/testenv"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testcoredns"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testisthmus"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testistiod"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testproxy"
)

// Calls through Envoy follow a service that is scaled out and in, without a
// failed one: SRV records of a real DNS server, and a static list.
func TestCallsFollowScaling(t *testing.T) {
	testenv.SkipIfShort(t)
	t.Parallel()
	const host, servicePort = "shop.example.org", 80
	cluster := testistiod.OutboundCluster(host, servicePort)
	// Each kind starts what has the backends, and returns how to change that.
	type scale func(backends ...testproxy.Backend)
	kinds := map[string]func(t *testing.T, first testproxy.Backend) (*testisthmus.Server, scale){
		"dns": func(t *testing.T, first testproxy.Backend) (*testisthmus.Server, scale) {
			const zone = "example.org"
			server := testcoredns.Start(t, testcoredns.Config{Zones: []string{zone}})
			set := func(backends ...testproxy.Backend) {
				records := []string{"host A 127.0.0.1"}
				for _, b := range backends {
					records = append(records, fmt.Sprintf("_http._tcp.shop SRV 0 0 %d host", b.Port))
				}
				server.SetZone(t, zone, records...)
			}
			set(first)
			return testisthmus.Start(t, fmt.Sprintf(`- {name: dns, type: dns, translate: {ports: [{name: http, number: 80}]},
  config: {servers: [%q], names: [_http._tcp.shop.example.org], min_ttl: 1s}}`, server.Addr)), set
		},
		"static": func(t *testing.T, first testproxy.Backend) (*testisthmus.Server, scale) {
			registries := func(backends ...testproxy.Backend) string {
				text := "- {name: fixed, type: static, translate: {ports: [{number: 80, protocol: http}]}, config: {services: [{name: shop.example.org, endpoints: ["
				for _, b := range backends {
					text += fmt.Sprintf("%q, ", b.Addr())
				}
				return text + "]}]}}"
			}
			bridge := testisthmus.Start(t, registries(first))
			return bridge, func(backends ...testproxy.Backend) { bridge.Configure(t, registries(backends...)) }
		},
	}
	for name, start := range kinds {
		t.Run(name, func(t *testing.T) {
			one, two, three := testproxy.StartHTTPBackend(t, "one"), testproxy.StartHTTPBackend(t, "two"), testproxy.StartHTTPBackend(t, "three")
			bridge, scale := start(t, one)
			bridge.WaitReady(t)
			istiod := testistiod.Start(t, testistiod.Newest, bridge.Source())
			istiod.WaitReady(t)
			envoy := testproxy.StartEnvoy(t, istiod)
			envoy.WaitReaches(t, cluster, "one")

			stop, calls := make(chan struct{}), 0
			var caller sync.WaitGroup
			// Owned by the test; ends with it. A failed call fails it.
			caller.Go(func() {
				for ; ; calls++ {
					select {
					case <-stop:
						return
					default:
					}
					if _, err := envoy.Call(t, cluster); err != nil {
						t.Errorf("call %d failed: %v", calls, err)
						return
					}
				}
			})
			end := sync.OnceFunc(func() {
				close(stop)
				caller.Wait()
			})
			defer end()
			scale(one, two, three)
			envoy.WaitReaches(t, cluster, "one", "two", "three")
			scale(two, three)
			envoy.WaitReaches(t, cluster, "two", "three")
			one.Stop()
			scale(three)
			envoy.WaitReaches(t, cluster, "three")
			two.Stop()
			envoy.WaitReaches(t, cluster, "three")
			end()
			t.Logf("%d calls, none failed", calls)
		})
	}
}
