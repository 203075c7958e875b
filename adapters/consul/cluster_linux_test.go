package consul_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/isthmus-mesh/isthmus/adapters/consul"
	"github.com/isthmus-mesh/isthmus/internal/testenv"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testconsul"
	"github.com/isthmus-mesh/isthmus/plugin"
	"github.com/isthmus-mesh/isthmus/plugin/plugintest"
	"github.com/isthmus-mesh/isthmus/plugin/registry"
)

// TestConsulCluster shows three servers of which any may answer, with streaming
// and without. One that hears nothing of the leader any more is found while
// queries wait: another address is used, which has what changed meanwhile. With
// a leader that stops or is killed, another is elected. Nothing is removed
// wrongly in either case.
func TestConsulCluster(t *testing.T) {
	testenv.SkipIfShort(t)
	testenv.Wide(t)
	for _, streaming := range []bool{false, true} {
		t.Run(fmt.Sprint("streaming ", streaming), func(t *testing.T) { testCluster(t, streaming) })
	}
}

func testCluster(t *testing.T, streaming bool) {
	cluster := testconsul.StartCluster(t, 3, testconsul.Config{ExtraHCL: fmt.Sprintf("use_streaming_backend = %t", streaming)})
	leader := cluster.Leader(t, 0)
	lags, other := (leader+1)%3, (leader+2)%3
	servers := cluster.Servers
	web := testconsul.Instance{Service: "web", ID: "web-1", Address: "10.1.0.1", Port: 80}
	servers[leader].Register(t, web, testconsul.Instance{Service: "web", ID: "web-2", Address: "10.1.0.2", Port: 80},
		testconsul.Instance{Service: "db", ID: "db-1", Address: "10.1.1.1", Port: 5432})
	c := follow(t, servers[lags], func(c *consul.Config) {
		c.Address, c.Mode, c.Stale = "", "address", true
		c.Addresses = []string{"http://" + servers[lags].Addr, "http://" + servers[other].Addr, "http://" + servers[leader].Addr}
		c.Wait, c.MaxStale, c.RemoveGrace = plugin.Duration(10*time.Minute), plugin.Duration(4*time.Second), 0
	})
	say := func(what string, began time.Time) {
		c.Look(func(h *plugintest.Held) {
			t.Logf("%s: seen after %v; degraded so far %q; detail %q", what, time.Since(began).Round(time.Millisecond), h.Reasons, h.Detail)
		})
	}
	webIs := func(instances, port int) func([]registry.Instance) bool {
		return func(i []registry.Instance) bool { return len(i) == instances && i[0].Ports[0].Number == port }
	}
	c.awaitSynced(t)
	c.awaitWeb(t, "both instances", webIs(2, 80))
	c.await(t, "the bound", func() bool { return strings.Contains(c.Held.Detail, "after 6s at most") })
	began := time.Now()
	web.Port = 81
	servers[leader].Register(t, web)
	c.awaitWeb(t, "a change", webIs(2, 81))
	say("a change by way of a server that is not the leader", began)

	cluster.Gates[lags].Delay(time.Hour)
	began, web.Port = time.Now(), 82
	servers[leader].Register(t, web)
	servers[leader].Deregister(t, "web-2")
	c.awaitWeb(t, "what a server does not know that hears nothing of the leader", webIs(1, 82))
	say("the same once that server hears nothing of the leader", began)
	c.await(t, "another address", func() bool { return strings.Contains(c.Held.Detail, "at "+servers[other].Addr) })
	cluster.Gates[lags].Delay(0)

	if streaming {
		// Consul notices by keepalives alone that a stream's server is
		// silent, within a minute.
		servers[leader].Kill()
	} else {
		servers[leader].Pause()
		defer servers[leader].Continue()
	}
	began, web.Port = time.Now(), 83
	testenv.Eventually(t, testenv.Patience, "another leader", func() (string, bool) {
		return "the one that stopped", cluster.Leader(t, other) != leader
	})
	servers[other].Register(t, web)
	c.awaitWeb(t, "a change by another leader", webIs(1, 83))
	say("the leader stopped, and another was elected", began)
	c.Look(func(h *plugintest.Held) {
		if h.Removes > 0 || h.Least["web"] < 1 || h.Least["db"] < 1 {
			t.Errorf("%d removals; least instances %v", h.Removes, h.Least)
		}
	})
}
