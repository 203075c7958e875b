package consul

import (
	"net/http"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hashicorp/consul/api"
)

// requests returns how many requests there were since the last call.
func (f *fakeConsul) requests() (n int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, calls := range f.calls {
		n += calls
	}
	clear(f.calls)
	return n
}

// behindBalancer is a fake with so many services behind a balancer that ends
// waits after a while with a status.
func behindBalancer(t *testing.T, services int, passes time.Duration, status int) *fakeConsul {
	f := newFake(t)
	for i := range services {
		name := "svc" + strconv.Itoa(i)
		f.set(name, entry(name, "a", 80), entry(name, "b", 80))
	}
	f.passes, f.ends = passes, status
	return f
}

// TestBalancerEndsWaits shows a balancer that ends each query that waits for
// more than a minute: that is no outage, queries soon wait for less, and the
// detail says so.
func TestBalancerEndsWaits(t *testing.T) {
	for _, status := range []int{http.StatusGatewayTimeout, http.StatusBadGateway} {
		synctest.Test(t, func(t *testing.T) {
			const n = 100
			f := behindBalancer(t, n, time.Minute, status)
			r, _ := startFake(t, f)
			time.Sleep(5 * time.Minute)
			f.requests()
			time.Sleep(time.Hour)
			quiet := f.requests()
			began := time.Now()
			f.set("svc1", entry("svc1", "a", 80))
			removed := time.Duration(0)
			for removed = 0; len(r.view()["svc1"]) > 1 && removed < time.Minute; removed = time.Since(began) {
				time.Sleep(100 * time.Millisecond)
			}
			_, calls := r.state()
			t.Logf("%d: %d requests an hour, %d changes of the degraded text, a removal took %v; detail %q", status, quiet, calls, removed, r.held().Detail)
			// Waits of 49 s on average are 7,300 for the services.
			if quiet > 9_000 {
				t.Errorf("%d requests in a quiet hour", quiet)
			}
			if calls > 0 {
				t.Errorf("degraded %d times: %q", calls, r.held().Reasons[0])
			}
			if removed > 3*time.Second {
				t.Errorf("a removal took %v", removed)
			}
			if d := r.held().Detail; !strings.Contains(d, strconv.Itoa(status)) || !strings.Contains(d, "after 1m0s") {
				t.Errorf("the detail does not say how long queries may wait: %q", d)
			}
		})
	}
}

// TestBalancerConfigured shows that queries wait for longer again once the
// balancer lets them.
func TestBalancerConfigured(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := behindBalancer(t, 50, time.Minute, http.StatusGatewayTimeout)
		r, _ := startFake(t, f)
		time.Sleep(10 * time.Minute)
		if r.held().Detail == "" {
			t.Error("no detail while queries are ended early")
		}
		f.change(func() { f.passes = 0 })
		time.Sleep(2 * time.Hour)
		f.requests()
		time.Sleep(time.Hour)
		// 52 queries that wait for five minutes, less up to a tenth.
		if n := f.requests(); n > 52*14 {
			t.Errorf("%d requests in an hour without a balancer", n)
		}
		if d := r.held().Detail; d != "" {
			t.Errorf("detail %q", d)
		}
	})
}

// TestBalancerOfDeadConsul shows that a Consul which answers nothing any more
// is an outage behind a balancer, too: its answer to a query that Consul should
// have answered before, and to one that does not wait.
func TestBalancerOfDeadConsul(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := behindBalancer(t, 3, 30*time.Second, http.StatusGatewayTimeout)
		r, _ := startFake(t, f)
		time.Sleep(10 * time.Minute)
		before := r.view()
		f.change(func() {
			f.answer = func(w http.ResponseWriter, r *http.Request) bool {
				select {
				case <-time.After(30 * time.Second):
					http.Error(w, "upstream request timeout", http.StatusGatewayTimeout)
				case <-r.Context().Done():
				}
				return true
			}
		})
		time.Sleep(5 * time.Minute)
		wantState(t, r, "504")
		wantView(t, r, before)
		f.setAnswer(nil)
		time.Sleep(3 * time.Minute)
		wantState(t, r, "")
	})
}

// TestBalancerReplaced shows a balancer that answers with 502 as the server
// behind it ends, whose successor is empty: that is noticed, and nothing is
// removed before the grace period has ended.
func TestBalancerReplaced(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := behindBalancer(t, 3, 0, http.StatusBadGateway)
		r, _ := startFake(t, f)
		time.Sleep(20 * time.Second)
		f.replace(5)
		f.cut("")
		time.Sleep(15 * time.Second)
		wantState(t, r, "remove_grace")
		if len(r.view()) != 3 {
			t.Errorf("removed within the grace period: %v", r.view())
		}
		f.set("svc0", entry("svc0", "c", 81))
		f.set("svc1", []*api.ServiceEntry{entry("svc1", "a", 80), entry("svc1", "b", 80)}...)
		time.Sleep(2 * time.Minute)
		wantView(t, r, map[string][]string{
			"svc0": {"n1/c 10.0.0.1:81 passing"},
			"svc1": {"n1/a 10.0.0.1:80 passing", "n1/b 10.0.0.1:80 passing"},
		})
	})
}
