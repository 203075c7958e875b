package state

import (
	"fmt"
	"math/rand/v2"
	"runtime"
	runtimemetrics "runtime/metrics"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/isthmus-mesh/isthmus/plugin/collection"
	pluginv1 "github.com/isthmus-mesh/isthmus/plugin/proto/isthmus/plugin/v1"
	"github.com/isthmus-mesh/isthmus/server/encode"
)

// Get, Explain and the statuses of registries do not wait for a batch in
// progress, and return what was committed before it, to the last change of it.
func TestReadersDoNotWait(t *testing.T) {
	var e env
	looks := 0
	look := func() (out []string) {
		for _, name := range []string{"a/web", "a/gone", "a/new", "b/web", "b/alone"} {
			if r, ok := e.Get(Kind{Collection: collection.ServiceEntry}, name); ok {
				out = append(out, fmt.Sprint(name, r.Hosts(), r.Endpoints()))
			}
		}
		if _, ok := e.Get(Kind{collection.WorkloadEntry, encode.Workload}, "a/web-1"); ok {
			out = append(out, "a/web-1")
		}
		for _, host := range []string{"web.example.org", "other.example.org", "gone.example.org", "new.example.org", "a/gone"} {
			for _, c := range e.Explain(host) {
				out = append(out, fmt.Sprint("explain ", host, " ", c.Registry, " ", c.Name, " ", c.Outcome, " by ", c.Owner, " ", c.Endpoints))
			}
		}
		for _, st := range e.Registries() {
			out = append(out, fmt.Sprint(st.Registry, " has ", st.Resources[collection.ServiceEntry], ", problems ", e.Registry(st.Registry).Status().ProblemCount))
		}
		e.Waits()
		e.Hosts()
		return out
	}
	before := []string{
		"a/web[web.example.org] 1", "a/gone[gone.example.org] 0", "b/alone[alone.example.org] 0", "a/web-1",
		"explain web.example.org a a/web served by  1", "explain web.example.org b b/web shadowed by a 1",
		"explain gone.example.org a a/gone served by  0", "explain a/gone a a/gone served by  0",
		"a has 2, problems 0", "b has 1, problems 1",
	}
	armed := false
	e = newEnv(t, Options{Selector: func(name string) string {
		if armed && !e.apply.TryLock() { // in the middle of the message
			if looks++; looks == 1 {
				if d := cmp.Diff(before, look()); d != "" {
					t.Errorf("in the middle of a batch (-want +got):\n%s", d)
				}
			}
		} else if armed {
			e.apply.Unlock()
		}
		return name
	}}, "a", "b")
	a, b := e.Registry("a"), e.Registry("b")
	a.Apply(upserts(entry("a/web", "web.example.org"), instance("a/web", "a/web-1", "10.0.0.1"), entry("a/gone", "gone.example.org")))
	b.Apply(upserts(entry("b/web", "web.example.org"), instance("b/web", "b/web-1", "10.0.0.2"), entry("b/alone", "alone.example.org")))
	if d := cmp.Diff(before, look()); d != "" {
		t.Fatalf("before (-want +got):\n%s", d)
	}
	armed = true
	a.Apply(&pluginv1.WatchResponse{
		Removals: []*pluginv1.Removal{gone(collection.ServiceEntry, "a/gone"), gone(collection.WorkloadEntry, "a/web-1")},
		Upserts:  []*pluginv1.Upsert{entry("a/web", "other.example.org"), entry("a/new", "new.example.org")},
	})
	if looks == 0 {
		t.Fatal("nobody looked in the middle of the batch")
	}
	want := []string{
		"a/web[other.example.org] 0", "a/new[new.example.org] 0", "b/web[web.example.org] 1", "b/alone[alone.example.org] 0",
		"explain web.example.org b b/web served by  1", "explain other.example.org a a/web served by  0",
		"explain new.example.org a a/new served by  0", "a has 2, problems 0", "b has 2, problems 0",
	}
	if d := cmp.Diff(want, look()); d != "" {
		t.Errorf("after the batch (-want +got):\n%s", d)
	}
}

