package e2e

import (
	"slices"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/isthmus-mesh/isthmus/internal/testenv"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testconsul"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testistiod"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testproxy"
)

// Real calls, through Envoy and by a proxyless gRPC client, reach the instances
// that Consul has, and follow its changes.
func TestCallsReachInstances(t *testing.T) {
	testenv.SkipIfShort(t)
	t.Parallel()
	// The instances listen on ports of their own, so the configuration says
	// what port their services have.
	const servicePort = 80
	for _, version := range testistiod.Versions() {
		t.Run(version.Name, func(t *testing.T) {
			register := func(service, protocol string, b testproxy.Backend) testconsul.Instance {
				return testconsul.Instance{Service: service, ID: b.Name, Address: b.Address, Port: b.Port, Tags: []string{protocol}}
			}
			shop1 := register("shop", "http", testproxy.StartHTTPBackend(t, "shop-1"))
			shop2 := register("shop", "http", testproxy.StartHTTPBackend(t, "shop-2"))
			rpc1 := register("rpc", "grpc", testproxy.StartGRPCBackend(t, "rpc-1"))
			rpc2 := register("rpc", "grpc", testproxy.StartGRPCBackend(t, "rpc-2"))
			m := startMesh(t, version, follow{ports: "[{number: 80}]"}, shop1, shop2, rpc1, rpc2)
			for _, host := range []string{"shop.service.consul", "rpc.service.consul"} {
				if hosts := m.istiod.Hosts(t); !slices.Contains(hosts, host) {
					t.Fatalf("istiod has hosts %v, want %s among them", hosts, host)
				}
			}
			kinds := []struct {
				name        string
				one, two    testconsul.Instance
				waitReaches func(t *testing.T, want ...string)
			}{
				{"HTTP through Envoy", shop1, shop2, func() func(*testing.T, ...string) {
					envoy := testproxy.StartEnvoy(t, m.istiod)
					return func(t *testing.T, want ...string) {
						t.Helper()
						envoy.WaitReaches(t, testistiod.OutboundCluster("shop.service.consul", servicePort), want...)
					}
				}()},
				{"proxyless gRPC", rpc1, rpc2, func() func(*testing.T, ...string) {
					client := testproxy.NewProxyless(t, m.istiod, "rpc.service.consul", servicePort)
					return func(t *testing.T, want ...string) {
						t.Helper()
						client.WaitReaches(t, want...)
					}
				}()},
			}
			for _, k := range kinds {
				t.Run(k.name, func(t *testing.T) {
					k.waitReaches(t, k.one.ID, k.two.ID)

					t.Log("one instance is removed")
					m.consul.Deregister(t, k.one.ID)
					k.waitReaches(t, k.two.ID)

					t.Log("it is back")
					m.consul.Register(t, k.one)
					k.waitReaches(t, k.one.ID, k.two.ID)

					t.Log("the other fails its check")
					failing := k.two
					failing.Critical = true
					m.consul.Register(t, failing)
					k.waitReaches(t, k.one.ID)

					t.Log("its port is another, and it passes again")
					moved := k.two
					if k.two.Service == "shop" {
						moved.Port = testproxy.StartHTTPBackend(t, "moved").Port
					} else {
						moved.Port = testproxy.StartGRPCBackend(t, "moved").Port
					}
					m.consul.Register(t, moved)
					k.waitReaches(t, k.one.ID, "moved")
				})
			}
		})
	}
}

// keepCalling calls a cluster through Envoy, four calls at a time, until stop,
// which must be called before the test ends. Each failed call fails the test.
// stop returns the number of calls.
func keepCalling(t *testing.T, envoy *testproxy.Envoy, cluster string) (stop func() int) {
	t.Helper()
	end := make(chan struct{})
	var callers sync.WaitGroup
	var calls atomic.Int64
	for range 4 {
		// Ends with stop.
		callers.Go(func() {
			for {
				select {
				case <-end:
					return
				default:
				}
				if _, err := envoy.Call(t, cluster); err != nil {
					t.Errorf("a call failed: %v", err)
					return
				}
				calls.Add(1)
			}
		})
	}
	return sync.OnceValue(func() int {
		close(end)
		callers.Wait()
		return int(calls.Load())
	})
}
