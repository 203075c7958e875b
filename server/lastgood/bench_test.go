package lastgood

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/protobuf/proto"
	networking "istio.io/api/networking/v1alpha3"

	"github.com/isthmus-mesh/isthmus/internal/testresource"
	pluginv1 "github.com/isthmus-mesh/isthmus/plugin/proto/isthmus/plugin/v1"
	"github.com/isthmus-mesh/isthmus/server/state"
)

// perService is the number of instances of each service of a large state.
const perService = 10

func newDB(_ testing.TB, names ...string) *state.DB {
	return state.New(names, state.Options{MaxResources: 2_000_000, MaxBytes: 1 << 30}, slog.New(slog.DiscardHandler), prometheus.NewRegistry())
}

// resource encodes a resource as adapters do.
func resource(name, service string, body proto.Message) *pluginv1.Upsert {
	m := testresource.Named(name)
	m.Annotations = map[string]string{"isthmus.io/registry": "dc1"}
	return &pluginv1.Upsert{Resource: testresource.Encode(m, body), Service: service}
}

func entry(name string) *pluginv1.Upsert {
	return resource(name, name, &networking.ServiceEntry{
		Hosts: []string{filepath.Base(name) + ".dc1.example.org"}, Resolution: networking.ServiceEntry_STATIC,
		Ports: []*networking.ServicePort{{Number: 80, Name: "http", Protocol: "HTTP"}},
	})
}

func instance(service string, n int, weight uint32) *pluginv1.Upsert {
	return resource(fmt.Sprintf("%s-%d", service, n), service, &networking.WorkloadEntry{
		Address: netip.AddrFrom4([4]byte{10, byte(n >> 16), byte(n >> 8), byte(n)}).String(), Ports: map[string]uint32{"http": 8080}, Weight: weight,
		Labels:   map[string]string{"version": "v1", "app": filepath.Base(service), "isthmus.io/instance": fmt.Sprintf("%s-%d", filepath.Base(service), n)},
		Locality: "eu-1/a", ServiceAccount: "default",
	})
}

// fill gives a registry services of perService instances.
func fill(t testing.TB, r *state.Registry, services int) {
	t.Helper()
	r.Begin([]string{"networking.istio.io/ServiceEntry", "networking.istio.io/WorkloadEntry"})
	m := new(pluginv1.WatchResponse)
	for i := range services {
		name := fmt.Sprintf("dc1/service-%06d", i)
		m.Upserts = append(m.Upserts, entry(name))
		for j := range perService {
			m.Upserts = append(m.Upserts, instance(name, i*perService+j, 0))
		}
		if len(m.GetUpserts()) > 10_000 {
			r.Apply(m)
			m = new(pluginv1.WatchResponse)
		}
	}
	m.Synced = true
	r.Apply(m)
}

func newRegistry() prometheus.Registerer { return prometheus.NewRegistry() }

func open(t testing.TB, db *state.DB, dir string, registries ...Registry) *Store {
	t.Helper()
	s, err := Open(db, Options{Dir: dir, Registries: registries, Log: slog.New(slog.DiscardHandler), Metrics: prometheus.NewRegistry()})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// BenchmarkRestore is the time from the opening of the directory until
// 1,000,000 instances in 100,000 services are in the state, collections open.
func BenchmarkRestore(b *testing.B) {
	dir := b.TempDir()
	dc1 := Registry{"dc1", "sim"}
	db := newDB(b, "dc1")
	began := time.Now()
	fill(b, db.Registry("dc1"), 100_000)
	b.Logf("filled in %s", time.Since(began))
	s := open(b, db, dir, dc1)
	began = time.Now()
	s.end()
	b.Logf("written in %s: %d MB", time.Since(began), s.Status().Bytes>>20)
	if why := s.Status().Writing; why != "" {
		b.Fatal(why)
	}
	db, s = nil, nil
	for b.Loop() {
		db := newDB(b, "dc1")
		s := open(b, db, dir, dc1)
		s.restoreAll()()
		if st := db.Registry("dc1").Status(); st.Instances != 1_000_000 || st.Services != 100_000 || !db.Synced() {
			b.Fatalf("%+v", st)
		}
		if err := s.Close(); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkWriteBehind is what the hot path takes for a change while 5,000
// instances a second change, of 100,000, with nothing kept on disk and with
// all. Of both there are two turns, as the machine has moods.
func BenchmarkWriteBehind(b *testing.B) {
	const services, batch, pause, seconds = 10_000, 50, 10 * time.Millisecond, 3
	db := newDB(b, "dc1")
	r := db.Registry("dc1")
	fill(b, r, services)
	var messages []*pluginv1.WatchResponse // made before, so that their cost is not counted
	for round := range 2 * seconds * int(time.Second/pause) {
		m := new(pluginv1.WatchResponse)
		for j := range batch {
			i := (round*batch + j) * 7919 % services
			m.Upserts = append(m.Upserts, instance(fmt.Sprintf("dc1/service-%06d", i), i*perService, uint32(1+round)))
		}
		messages = append(messages, m)
	}
	for turn, name := range []string{"off", "on", "off", "on"} {
		mine := messages[:len(messages)/2]
		if turn%2 == 1 {
			mine = messages[len(messages)/2:]
		}
		b.Run(name, func(b *testing.B) {
			for b.Loop() {
				ctx, cancel := context.WithCancel(b.Context())
				var group sync.WaitGroup
				var s *Store
				if name == "on" {
					s = open(b, db, b.TempDir(), dc1)
					if err := s.pass(false); err != nil {
						b.Fatal(err)
					}
					group.Go(func() { s.loop(ctx) }) // ends with ctx
				}
				before := cpu(b)
				began := time.Now()
				var took []time.Duration
				ticker := time.NewTicker(pause)
				for _, m := range mine {
					<-ticker.C
					at := time.Now()
					r.Apply(m)
					took = append(took, time.Since(at))
				}
				ticker.Stop()
				wall := time.Since(began)
				b.ReportMetric(100*(cpu(b)-before).Seconds()/wall.Seconds(), "cpu-%")
				slices.Sort(took)
				b.ReportMetric(float64(took[len(took)/2])/batch, "p50-ns/change")
				b.ReportMetric(float64(took[len(took)*99/100])/batch, "p99-ns/change")
				cancel()
				group.Wait()
				if s != nil {
					if why := s.Status().Writing; why != "" {
						b.Fatal(why)
					}
					b.ReportMetric(float64(s.Status().Bytes)/1e6, "file-MB")
				}
			}
		})
	}
}

// cpu returns the time that the process has spent on processors.
func cpu(b *testing.B) time.Duration {
	b.Helper()
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		b.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
