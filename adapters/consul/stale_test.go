package consul

import (
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/isthmus-mesh/isthmus/plugin/plugintest"
)

// TestStale shows answers of any server: the leader is asked to confirm what
// they lack, and where they are too far behind, and the detail says how far
// that is.
func TestStale(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFake(t)
		f.stale = true
		for i := range 20 {
			f.set("svc"+strconv.Itoa(i), entry("svc", "a", 80), entry("svc", "b", 80))
		}
		r, _ := startFake(t, f, func(c *Config) { c.Stale = true })
		time.Sleep(time.Minute)
		leaders := func() (n int) {
			f.mu.Lock()
			defer f.mu.Unlock()
			n, f.leaders = f.leaders, 0
			return n
		}
		wantDetail := func(part string) {
			t.Helper()
			if d := r.held().Detail; !strings.Contains(d, part) {
				t.Errorf("detail %q, want %q in it", d, part)
			}
		}
		wantDetail("at most 100ms old")
		wantDetail("after 15s at most")
		leaders()
		time.Sleep(time.Hour)
		f.set("svc1", entry("svc", "a", 81), entry("svc", "b", 80))
		time.Sleep(time.Second)
		if got := r.view()["svc1"]; len(got) != 2 || got[0] != "n1/a 10.0.0.1:81 passing" {
			t.Errorf("a change has not arrived: %q", got)
		}
		if n := leaders(); n > 0 {
			t.Errorf("the leader was asked %d times", n)
		}
		f.set("svc1", entry("svc", "a", 81))
		time.Sleep(time.Second)
		if got := r.view()["svc1"]; len(got) != 1 || leaders() == 0 {
			t.Errorf("a removal has not arrived, or without the leader: %q", got)
		}

		f.change(func() { f.behind = 300 * time.Millisecond })
		time.Sleep(20 * time.Minute)
		wantDetail("at most 1s old")
		f.change(func() { f.behind = 20 * time.Second })
		leaders()
		time.Sleep(20 * time.Minute)
		wantDetail("older than 10s, so the leader is asked")
		// 23 queries wait for about five minutes each.
		if n := leaders(); n < 60 || n > 150 {
			t.Errorf("the leader was asked %d times", n)
		}
		wantState(t, r, "")
		if n := len(r.view()); n != 20 {
			t.Errorf("%d services", n)
		}
	})
}

// TestFailover shows several addresses: where one cannot be reached, or answers
// nothing, the next one is used, and nothing is degraded or removed.
func TestFailover(t *testing.T) {
	f := newFake(t)
	f.set("web", entry("web", "web-1", 80))
	one, two := httptest.NewServer(f), httptest.NewServer(f)
	t.Cleanup(two.Close)
	r := startHTTP(t, two, func(c *Config) {
		c.Address, c.Addresses, c.RemoveGrace = "", []string{"http://127.0.0.1:1", one.URL, two.URL}, 0
	})
	r.AwaitSynced(t, time.Minute)
	r.Await(t, time.Minute, "the second address", func(h *plugintest.Held) bool {
		return strings.Contains(h.Detail, "at "+strings.TrimPrefix(one.URL, "http://")) && strings.Contains(h.Detail, "127.0.0.1:1:")
	})
	one.Listener.Close()
	r.Await(t, time.Minute, "the third address", func(h *plugintest.Held) bool {
		one.CloseClientConnections() // also one that was accepted meanwhile
		return strings.Contains(h.Detail, "at "+strings.TrimPrefix(two.URL, "http://"))
	})
	f.set("web", entry("web", "web-1", 81))
	r.Await(t, time.Minute, "a change", func(h *plugintest.Held) bool {
		return len(h.Instances["web"]) == 1 && h.Instances["web"][0].Ports[0].Number == 81
	})
	if h := r.held(); len(h.Reasons) > 0 || h.Removes > 0 {
		t.Errorf("degraded %q, %d removed", h.Reasons, h.Removes)
	}
	one.Close()
}

// leaderless answers for a host as a server without a leader does.
func leaderless(host string) func(w http.ResponseWriter, r *http.Request) bool {
	return func(w http.ResponseWriter, r *http.Request) bool {
		if r.Host == host {
			http.Error(w, "No cluster leader", http.StatusInternalServerError)
		}
		return r.Host == host
	}
}

// TestFailoverOfErrors shows an address whose server has no leader: the next
// one is used.
func TestFailoverOfErrors(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFake(t)
		f.set("web", entry("web", "web-1", 80))
		f.answer = leaderless("a:8500")
		r, _ := startFake(t, f, func(c *Config) { c.Address, c.Addresses = "", []string{"http://a:8500", "http://b:8500"} })
		time.Sleep(10 * time.Second)
		wantView(t, r, map[string][]string{"web": {"n1/web-1 10.0.0.1:80 passing"}})
		wantState(t, r, "")
		if d := r.held().Detail; !strings.Contains(d, "at b:8500") || !strings.Contains(d, "No cluster leader") {
			t.Errorf("detail %q", d)
		}
	})
}
