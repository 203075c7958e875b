package consul_test

import (
	"context"
	"flag"
	"fmt"
	"math/rand/v2"
	"net/http"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/hashicorp/consul/api"

	"github.com/isthmus-mesh/isthmus/adapters/consul"
	"github.com/isthmus-mesh/isthmus/internal/testcert"
	"github.com/isthmus-mesh/isthmus/internal/testenv"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testconsul"
	"github.com/isthmus-mesh/isthmus/plugin"
	"github.com/isthmus-mesh/isthmus/plugin/registry"
)

// long runs the tests of every change in the length that
// docs/performance-consul.md quotes.
var long = flag.Bool("long", false, "run 10,000 changes instead of some hundreds")

// world is a Consul with many services, what the adapter makes of it, and what
// is changed there.
type world struct {
	server *testconsul.Server
	// direct makes changes and asks for truth, over https, so that the adapter
	// alone uses the other port.
	direct *api.Client
	ca     string // authority of the server's certificate
	c      *catalog

	mu       sync.Mutex // guards everything below
	services [][]*instance
	busy     map[int]bool // services with a change under way
}

// instance is one instance as it was last registered.
type instance struct {
	id, node string
	port     int
	critical bool
}

func serviceName(i int) string { return fmt.Sprintf("svc-%04d", i) }

// newWorld starts a server with n services of m instances, so many on each
// node.
func newWorld(t testing.TB, n, m, perNode int, persistent bool) *world {
	t.Helper()
	testenv.SkipIfShort(t)
	cert := testcert.New(t, "localhost")
	w := &world{
		server: testconsul.Start(t, testconsul.Config{CertFile: cert.Cert, KeyFile: cert.Key, Persistent: persistent, Peering: true}), ca: cert.Cert,
		busy: map[int]bool{},
	}
	config := api.Config{Address: w.server.HTTPSAddr, Scheme: "https", TLSConfig: api.TLSConfig{CAFile: w.ca}}
	config.Transport = &http.Transport{ForceAttemptHTTP2: true}
	direct, err := api.NewClient(&config)
	if err != nil {
		t.Fatal(err)
	}
	w.direct = direct
	t.Cleanup(config.Transport.CloseIdleConnections)
	var ops api.TxnOps
	nodes := n*m/perNode + 1
	for node := range nodes {
		ops = append(ops, &api.TxnOp{Node: &api.NodeTxnOp{Verb: api.NodeSet, Node: api.Node{Node: fmt.Sprintf("node-%d", node), Address: "127.0.0.1"}}})
	}
	for i := range n {
		instances := make([]*instance, m)
		for j := range m {
			// The instances of a service are on different nodes.
			instances[j] = &instance{id: fmt.Sprintf("%s-%d", serviceName(i), j), node: fmt.Sprintf("node-%d", (i+j*n)/perNode%nodes), port: 80}
			ops = append(ops, w.register(i, instances[j])...)
		}
		w.services = append(w.services, instances)
	}
	for part := range slices.Chunk(ops, 128) {
		w.send(t, part)
	}
	return w
}

func (w *world) register(i int, in *instance) api.TxnOps {
	return append(api.TxnOps{{Service: &api.ServiceTxnOp{Verb: api.ServiceSet, Node: in.node, Service: api.AgentService{
		ID: in.id, Service: serviceName(i), Address: fmt.Sprintf("10.%d.%d.1", i/256, i%256), Port: in.port,
	}}}}, w.check(i, in)...)
}

func (w *world) check(i int, in *instance) api.TxnOps {
	status := api.HealthPassing
	if in.critical {
		status = api.HealthCritical
	}
	return api.TxnOps{{Check: &api.CheckTxnOp{Verb: api.CheckSet, Check: api.HealthCheck{
		Node: in.node, CheckID: "check-" + in.id, Name: "test", Status: status, ServiceID: in.id, ServiceName: serviceName(i),
	}}}}
}

func (w *world) send(t testing.TB, ops api.TxnOps) {
	t.Helper()
	if ok, answer, _, err := w.direct.Txn().Txn(ops, nil); err != nil {
		t.Errorf("transaction: %v", err)
	} else if !ok {
		t.Errorf("transaction: %+v", *answer.Errors[0])
	}
}

// kinds of changes: of health, of an instance that comes or goes, and of a
// port.
var kinds = []string{"flip", "come-go", "other"}

// take returns a service that nothing changes at the moment, and its instances.
// It waits while half of them are being changed.
func (w *world) take() (i int, instances []*instance) {
	for {
		w.mu.Lock()
		i = rand.IntN(len(w.services)) //nolint:gosec // any service will do
		if !w.busy[i] && len(w.busy) < len(w.services)/2 {
			w.busy[i] = true
			instances = w.services[i]
			w.mu.Unlock()
			return i, instances
		}
		w.mu.Unlock()
		<-time.After(time.Millisecond)
	}
}

func (w *world) put(i int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.busy, i)
}

