package consul

import (
	"bytes"
	"log/slog"
	"math/rand/v2"
	"net/http"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/isthmus-mesh/isthmus/adapters/consul/plan"
	"github.com/isthmus-mesh/isthmus/plugin"
	"github.com/isthmus-mesh/isthmus/plugin/plugintest"
)

// crowd returns a fake of n services over plain HTTP, svc0 and so on, of one
// instance each with the port 80.
func crowd(t *testing.T, n int) *fakeConsul {
	f := newFake(t)
	f.http1 = true
	for i := range n {
		f.set("svc"+strconv.Itoa(i), entry("svc", "i", 80))
	}
	return f
}

// More services than connections are a line of the log, and fewer are not,
// though some wait for their place at the start.
func TestCrowdIsLogged(t *testing.T) {
	for n, want := range map[int]int{30: 0, 300: 1} {
		synctest.Test(t, func(t *testing.T) {
			var log bytes.Buffer
			a, err := newAdapter(config(func(c *Config) { c.MaxConnections = 56 }), plugin.Env{Registry: "test", Log: slog.New(slog.NewTextHandler(&log, nil))})
			if err != nil {
				t.Fatal(err)
			}
			r, stop := startOver(t, a, crowd(t, n))
			time.Sleep(time.Minute)
			if sets, _, _ := r.counts(); sets != n {
				t.Errorf("%d services, want %d", sets, n)
			}
			stop()
			if got := strings.Count(log.String(), "more services than connections"); got != want {
				t.Errorf("%d services: %d lines, want %d:\n%s", n, got, want, &log)
			}
		})
	}
}

// ports returns how many of the services that the catalog holds have the port.
func (r *recorder) ports(port int) (n int) {
	r.Look(func(h *plugintest.Held) {
		for _, instances := range h.Instances {
			if instances[0].Ports[0].Number == port {
				n++
			}
		}
	})
	return n
}

// healthCalls returns how many requests there were about services since the
// last call.
func (f *fakeConsul) healthCalls() (n int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for path, calls := range f.calls {
		if strings.HasPrefix(path, "/v1/health/service/") {
			n += calls
			f.calls[path] = 0
		}
	}
	return n
}

// TestTurns shows more services than connections: there are never more queries
// at a time, each service is followed, whatever of it changes, and nothing is
// asked for while nothing changes.
func TestTurns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const n = 300
		f := crowd(t, n)
		r, _ := startFake(t, f)
		time.Sleep(5 * time.Second)
		if sets, _, synced := r.counts(); sets != n || !synced {
			t.Fatalf("%d sets, synced %t; want %d and true", sets, synced, n)
		}
		// As README.md says: a second between two answers about
		// the same table, and 2 ms for each service at rest between two sweeps.
		const bound = listEvery + plan.SweepAnyway
		for i := range n {
			f.set("svc"+strconv.Itoa(i), entry("svc", "i", 81))
			if i%3 == 0 {
				time.Sleep(50 * time.Millisecond)
			}
		}
		time.Sleep(bound)
		if got := r.ports(81); got != n {
			t.Errorf("%d services of %d have changed", got, n)
		}
		for i := range n {
			f.flip(&f.checks, "svc"+strconv.Itoa(i), entry("svc", "i", 82))
		}
		time.Sleep(bound)
		if got := r.ports(82); got != n {
			t.Errorf("%d services of %d have changed by their checks", got, n)
		}
		for i := range n {
			f.flip(&f.nodes, "svc"+strconv.Itoa(i), entry("svc", "i", 83))
		}
		time.Sleep(bound)
		if got := r.ports(83); got != n {
			t.Errorf("%d services of %d have changed by their nodes", got, n)
		}
		if sets, removes, _ := r.counts(); sets != 4*n || removes != 0 {
			t.Errorf("%d sets, %d removes; want %d and 0", sets, removes, 4*n)
		}
		f.mu.Lock()
		most := f.most
		f.mu.Unlock()
		if places := 108; most > 128 || most < places*3/4 {
			t.Errorf("%d queries at a time, want %d to 128", most, places*3/4)
		}

		time.Sleep(5 * time.Minute)
		f.healthCalls()
		time.Sleep(time.Hour)
		// A turn is half a minute long, and who rests asks once in some five
		// minutes, as a query that waits does.
		if calls, want := f.healthCalls(), 300*15; calls > want {
			t.Errorf("%d health queries in a quiet hour, want no more than %d", calls, want)
		}
		if _, calls := r.state(); calls != 0 {
			t.Errorf("degraded: %q", r.held().Reasons)
		}
		if detail := r.held().Detail; !strings.Contains(detail, "300 services share 108 connections") {
			t.Errorf("detail %q", detail)
		}

		// With fewer services each has a connection.
		for i := 90; i < n; i++ {
			f.set("svc" + strconv.Itoa(i))
		}
		time.Sleep(5 * time.Minute)
		if detail := r.held().Detail; detail != "" {
			t.Errorf("detail %q with a connection for each service", detail)
		}
		f.set("svc1", entry("svc", "i", 84))
		synctest.Wait()
		if got, left := r.ports(84), r.ports(83); got != 1 || left != 89 {
			t.Errorf("%d services changed at once and %d stayed, want 1 and 89", got, left)
		}
	})
}

