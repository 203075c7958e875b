package e2e

import (
	"fmt"
	"sync"
	"testing"

	"github.com/isthmus-mesh/isthmus/internal/testenv"
)

// Calls through Envoy follow a service that is scaled out and in, without a
// failed one: SRV records of a real DNS server, and a static list.
func TestCallsFollowScaling(t *testing.T) {
	testenv.SkipIfShort(t)
	const host, servicePort = "shop.example.org", 80
	cluster := testenv.OutboundCluster(host, servicePort)
	// Each kind starts what has the backends, and returns how to change that.
	type scale func(backends ...testenv.Backend)
	kinds := map[string]func(t *testing.T, first testenv.Backend) (*testenv.Isthmus, scale){
		"dns": func(t *testing.T, first testenv.Backend) (*testenv.Isthmus, scale) {
			const zone = "example.org"
			server := testenv.StartCoreDNS(t, testenv.CoreDNSConfig{Zones: []string{zone}})
			set := func(backends ...testenv.Backend) {
				records := []string{"host A 127.0.0.1"}
				for _, b := range backends {
					records = append(records, fmt.Sprintf("_http._tcp.shop SRV 0 0 %d host", b.Port))
				}
				server.SetZone(t, zone, records...)
			}
			set(first)
			return testenv.StartIsthmus(t, fmt.Sprintf(`- {name: dns, type: dns, translate: {ports: [{name: http, number: 80}]},
  config: {servers: [%q], names: [_http._tcp.shop.example.org], min_ttl: 1s}}`, server.Addr)), set
		},
		"static": func(t *testing.T, first testenv.Backend) (*testenv.Isthmus, scale) {
			registries := func(backends ...testenv.Backend) string {
				text := "- {name: fixed, type: static, translate: {ports: [{number: 80, protocol: http}]}, config: {services: [{name: shop.example.org, endpoints: ["
				for _, b := range backends {
					text += fmt.Sprintf("%q, ", b.Addr())
				}
				return text + "]}]}}"
			}
			bridge := testenv.StartIsthmus(t, registries(first))
			return bridge, func(backends ...testenv.Backend) { bridge.Configure(t, registries(backends...)) }
		},
	}
	for name, start := range kinds {
		t.Run(name, func(t *testing.T) {
			one, two, three := testenv.StartHTTPBackend(t, "one"), testenv.StartHTTPBackend(t, "two"), testenv.StartHTTPBackend(t, "three")
			bridge, scale := start(t, one)
			bridge.WaitReady(t)
			istiod := testenv.StartIstiod(t, testenv.IstiodNewest, bridge.Source())
			istiod.WaitReady(t)
			envoy := testenv.StartEnvoy(t, istiod)
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