// change makes one change of a kind to a service, and returns how it shows
// among the service's instances.
func (w *world) change(t testing.TB, kind string, i int, instances []*instance) (shows func([]registry.Instance) bool) {
	in := instances[0]
	at := func(all []registry.Instance) int {
		return slices.IndexFunc(all, func(r registry.Instance) bool { return r.ID == in.node+"/"+in.id })
	}
	switch kind {
	case "flip":
		in.critical = !in.critical
		want := map[bool]registry.Health{true: registry.HealthCritical, false: registry.HealthPassing}[in.critical]
		w.send(t, w.check(i, in))
		return func(all []registry.Instance) bool { k := at(all); return k >= 0 && all[k].Health == want }
	case "come-go":
		if strings.HasSuffix(in.id, "-new") {
			w.services[i] = instances[1:]
			w.send(t, api.TxnOps{{Service: &api.ServiceTxnOp{Verb: api.ServiceDelete, Node: in.node, Service: api.AgentService{ID: in.id, Service: serviceName(i)}}}})
			return func(all []registry.Instance) bool { return at(all) < 0 }
		}
		in = &instance{id: in.id + "-new", node: in.node, port: 80}
		w.services[i] = append([]*instance{in}, instances...)
		w.send(t, w.register(i, in))
		return func(all []registry.Instance) bool { return at(all) >= 0 }
	default:
		in.port = 1 + in.port%60000
		want := in.port
		w.send(t, w.register(i, in)[:1])
		return func(all []registry.Instance) bool { k := at(all); return k >= 0 && all[k].Ports[0].Number == want }
	}
}

// follow follows the server over http or https, or as a peer.
func (w *world) follow(t testing.TB, scheme string, address string) {
	w.c = follow(t, w.server, func(c *consul.Config) {
		switch c.Address = "http://" + address; scheme {
		case "https":
			c.Address, c.TLS.CAFile = "https://"+w.server.HTTPSAddr, w.ca
		case "peering":
			newPeering(t, w.direct, address).config(c)
		}
		c.RemoveGrace = plugin.Duration(within / 3) // or what an outage removes would be there for as long as the tests wait
	})
	w.c.awaitSynced(t)
	w.c.await(t, "all services", func() bool { return len(w.c.Held.Instances) == len(w.services) })
}

// equal waits until the catalog holds what Consul says that it has, service by
// service.
func (w *world) equal(t testing.TB) {
	t.Helper()
	want := map[string]map[string]string{}
	for i := range w.services {
		entries, _, err := w.direct.Health().Service(serviceName(i), "", false, &api.QueryOptions{RequireConsistent: true})
		if err != nil {
			t.Fatal(err)
		}
		all := map[string]string{}
		for _, e := range entries {
			health := "passing"
			if e.Checks.AggregatedStatus() == api.HealthCritical {
				health = "critical"
			}
			all[e.Node.Node+"/"+e.Service.ID] = fmt.Sprint(e.Service.Port, " ", health)
		}
		want[serviceName(i)] = all
	}
	got := func() map[string]map[string]string {
		all := map[string]map[string]string{}
		for name, instances := range w.c.Held.Instances {
			all[name] = map[string]string{}
			for _, i := range instances {
				all[name][i.ID] = fmt.Sprint(i.Ports[0].Number, " ", i.Health)
			}
		}
		return all
	}
	w.c.await(t, "the catalog as Consul's own", func() bool {
		return cmp.Equal(want, got())
	})
}

// TestConsulEveryChange makes changes of every kind at random, over plain HTTP
// with more services than connections and as a peer, and compares with Consul's
// own catalog again and again. The second run of each restarts the agent and
// refuses connections meanwhile.
func TestConsulEveryChange(t *testing.T) {
	testenv.Wide(t)
	services, changes, rounds := 250, 600, 3
	if *long {
		services, changes, rounds = 1000, 10_000, 10
	}
	for _, run := range []struct {
		scheme    string
		disturbed bool
	}{{"http", false}, {"http", true}, {"peering", false}, {"peering", true}} {
		disturbed := run.disturbed
		t.Run(fmt.Sprintf("%s/disturbed=%t", run.scheme, disturbed), func(t *testing.T) {
			w := newWorld(t, services, 4, 20, true)
			relay := newRelay(t, map[string]string{"http": w.server.Addr, "peering": w.server.PeeringAddr()}[run.scheme])
			w.follow(t, run.scheme, relay.Addr().String())
			start, made := time.Now(), 0
			for round := range rounds {
				for ; made < changes*(round+1)/rounds; made++ {
					i, instances := w.take()
					w.change(t, kinds[rand.IntN(len(kinds))], i, instances) //nolint:gosec // any kind will do
					w.put(i)
				}
				if disturbed && round < rounds-1 {
					if round%2 == 0 {
						relay.refuse(true)
						relay.cut()
						for range changes / rounds / 4 {
							i, instances := w.take()
							w.change(t, kinds[rand.IntN(len(kinds))], i, instances) //nolint:gosec // any kind will do
							w.put(i)
						}
						relay.refuse(false)
					} else {
						w.server.Kill()
						w.server.Restart(t)
					}
				} else {
					w.equal(t)
				}
			}
			// What an outage removes is kept for the grace period.
			if disturbed {
				w.c.awaitState(t, "")
			}
			w.equal(t)
			t.Logf("%d changes of %d services in %v, %d connections at most", made, services, time.Since(start).Round(time.Second), relay.peak())
		})
	}
}

