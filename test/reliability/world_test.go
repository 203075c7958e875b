package reliability

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/isthmus-mesh/isthmus/internal/testenv"
	"github.com/isthmus-mesh/isthmus/internal/watch"
	"github.com/isthmus-mesh/isthmus/verify"
)

const (
	serviceEntry  = "networking.istio.io/ServiceEntry"
	workloadEntry = "networking.istio.io/WorkloadEntry"
	namespace     = "dc1"
	services      = 20
	perService    = 10
)

// world is a Consul behind a gate, a sim registry beside it, a bridge, and four
// sinks that the judge listens to.
type world struct {
	t      *testing.T
	rand   *rand.Rand
	consul *testenv.Consul
	gate   *testenv.Gate
	bridge *testenv.Isthmus
	known  time.Time // all that the registry had then is in the bridge, and on disk

	mu         sync.Mutex // guards the fields below
	judge      *verify.Judge
	revision   uint64
	there      map[string]uint64 // revisions in Consul, by service and address
	sinks      []*sink
	violations []verify.Violation
}

// sink is what one sink has of Consul, by service.
type sink struct {
	protocol string
	have     map[string][]verify.Endpoint
}

// newWorld starts everything. sim is the config block of the registry beside
// Consul.
func newWorld(t *testing.T, sim string) *world {
	w := &world{t: t, rand: rand.New(rand.NewPCG(*seed, 13)), judge: verify.New(), there: map[string]uint64{}}
	w.consul = testenv.StartConsul(t, testenv.ConsulConfig{Persistent: true})
	w.gate = testenv.NewGate(t, w.consul.Addr)
	w.gate.Open(t)
	w.add(&verify.Event{Kind: verify.Start})
	for s := range services {
		w.add(&verify.Event{Kind: verify.Truth, Collection: serviceEntry, Name: serviceName(s), Revision: 1})
		w.set(s, 0, true)
	}
	for range services * perService {
		w.churn(1)
	}
	w.bridge = testenv.StartIsthmus(t, fmt.Sprintf("- {name: dc1, type: consul, config: {address: \"http://%s\"}, translate: {namespace: %s}}\n"+
		"- {name: load, type: sim, config: %s, translate: {namespace: load}}\n", w.gate.Addr, namespace, sim))
	ctx, cancel := context.WithCancel(t.Context())
	var group sync.WaitGroup
	t.Cleanup(func() {
		cancel()
		group.Wait()
	})
	for n, protocol := range []string{"delta", "sotw", "delta", "sotw"} {
		s := &sink{protocol: protocol, have: map[string][]verify.Endpoint{}}
		w.sinks = append(w.sinks, s)
		// The names of instances are the adapter's; their addresses are ours.
		o := watch.Options{Address: w.bridge.XDS, Protocol: protocol, Shape: "inline", Types: []string{"networking.istio.io/v1/ServiceEntry"}}
		o.Record = recorder(func(e *verify.Event) error {
			e.Stream = (e.Stream-1)*4 + n + 1
			w.mu.Lock()
			defer w.mu.Unlock()
			w.addLocked(e)
			s.apply(e)
			return nil
		})
		group.Go(func() { // ends with cancel
			if err := watch.Run(ctx, o, io.Discard); err != nil {
				t.Error(err)
			}
		})
	}
	return w
}

// recorder passes on the events of a recording.
type recorder func(*verify.Event) error

// Write implements io.Writer for whole lines.
func (r recorder) Write(line []byte) (int, error) {
	return len(line), verify.Read(bytes.NewReader(line), func(_ int, e *verify.Event) error { return r(e) })
}

func (w *world) add(e *verify.Event) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.addLocked(e)
}

func (w *world) addLocked(e *verify.Event) {
	e.Time = time.Now() // the order in which the judge hears of it
	w.violations = append(w.violations, w.judge.Add(e)...)
}

