package plugin

import (
	"context"
	"fmt"
	"runtime"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/isthmus-mesh/isthmus/plugin/collection"
	pluginv1 "github.com/isthmus-mesh/isthmus/plugin/proto/isthmus/plugin/v1"
	"github.com/isthmus-mesh/isthmus/plugin/registry"
	"github.com/isthmus-mesh/isthmus/plugin/wire"
)

// A catalog keeps within the limits that the host tells: what is new beyond
// them is left out and what would grow beyond them is kept as it was, both are
// listed with the field that sets the limit, and what goes makes room.
func TestCatalogLimits(t *testing.T) {
	t.Parallel()
	resources := func(c *catalog) (n, services, size uint64) {
		for id, sl := range c.slots {
			if len(sl.claims) > 0 {
				n++
				size += uint64(len(sl.bytesLocked()))
				if id.collection == collection.ServiceEntry {
					services++
				}
			}
			if s := c.services[registry.Key{Name: strings.TrimPrefix(id.name, "ns/")}]; s != nil && s.serving {
				for e := range s.result.Each() {
					if c.slots[resourceID{collection.WorkloadEntry, e.Name}] == nil {
						n++
						size += uint64(len(e.Resource))
					}
				}
			}
		}
		return n, services, size
	}
	for _, tt := range []struct {
		limits limits
		field  string
	}{
		{limits{resources: 9}, "limits.resources_per_registry (9)"},
		{limits{services: 5}, "limits.services_per_registry (5)"},
		{limits{bytes: 1000}, "limits.bytes_per_registry (1000)"},
	} {
		c := newCatalog(named{plainTranslator{}}, []string{collection.ServiceEntry, collection.WorkloadEntry}, tt.limits)
		m, r := newMirror(), c.read()
		c.Set(service1("live"), instances("1", "2"))
		for n := range 1000 {
			c.Set(service1(fmt.Sprint("s", n)), instances("1"))
		}
		c.Publish(publishedEntry("ns/pub", strings.Repeat("h", 60)+".example.org"))
		drain(t, r, m)
		kept := len(c.services)
		if n, services, size := resources(c); c.used != (usage{n, services, size}) || tt.limits.resources > 0 && n > tt.limits.resources || tt.limits.services > 0 && services > tt.limits.services || tt.limits.bytes > 0 && size > tt.limits.bytes || kept < 3 || kept > 20 {
			t.Errorf("%s: %d services, %d resources of %d bytes, counted %+v", tt.field, kept, n, size, c.used)
		}
		for _, id := range []string{"service s999", "resource networking.istio.io/ServiceEntry ns/pub"} {
			if !strings.Contains(m.problems[id], "left out") || !strings.Contains(m.problems[id], tt.field) {
				t.Errorf("%s: %s: %q", tt.field, id, m.problems[id])
			}
		}
		before := fmt.Sprint(m.resources)
		c.Set(service1("live"), instances("1", "2", "3", "4", "5", "6", "7", "8", "9", "10", "11", "12", "13"))
		drain(t, r, m)
		got, grows := fmt.Sprint(m.resources), tt.limits.services > 0 // in instances
		if grows && (got == before || m.problems["service live"] != "") {
			t.Errorf("%s: a service does not grow in instances: problem %q", tt.field, m.problems["service live"])
		}
		if !grows && (got != before || !strings.Contains(m.problems["service live"], "kept as it was")) {
			t.Errorf("%s: a service that grew is %s, it was %s; problem %q", tt.field, got, before, m.problems["service live"])
		}
		c.Set(service1("live"), instances("2")) // shrinks
		for n := range 1000 {
			c.Remove(registry.Key{Name: fmt.Sprint("s", n)})
		}
		c.Publish(publishedEntry("ns/pub", strings.Repeat("h", 60)+".example.org"))
		drain(t, r, m)
		if n, services, size := resources(c); c.used != (usage{n, services, size}) || n != 3 || len(m.problems) != 0 {
			t.Errorf("%s: afterwards %d resources of %d bytes, counted %+v, problems %v", tt.field, n, size, c.used, m.problems)
		}
		c.Withdraw(collection.ServiceEntry, "ns/pub")
		c.Remove(registry.Key{Name: "live"})
		if c.used != (usage{}) {
			t.Errorf("%s: of nothing %+v is counted", tt.field, c.used)
		}
	}
}

// However many problems there are, what they cost is bounded; how many there
// are is said as far as it is known, and once others are solved they are listed
// when they are found again.
func TestProblemsCostLittle(t *testing.T) {
	c := testCatalog()
	r := c.read()
	heap := func() int64 {
		var m runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&m)
		return int64(m.HeapAlloc)
	}
	const many, most = 950_000, 30 << 20
	problem := func(n int, reason string) { c.Problem(fmt.Sprint("service number ", n), reason) }
	before := heap()
	for n := range many {
		problem(n, "it has no address that can be used")
	}
	if grown := heap() - before; grown > most {
		t.Errorf("%d problems cost %d MB", many, grown>>20)
	}
	m := newMirror()
	drain(t, r, m)
	if want := fmt.Sprintf("and more than %d more;", maxSpare+maxCounted); len(m.problems) != maxProblems+1 || !strings.HasPrefix(m.problems[moreID], want) {
		t.Errorf("%d are listed, closing with %q", len(m.problems), m.problems[moreID])
	}
	// Problems that come and go while the host takes nothing leave nothing
	// behind.
	for n := range many {
		c.Problem("service odd", "odd")
		c.Problem("service odd", "")
		problem(many+n, "it comes")
		problem(many+n, "")
	}
	if n := len(r.problems.unsent); n > 2 {
		t.Errorf("%d problems are to be sent", n)
	}
	for n := range maxProblems + maxSpare {
		problem(n, "")
	}
	problem(many-1, "it has no address that can be used")
	drain(t, r, m)
	if len(m.problems) != 2 || m.problems[fmt.Sprint("service number ", many-1)] == "" {
		t.Errorf("%d are listed once others are solved", len(m.problems))
	}
	runtime.KeepAlive(c)
}

// What the adapter hears goes with the next message of any kind, once, and
// makes none.
func TestHeard(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := testServer(t, nil)
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		stream := newTestStream(ctx)
		done := make(chan error, 1)
		go func() { done <- s.Watch(nil, stream) }()
		want := func(when string, at time.Time, m *pluginv1.WatchResponse) {
			t.Helper()
			switch got := m.GetLastHeard(); {
			case at.IsZero() && got != nil, !at.IsZero() && (got == nil || !got.AsTime().Equal(at)):
				t.Errorf("%s: heard %v, want %v", when, got, at)
			}
		}
		want("at first", time.Time{}, <-stream.sent)
		time.Sleep(wire.Heartbeat / 2)
		heard := time.Now()
		s.catalog.Heard()
		m := <-stream.sent
		if time.Since(heard) != wire.Heartbeat/2 {
			t.Errorf("a message came %v after", time.Since(heard))
		}
		want("sign of life", heard, m)
		if m = <-stream.sent; proto.Size(m) != 0 {
			t.Errorf("the next sign of life is %v", m)
		}
		heard = time.Now()
		s.catalog.Heard()
		s.catalog.Detail("polling")
		want("state", heard, <-stream.sent)
		cancel()
		<-done

		// A new stream begins with what is known.
		stream = newTestStream(t.Context())
		ctx, cancel = context.WithCancel(t.Context())
		stream.ctx = ctx
		go func() { done <- s.Watch(nil, stream) }()
		want("new stream", heard, <-stream.sent)
		cancel()
		<-done
	})
}
