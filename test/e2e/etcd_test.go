package e2e

import (
	"fmt"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/isthmus-mesh/isthmus/internal/testenv"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testetcd"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testisthmus"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testistiod"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testproxy"
)

// Calls follow the instances that etcd has: none fails while a second instance
// comes, the first one goes and stops, and a third one comes.
func TestEtcdScales(t *testing.T) {
	testenv.SkipIfShort(t)
	etcd := testetcd.Start(t, testetcd.Config{})
	key := func(b testproxy.Backend) string { return "/services/shop/" + b.Name }
	add := func(name string) testproxy.Backend {
		b := testproxy.StartHTTPBackend(t, name)
		etcd.Put(t, key(b), fmt.Sprintf(`{"address":%q,"ports":[{"name":"http","number":%d,"protocol":"http"}]}`, b.Address, b.Port))
		return b
	}
	one := add("one")
	isthmus := testisthmus.Start(t, fmt.Sprintf("- {name: etcd, type: etcd, config: {endpoints: [%q]}, translate: {ports: [{name: http, number: 80}]}}", etcd.URL))
	isthmus.WaitReady(t)
	istiod := testistiod.Start(t, testistiod.Newest, isthmus.Source())
	istiod.WaitReady(t)
	envoy := testproxy.StartEnvoy(t, istiod)
	cluster := testistiod.OutboundCluster("shop.etcd", 80)
	envoy.WaitReaches(t, cluster, "one")

	var calls atomic.Int64
	end := make(chan struct{})
	var callers sync.WaitGroup
	stop := sync.OnceFunc(func() {
		close(end)
		callers.Wait()
	})
	t.Cleanup(stop)
	for range 4 {
		// Owned by the test; ends with stop.
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
	add("two")
	envoy.WaitReaches(t, cluster, "one", "two")
	etcd.Delete(t, key(one))
	envoy.WaitReaches(t, cluster, "two")
	one.Stop()
	add("three")
	envoy.WaitReaches(t, cluster, "two", "three")
	stop()
	t.Logf("%d calls", calls.Load())
	if calls.Load() == 0 {
		t.Error("no call was made meanwhile")
	}
}