// TestTurnsOverHTTP2 shows that nothing takes turns where queries share
// connections.
func TestTurnsOverHTTP2(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const n = 300
		f := crowd(t, n)
		f.http1 = false
		r, _ := startFake(t, f)
		time.Sleep(5 * time.Second)
		f.mu.Lock()
		now := f.now
		f.mu.Unlock()
		if now != n+2 {
			t.Errorf("%d queries wait, want one for each service, one for the listing and one for service-defaults", now)
		}
		if n := f.count(criticalPath) + f.count(nodesPath); n != 0 {
			t.Errorf("%d queries about checks and nodes", n)
		}
		if detail := r.held().Detail; detail != "" {
			t.Errorf("detail %q", detail)
		}
	})
}

// TestTurnsReplaced shows that what a replaced server lacks is kept for the
// grace period for services at rest too, and followed again afterwards.
func TestTurnsReplaced(t *testing.T) {
	for name, low := range map[string]uint64{"index lower": 20, "index higher": 2000} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				const n = 300
				f := crowd(t, n)
				r, _ := startFake(t, f)
				time.Sleep(time.Minute)
				f.setDown(errRefused)
				time.Sleep(5 * time.Minute)
				f.replace(low)
				f.setDown(nil)
				time.Sleep(10 * time.Second)
				if got := r.ports(80); got != n {
					t.Errorf("%d services are left within the grace period", got)
				}
				wantState(t, r, "remove_grace")
				for i := range n / 2 {
					f.set("svc"+strconv.Itoa(i), entry("svc", "i", 80))
				}
				time.Sleep(time.Minute)
				if got := r.ports(80); got != n/2 {
					t.Errorf("%d services are left, want the %d that are there", got, n/2)
				}
				wantState(t, r, "")
				for i := range n / 2 {
					f.flip(&f.checks, "svc"+strconv.Itoa(i), entry("svc", "i", 81))
				}
				time.Sleep(3 * time.Second)
				if got := r.ports(81); got != n/2 {
					t.Errorf("%d services of %d have changed", got, n/2)
				}
			})
		})
	}
}

// TestTurnsRefused shows a server that takes fewer connections than are
// configured: the watches make do with fewer, and follow everything.
func TestTurnsRefused(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const n, limit = 200, 70
		f := crowd(t, n)
		f.setAnswer(func(w http.ResponseWriter, r *http.Request) bool {
			f.mu.Lock()
			over := f.now > limit
			f.mu.Unlock()
			return over && status(http.StatusTooManyRequests, "Your IP is issuing too many concurrent connections, please rate limit your calls")(w, r)
		})
		r, _ := startFake(t, f)
		time.Sleep(5 * time.Minute)
		all := strings.Join(r.held().Reasons, "\n")
		if !strings.Contains(all, "max_connections") {
			t.Errorf("degraded with %q, want max_connections in it", all)
		}
		wantState(t, r, "")
		f.mu.Lock()
		f.most = 0
		f.mu.Unlock()
		for i := range n {
			f.set("svc"+strconv.Itoa(i), entry("svc", "i", 81))
		}
		time.Sleep(5 * time.Second)
		if got := r.ports(81); got != n {
			t.Errorf("%d services of %d have changed", got, n)
		}
		wantState(t, r, "")
		f.mu.Lock()
		most := f.most
		f.mu.Unlock()
		if most > limit {
			t.Errorf("%d queries at a time after all, of which the server takes %d", most, limit)
		}
		if _, removes, synced := r.counts(); removes != 0 || !synced {
			t.Errorf("%d removes, synced %t", removes, synced)
		}
	})
}

// TestTurnsRandomly changes services at random times while others come and go,
// and compares what arrived with what is there.
func TestTurnsRandomly(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := crowd(t, 150)
		r, _ := startFake(t, f, func(c *Config) { c.MaxConnections = 64 })
		random := rand.New(rand.NewPCG(1, 2)) //nolint:gosec // the same in each run
		for range 500 {
			time.Sleep(time.Duration(random.IntN(200)) * time.Millisecond)
			name := "svc" + strconv.Itoa(random.IntN(200))
			instance := entry("svc", "i", 1+random.IntN(60000))
			f.mu.Lock()
			_, there := f.services[name]
			f.mu.Unlock()
			switch random.IntN(6) {
			case 0:
				f.set(name)
			case 1:
				if there {
					f.flip(&f.checks, name, instance)
				}
			case 2:
				if there {
					f.flip(&f.nodes, name, instance)
				}
			case 3:
				f.cut("")
			default:
				f.set(name, instance)
			}
		}
		time.Sleep(10 * time.Second)
		want := map[string]int{}
		f.mu.Lock()
		for name, s := range f.services {
			if name != serversService {
				want[name] = s.entries[0].Service.Port
			}
		}
		f.mu.Unlock()
		got := map[string]int{}
		r.Look(func(h *plugintest.Held) {
			for key, instances := range h.Instances {
				got[key] = instances[0].Ports[0].Number
			}
		})
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("ports (-want +got):\n%s", diff)
		}
		wantState(t, r, "")
	})
}

// TestTurnsDivided shows how connections are divided up, for the fewest and for
// many scopes.
func TestTurnsDivided(t *testing.T) {
	for _, test := range []struct{ connections, scopes, places, few, total int }{
		{128, 1, 108, 15, 128},
		{16, 1, 7, 4, 16},
		{1000, 1, 947, 48, 1000},
		{165, 30, 11, 4, 165},
		{16, 10, 7, 4, 61},
	} {
		u := newTurns(test.connections, test.scopes)
		places := u.plan.Most()
		if places != test.places || cap(u.few) != test.few || u.connections != test.total || places+cap(u.few)+test.scopes*ownQueries != u.connections {
			t.Errorf("%d connections, %d scopes: %d places, %d few, %d in all; want %+v",
				test.connections, test.scopes, places, cap(u.few), u.connections, test)
		}
	}
}