func serviceName(s int) string     { return fmt.Sprintf("%s/s%d", namespace, s) }
func instanceName(s, n int) string { return fmt.Sprintf("%s/s%d-%d", namespace, s, n) }
func addressOf(s, n int) string    { return fmt.Sprintf("10.7.%d.%d", s, n+1) }

// set registers an instance with a new revision, or removes it; the truth says
// so first.
func (w *world) set(s, n int, there bool) {
	w.mu.Lock()
	w.revision++
	revision, name := w.revision+1, instanceName(s, n)
	key := serviceName(s) + " " + addressOf(s, n) + ":8080"
	w.addLocked(&verify.Event{
		Kind: verify.Truth, Collection: workloadEntry, Name: name, Service: serviceName(s), Address: addressOf(s, n) + ":8080", Revision: revision, Absent: !there,
	})
	if there {
		w.there[key] = revision
	} else {
		delete(w.there, key)
	}
	w.mu.Unlock()
	id := strings.TrimPrefix(name, namespace+"/")
	if !there {
		w.consul.Deregister(w.t, id)
		return
	}
	w.consul.Register(w.t, testenv.ConsulInstance{
		Service: fmt.Sprintf("s%d", s), ID: id, Address: addressOf(s, n), Port: 8080, Tags: []string{"http"},
		Meta: map[string]string{verify.RevisionLabel: strconv.FormatUint(revision, 10)},
	})
}

// churn makes changes; the first instance of each service stays.
func (w *world) churn(changes int) {
	for range changes {
		s, n := w.rand.IntN(services), 1+w.rand.IntN(perService-1)
		w.mu.Lock()
		_, there := w.there[serviceName(s)+" "+addressOf(s, n)+":8080"]
		w.mu.Unlock()
		w.set(s, n, !there || w.rand.IntN(3) > 0)
	}
}

// apply keeps what the sink has of Consul.
func (s *sink) apply(e *verify.Event) {
	if e.Kind != verify.Response {
		return
	}
	if !e.Incremental {
		clear(s.have)
	}
	for _, r := range e.Resources {
		if strings.HasPrefix(r.Name, namespace+"/") {
			s.have[r.Name] = r.Endpoints
		}
	}
	for _, name := range e.Removed {
		delete(s.have, name)
	}
}

// instances returns the revisions that the sink has, by service and address.
func (s *sink) instances() map[string]uint64 {
	out := make(map[string]uint64)
	for name, endpoints := range s.have {
		for _, p := range endpoints {
			out[name+" "+p.Address] = p.Revision
		}
	}
	return out
}

// converge waits until every sink has what Consul has and returns how long that
// took.
func (w *world) converge(what string) time.Duration {
	w.t.Helper()
	began := time.Now()
	testenv.Eventually(w.t, 2*testenv.Patience, "all sinks to have what Consul has after "+what, func() (string, bool) {
		w.mu.Lock()
		defer w.mu.Unlock()
		for n, s := range w.sinks {
			if have := s.instances(); !maps.Equal(w.there, have) {
				return fmt.Sprintf("sink %d (%s) has %d of %d: %.300v", n, s.protocol, len(have), len(w.there), slices.Sorted(maps.Keys(have))), false
			}
		}
		w.addLocked(&verify.Event{Kind: verify.Settled, Names: []string{namespace}})
		return "", true
	})
	return time.Since(began)
}

// bridgePID returns the process of the bridge: that of which its plugins are
// children.
func (w *world) bridgePID() int {
	w.t.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", w.bridge.Registry(w.t, "dc1").PID))
	if err != nil {
		w.t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(text), ") ")
	pid, err := strconv.Atoi(strings.Fields(rest)[1])
	if err != nil {
		w.t.Fatal(err)
	}
	return pid
}

// found returns the violations since the last call.
func (w *world) found() []verify.Violation {
	w.mu.Lock()
	defer w.mu.Unlock()
	v := w.violations
	w.violations = nil
	return v
}
