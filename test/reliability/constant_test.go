package reliability

import (
	"bytes"
	"context"
	"flag"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/isthmus-mesh/isthmus/internal/testenv"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testconsul"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testisthmus"
	"github.com/isthmus-mesh/isthmus/internal/watch"
)

var window = flag.Duration("window", 0, "how long TestConstantWork measures each thing")

// steady is a Consul of 1,000 services with 10 instances each, behind a proxy
// that counts requests, and a bridge with four sinks.
type steady struct {
	t        *testing.T
	consul   *testconsul.Server
	gate     *testenv.Gate
	requests atomic.Int64
	bridge   *testisthmus.Server
	pid      int // of the bridge
	revision int
}

const (
	steadyServices = 1000
	steadyEach     = 10
)

// work is what was spent in a window.
type work struct {
	bridge, plugin time.Duration
	requests       int64
}

// cpu returns the processor time of a process since its start.
func cpu(t *testing.T, pid int) time.Duration {
	t.Helper()
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		t.Fatal(err)
	}
	// The 12th and 13th field after the name, in hundredths of a second.
	fields := strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:]))
	user, _ := strconv.Atoi(fields[11])
	system, _ := strconv.Atoi(fields[12])
	return time.Duration(user+system) * 10 * time.Millisecond
}

func (s *steady) instance(service, n int) testconsul.Instance {
	return testconsul.Instance{
		Service: fmt.Sprintf("s%d", service), ID: fmt.Sprintf("s%d-%d", service, n), Address: fmt.Sprintf("10.%d.%d.%d", 16+service/250, service%250, n+1), Port: 8080,
		Meta: map[string]string{"revision": strconv.Itoa(s.revision)},
	}
}

// registerAll registers every instance with a new revision.
func (s *steady) registerAll() {
	s.t.Helper()
	s.revision++
	all := make([]testconsul.Instance, 0, steadyServices*steadyEach)
	for n := range steadyEach {
		for service := range steadyServices {
			all = append(all, s.instance(service, n))
		}
	}
	s.consul.Register(s.t, all...)
}

// measure returns what is spent while f runs, for one window, under changes of
// one percent a minute.
func (s *steady) measure(f func()) work {
	s.t.Helper()
	plugin := s.bridge.Registry(s.t, "dc1").PID
	before := work{cpu(s.t, s.pid), cpu(s.t, plugin), s.requests.Load()}
	end := time.NewTimer(*window)
	defer end.Stop()
	tick := time.NewTicker(time.Minute / (steadyServices * steadyEach / 100))
	defer tick.Stop()
	f()
	for n := 0; ; n++ {
		select {
		case <-tick.C:
			s.revision++
			s.consul.Register(s.t, s.instance(n*7%steadyServices, 0))
			continue
		case <-end.C:
		case <-s.t.Context().Done():
		}
		break
	}
	return work{cpu(s.t, s.pid) - before.bridge, cpu(s.t, plugin) - before.plugin, s.requests.Load() - before.requests}
}

// What a total outage of the registry, a restart of all its instances and a
// storm of sinks cost, beside a calm time.
func TestConstantWork(t *testing.T) {
	if *window == 0 {
		t.Skip("make constant-work runs it")
	}
	s := &steady{t: t, consul: testconsul.Start(t, testconsul.Config{Persistent: true, ExtraHCL: "limits { http_max_conns_per_client = 8000 }"})}
	proxy := newAnswers(t, s.consul.Addr)
	front := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		s.requests.Add(1)
		proxy.ServeHTTP(w, r)
	}))
	t.Cleanup(front.Close)
	s.gate = testenv.NewGate(t, front.Listener.Addr().String())
	s.gate.Open(t)
	s.registerAll()
	s.bridge = testisthmus.Start(t, fmt.Sprintf("- {name: dc1, type: consul, config: {address: \"http://%s\", mode: address, max_connections: 1200}, translate: {namespace: dc1}}\n", s.gate.Addr))
	s.bridge.WaitReady(t)
	s.pid = parent(t, s.bridge.Registry(t, "dc1").PID)
	ctx, cancel := context.WithCancel(t.Context())
	var group sync.WaitGroup
	t.Cleanup(func() {
		cancel()
		group.Wait()
	})
	for range 4 {
		group.Go(func() { // ends with cancel
			if err := watch.Run(ctx, watch.Options{Address: s.bridge.XDS, Shape: "inline", Types: []string{entryType}}, io.Discard); err != nil {
				t.Error(err)
			}
		})
	}
	s.measure(func() {}) // what is left of the start
	calm := s.measure(func() {})
	type row struct {
		name string
		work
	}
	rows := []row{{"calm", calm}}
	add := func(name string, f func()) {
		rows = append(rows, row{name, s.measure(f)})
		t.Logf("%s: %+v, calm %+v", name, rows[len(rows)-1].work, calm)
	}
	add("Consul cannot be reached", s.gate.Shut)
	add("the window after that", func() {})
	add("Consul is back", func() { s.gate.Open(t) })
	s.bridge.WaitPhase(t, "dc1", "live")
	add("the window after that", func() {})
	add("all 10,000 instances register again, changed", s.registerAll)
	s.measure(func() {}) // the end of it
	var first, second *storm
	add("1,000 sinks connect, with nothing", func() { first = startStorm(t, s.bridge.XDS, nil) })
	first.waitListed()
	received := first.bytes.Load()
	add("1,000 sinks stay", func() {})
	versions := versionsNow(t, s.bridge.XDS)
	add("they are cut off, and connect again with what they have", func() {
		first.end()
		second = startStorm(t, s.bridge.XDS, versions)
	})
	second.end()

	var b strings.Builder
	b.WriteString("| in one window | CPU of the bridge | CPU of the plugin | requests to Consul |\n|---|---|---|---|\n")
	for _, r := range rows {
		fmt.Fprintf(&b, "| %s | %.2f s, %.1fx | %.2f s, %.1fx | %d, %.1fx |\n", r.name, r.bridge.Seconds(), times(r.bridge, calm.bridge),
			r.plugin.Seconds(), times(r.plugin, calm.plugin), r.requests, float64(r.requests)/float64(max(calm.requests, 1)))
	}
	t.Log("\n" + b.String())
	if *write {
		page(t, "Constant work", "`make constant-work`", fmt.Sprintf(`Consul has %d services with %d instances each over plain HTTP
(max_connections: 1200), of which one percent a minute change all the time; four
sinks of delta xDS follow. A window is %v. %s, %s.

%s
What is constant, and what is not:

- **While Consul cannot be reached** there are fewer requests than in a calm
  time. The first window has what the outage itself costs: the connections of
  the 1,000 blocking queries end. Only the listing asks again. That is once per
  outage, and does not grow with its length: the window after it is the measure.
  No service is composed, and nothing is sent.
- **When Consul is back** every service is asked for again, twice at most: once
  for what it has now, once to block again. Answers that are as before change
  nothing.
- **10,000 instances that register again with other metadata** are 10,000 real
  changes, in more than one window of a calm time. Constant are the requests per
  change (one at most, as one answer may have several changes of a service), the
  bytes per change on the wire to the bridge, and the number of requests and of
  responses in flight; Consul and the sinks set the pace.
- **A sink that connects with nothing** receives everything: %d MB for all
  1,000. Registries are not asked. One that connects again says what it has, and
  receives what changed meanwhile.
`, steadyServices, steadyEach, *window, time.Now().Format(time.DateOnly), machine, &b, received>>20))
	}
}

func times(d, calm time.Duration) float64 {
	return float64(d) / float64(max(calm, 10*time.Millisecond))
}