// Beside writers of two registries, a reader gets by name nothing older than
// what it has read of the changes.
func TestGetIsNotOlderThanChanges(t *testing.T) {
	e := newEnv(t, Options{Tombstones: 4, Conflicts: []ConflictRule{{Hosts: []string{"*-1.example.org"}, Policy: Merge}}}, "a", "b")
	services := Kind{Collection: collection.ServiceEntry, Shape: encode.Workload}
	var writers, readers sync.WaitGroup
	done := make(chan struct{})
	for _, registry := range []string{"a", "b"} {
		writers.Go(func() {
			r := rand.New(rand.NewPCG(1, uint64(registry[0])))
			for n := range 400 {
				m := &pluginv1.WatchResponse{}
				for i := range 6 {
					name := fmt.Sprintf("%s/s-%d", registry, i)
					switch r.IntN(4) {
					case 0:
						m.Removals = append(m.Removals, gone(collection.ServiceEntry, name))
					case 1:
						m.Upserts = append(m.Upserts, entry(name, fmt.Sprintf("s-%d.example.org", i)), instance(name, name+"-1", "10.0.0."+strconv.Itoa(n%200)))
					case 2:
						m.Upserts = append(m.Upserts, entry(name, fmt.Sprintf("n-%d.%s.example.org", n, registry)))
					}
				}
				if err := e.Registry(registry).Apply(m); err != nil {
					t.Error(err)
				}
			}
		})
	}
	for range 2 {
		readers.Go(func() {
			var c Cursor
			for over := false; !over; {
				select {
				case <-done:
					over = true
				default:
				}
				for change := range e.Changes(services, &c) {
					r, ok := e.Get(services, change.Name)
					e.Explain("s-1.example.org")
					if change.Removed || over {
						if over && ok == change.Removed {
							t.Errorf("%s: there %v, at the end removed %v", change.Name, ok, change.Removed)
						}
						continue
					}
					if ok && number(r) < number(change.Record) && number(r) > 0 {
						t.Errorf("%s is %v by name, and was %v before", change.Name, r.Hosts(), change.Record.Hosts())
					}
				}
				if c.Lost {
					c = Cursor{}
				}
			}
		})
	}
	writers.Wait()
	close(done)
	readers.Wait()
	for _, table := range e.tables {
		if n := table.Begun(); n > 0 {
			t.Errorf("%s: %d names of no batch", table.name, n)
		}
	}
	if e.hosts.Begun() > 0 {
		t.Error("hosts or verdicts of no batch")
	}
}

// number returns n of the host n-<n>.<registry>.example.org, 0 for others.
func number(r *Record) (n int) {
	_, _ = fmt.Sscanf(r.Hosts()[0], "n-%d.", &n)
	return n
}

// BenchmarkBesideFlood is how long Get, Explain and Registries take while a
// registry changes 1,000 instances of 100 services in each message, without
// end. The longest also has what the scheduler adds on a busy machine; blocked
// is how long they wait for locks, for each message.
func BenchmarkBesideFlood(b *testing.B) {
	e := newEnv(b, Options{}, "dc1")
	message := func(turn int) *pluginv1.WatchResponse {
		m := &pluginv1.WatchResponse{}
		for s := range 100 {
			name := fmt.Sprintf("ns/s%d", s)
			m.Upserts = append(m.Upserts, entry(name, fmt.Sprintf("s%d.example.org", s)))
			for i := range 10 {
				m.Upserts = append(m.Upserts, instance(name, fmt.Sprintf("%s-%d", name, i), fmt.Sprintf("10.%d.0.%d", turn, i)))
			}
		}
		return m
	}
	flood := []*pluginv1.WatchResponse{message(0), message(1)}
	e.Registry("dc1").Apply(flood[0])
	var group sync.WaitGroup
	done := make(chan struct{})
	var batches []time.Duration
	group.Go(func() {
		for n := 1; ; n++ {
			select {
			case <-done:
				return
			default:
			}
			start := time.Now()
			if err := e.Registry("dc1").Apply(flood[n%2]); err != nil {
				b.Error(err)
			}
			batches = append(batches, time.Since(start))
		}
	})
	var gets, explains, registries []time.Duration
	blocked := waited()
	for b.Loop() {
		start := time.Now()
		if _, ok := e.Get(Kind{Collection: collection.ServiceEntry}, "ns/s7"); !ok {
			b.Fatal("ns/s7 is not there")
		}
		got := time.Now()
		e.Explain("s7.example.org")
		explained := time.Now()
		e.Registries()
		registries = append(registries, time.Since(explained))
		gets, explains = append(gets, got.Sub(start)), append(explains, explained.Sub(got))
		runtime.Gosched()
	}
	blocked = waited() - blocked
	close(done)
	group.Wait()
	b.ReportMetric(float64(blocked.Microseconds())/1000/float64(len(batches)), "blocked-ms/message")
	for name, took := range map[string][]time.Duration{"get": gets, "explain": explains, "registries": registries, "batch": batches} {
		slices.Sort(took)
		ms := func(n int) float64 { return float64(took[n].Microseconds()) / 1000 }
		b.ReportMetric(ms(len(took)*999/1000), name+"-p99.9-ms")
		b.ReportMetric(ms(len(took)-1), name+"-longest-ms")
	}
}

// waited is how long goroutines have waited for locks.
func waited() time.Duration {
	s := []runtimemetrics.Sample{{Name: "/sync/mutex/wait/total:seconds"}}
	runtimemetrics.Read(s)
	return time.Duration(s[0].Value.Float64() * float64(time.Second))
}
