package server

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"runtime"
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/isthmus-mesh/isthmus/plugin/collection"
	pluginv1 "github.com/isthmus-mesh/isthmus/plugin/proto/isthmus/plugin/v1"
	"github.com/isthmus-mesh/isthmus/plugin/registry"
	"github.com/isthmus-mesh/isthmus/server/admin"
	"github.com/isthmus-mesh/isthmus/server/config"
	"github.com/isthmus-mesh/isthmus/server/encode"
	"github.com/isthmus-mesh/isthmus/server/view"
	"github.com/isthmus-mesh/isthmus/translate"
)

// BenchmarkMemory is what an instance costs for as long as it is there: the
// live bytes of the heap, divided by the number of instances, of a bridge with
// 100,000 in services of 10. It takes them as messages of a plugin, and serves
// all of it to a state-of-the-world sink of the shape inline and to a delta
// sink of the shape workload. One iteration is enough.
func BenchmarkMemory(b *testing.B) {
	const services, each = 10_000, 10
	for b.Loop() {
		before := live()
		s, subs := loaded(b, services, each)
		after := live()
		b.ReportMetric(float64(after-before)/(services*each), "live-B/instance")
		runtime.KeepAlive(s)
		runtime.KeepAlive(subs)
	}
}

// live returns the bytes of the heap that are in use.
func live() uint64 {
	runtime.GC()
	runtime.GC() // what the first one found to be finalized
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}

// loaded returns a server, not running, that was given services by a plugin,
// and what sinks of both shapes follow it with.
func loaded(b *testing.B, services, each int) (*Server, []*view.Subscription) {
	b.Helper()
	cfg, err := config.Parse("isthmus.yaml", []byte("registries: [{name: consul, type: sim}]"), config.Options{Adapters: []string{"sim"}})
	if err != nil {
		b.Fatal(err)
	}
	s, err := New(cfg, Options{})
	if err != nil {
		b.Fatal(err)
	}
	t, err := translate.New("consul", translate.Options{})
	if err != nil {
		b.Fatal(err)
	}
	r := s.db.Registry("consul")
	r.Begin([]string{collection.ServiceEntry, collection.WorkloadEntry})
	var m pluginv1.WatchResponse
	send := func() {
		// Through the wire, as the bridge owns what it decoded.
		raw, err := proto.Marshal(&m)
		if err != nil {
			b.Fatal(err)
		}
		var decoded pluginv1.WatchResponse
		if err := proto.Unmarshal(raw, &decoded); err != nil {
			b.Fatal(err)
		}
		r.Apply(&decoded)
		m.Reset()
	}
	for i := range services {
		name := fmt.Sprintf("service-%d", i)
		instances := make([]registry.Instance, each)
		for j := range instances {
			instances[j] = registry.Instance{
				ID: fmt.Sprintf("%s-%d", name, j), Address: fmt.Sprintf("10.%d.%d.%d", i/250%250, i%250, j+1), Ports: []registry.Port{{Number: 8080}},
				Meta: map[string]string{"version": "v1"},
			}
		}
		result := t.Service(registry.Service{Key: registry.Key{Name: name}}, instances, nil)
		m.Upserts = append(m.Upserts, &pluginv1.Upsert{Resource: result.Entry.Resource, Service: result.Entry.Name})
		for _, e := range result.Endpoints {
			m.Upserts = append(m.Upserts, &pluginv1.Upsert{Resource: e.Resource, Service: result.Entry.Name})
		}
		if len(m.GetUpserts()) >= 1000 {
			send()
		}
	}
	m.Synced = true
	send()
	if n := len(r.Problems()); n > 0 {
		b.Fatalf("%d problems", n)
	}

	inline, workload := encode.Form{Address: true}, encode.Form{Shape: encode.Workload}
	subs := []*view.Subscription{
		view.NewSubscription(s.view, view.Options{Collection: collection.ServiceEntry, Form: inline}),
		view.NewSubscription(s.view, view.Options{Collection: collection.WorkloadEntry, Form: inline}),
		view.NewSubscription(s.view, view.Options{Collection: collection.ServiceEntry, Form: workload, Framing: view.DeltaXDS}),
		view.NewSubscription(s.view, view.Options{Collection: collection.WorkloadEntry, Form: workload, Framing: view.DeltaXDS}),
	}
	sent := make([]int, len(subs))
	for i, sub := range subs {
		for {
			resp, ok, err := sub.Next()
			if err != nil {
				b.Fatal(err)
			}
			if !ok {
				break
			}
			sent[i] += resp.Resources
			sub.Ack(resp.Nonce, false)
		}
	}
	if sent[0] != services || sent[1] != 0 || sent[2] != services || sent[3] != services*each {
		b.Fatalf("sent %v resources", sent)
	}
	return s, subs
}

// BenchmarkServicesPage is a page of 100 services of 100,000, as a person asks
// for it in the middle of the list.
func BenchmarkServicesPage(b *testing.B) {
	s, subs := loaded(b, 100_000, 1)
	h := admin.New(listed{source{s}}, admin.Options{})
	for b.Loop() {
		r := httptest.NewRecorder()
		h.ServeHTTP(r, httptest.NewRequest(http.MethodGet, "/services?after=m", nil))
		if r.Code != http.StatusOK {
			b.Fatal(r.Code)
		}
	}
	runtime.KeepAlive(subs)
}

// listed is the source of a server that does not run.
type listed struct{ source }

func (listed) Overview() admin.Overview { return admin.Overview{} }