// BenchmarkConsulLoad measures changes from the transaction that makes them
// until the catalog has them, beside a blocking query of Consul's own on the
// same service, and what Consul spends.
//
//	make bench-consul
func BenchmarkConsulLoad(b *testing.B) {
	for _, n := range []int{1000, 5000} {
		for _, scheme := range []string{"http", "https", "peering"} {
			b.Run(fmt.Sprintf("services=%d/%s", n, scheme), func(b *testing.B) {
				w := newWorld(b, n, 10, 100, false)
				w.follow(b, scheme, map[string]string{"http": w.server.Addr, "peering": w.server.PeeringAddr()}[scheme])
				pause(b, 10*time.Second) // until every query waits
				used := w.server.CPU()
				pause(b, 10*time.Second)
				b.Logf("idle: %.1f %% CPU", (w.server.CPU()-used).Seconds()*10)
				for _, kind := range kinds {
					for _, rate := range []float64{0.1, 10, 100} {
						b.Run(fmt.Sprintf("%s/rate=%g", kind, rate), func(b *testing.B) {
							for b.Loop() {
								w.measure(b, kind, rate)
							}
						})
					}
				}
			})
		}
	}
}

func pause(t testing.TB, d time.Duration) {
	select {
	case <-time.After(d):
	case <-t.Context().Done():
	}
}

// measure makes changes of a kind at a rate for a while.
func (w *world) measure(b *testing.B, kind string, rate float64) {
	var mu sync.Mutex // guards own and late
	var own, late []time.Duration
	var wg sync.WaitGroup
	during := 20 * time.Second
	if rate < 1 {
		during = 40 * time.Second
	}
	used, begin := w.server.CPU(), time.Now()
	for made := 0; time.Since(begin) < during; made++ {
		pause(b, time.Until(begin.Add(time.Duration(float64(made)/rate*float64(time.Second)))))
		wg.Go(func() {
			i, instances := w.take()
			defer w.put(i)
			entries, meta, err := w.direct.Health().Service(serviceName(i), "", false, nil)
			if err != nil || len(entries) == 0 {
				b.Errorf("%s: %v", serviceName(i), err)
				return
			}
			// Consul's own notification: a query that waits. It is on its way
			// before the change is made.
			ctx, cancel := context.WithTimeout(b.Context(), within)
			defer cancel()
			notified := make(chan time.Time, 1)
			go func() {
				q := &api.QueryOptions{WaitIndex: meta.LastIndex, WaitTime: within}
				_, _, _ = w.direct.Health().Service(serviceName(i), "", false, q.WithContext(ctx))
				notified <- time.Now()
			}()
			pause(b, 20*time.Millisecond)
			start := time.Now()
			shows := w.change(b, kind, i, instances)
			arrived := w.c.when(b, serviceName(i), shows)
			at := <-notified
			mu.Lock()
			defer mu.Unlock()
			own, late = append(own, at.Sub(start)), append(late, arrived.Sub(at))
		})
	}
	spent, took := w.server.CPU()-used, time.Since(begin)
	conns, requests := established(w.server.Addr), w.requests(b)
	wg.Wait()
	slices.Sort(own)
	slices.Sort(late)
	for name, all := range map[string][]time.Duration{"own": own, "over-own": late} {
		b.ReportMetric(all[len(all)/2].Seconds()*1000, name+"-p50-ms")
		b.ReportMetric(all[len(all)*99/100].Seconds()*1000, name+"-p99-ms")
	}
	b.ReportMetric(spent.Seconds()/took.Seconds()*100, "cpu-%")
	b.ReportMetric(float64(conns), "conns")
	b.ReportMetric(float64(requests), "requests/min")
	b.ReportMetric(0, "ns/op")
}

// established returns how many connections to an address this machine has.
func established(address string) (n int) {
	var port int
	_, _ = fmt.Sscanf(address[strings.LastIndexByte(address, ':'):], ":%d", &port)
	table, _ := os.ReadFile("/proc/net/tcp")
	for line := range strings.Lines(string(table)) {
		if f := strings.Fields(line); len(f) > 3 && strings.HasSuffix(f[1], fmt.Sprintf(":%04X", port)) && f[3] == "01" {
			n++
		}
	}
	return n
}

// requests returns how many requests Consul answered in a minute, but for
// transactions, by its own count of the last ten seconds.
func (w *world) requests(b *testing.B) (n int) {
	info, err := w.direct.Agent().Metrics()
	if err != nil {
		b.Fatal(err)
	}
	for _, s := range info.Samples {
		if strings.HasSuffix(s.Name, "api.http") && !strings.Contains(s.Labels["path"], "txn") {
			n += s.Count * 6
		}
	}
	return n
}
