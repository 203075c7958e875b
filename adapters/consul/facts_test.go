package consul

import (
	"io"
	"net/http"
	"strconv"
	"testing"
	"testing/synctest"
	"time"

	"github.com/isthmus-mesh/isthmus/plugin/plugintest"
)

// protocol returns the protocol that the catalog has of web, or "no web".
func (r *recorder) protocol() string {
	protocol := "no web"
	r.Look(func(h *plugintest.Held) {
		if web, ok := h.Services["web"]; ok {
			protocol = web.Meta[protocolKey]
		}
	})
	return protocol
}

// TestDefaultsKept shows that a service-defaults entry that is missing after an
// outage counts for the grace period, and no longer, whatever outages follow.
func TestDefaultsKept(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFake(t)
		f.set("web", entry("web", "web-1", 80))
		f.change(func() { f.defaults = map[string]string{"web": "http2"} })
		r, _ := startFake(t, f)
		want := func(when, protocol string) {
			t.Helper()
			if got := r.protocol(); got != protocol {
				t.Errorf("%s: protocol %q, want %q", when, got, protocol)
			}
		}
		time.Sleep(5 * time.Second)
		want("at first", "http2")
		if sets, _, _ := r.counts(); sets != 1 {
			t.Errorf("%d sets, want 1", sets)
		}
		f.setDown(errRefused)
		time.Sleep(10 * time.Second)
		f.change(func() { f.down, f.defaults = nil, nil })
		time.Sleep(15 * time.Second)
		want("after the outage", "http2")
		for range 2 {
			f.setDown(errRefused)
			time.Sleep(10 * time.Second)
			f.setDown(nil)
			time.Sleep(15 * time.Second)
		}
		want("after the grace period", "")
		f.change(func() { f.defaults, f.configs = map[string]string{"web": "grpc"}, 7 })
		time.Sleep(5 * time.Second)
		want("written again", "grpc")
		if _, removes, _ := r.counts(); removes != 0 {
			t.Errorf("%d removes", removes)
		}
	})
}

// TestDefaultsRefused shows what becomes of services whose service-defaults
// cannot be read: they are served all the same, and what was known stays.
func TestDefaultsRefused(t *testing.T) {
	for name, test := range map[string]struct {
		status   int
		filtered bool
		degraded bool
	}{
		"an old server": {status: http.StatusNotFound},
		"denied":        {status: http.StatusForbidden, degraded: true},
		"broken":        {status: http.StatusInternalServerError, degraded: true},
		"filtered":      {status: http.StatusOK, filtered: true},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := newFake(t)
				f.set("web", entry("web", "web-1", 80))
				f.change(func() { f.defaults = map[string]string{"web": "http2"} })
				refuse := func(w http.ResponseWriter, r *http.Request) bool {
					if r.URL.Path != defaultsPath {
						return false
					}
					if test.filtered {
						w.Header().Set("X-Consul-Results-Filtered-By-Acls", "true")
						w.Header().Set("X-Consul-Knownleader", "true")
						w.Header().Set("X-Consul-Lastcontact", "0")
						w.Header().Set("X-Consul-Index", "9")
					}
					w.WriteHeader(test.status)
					_, _ = io.WriteString(w, "[]")
					return true
				}
				known, stop := startFake(t, f)
				time.Sleep(5 * time.Second)
				f.setAnswer(refuse)
				f.cut(defaultsPath)
				time.Sleep(5 * time.Minute)
				if got := known.protocol(); got != "http2" {
					t.Errorf("refused later: protocol %q, want http2", got)
				}
				stop()

				r, _ := startFake(t, f)
				time.Sleep(time.Minute)
				if got := r.protocol(); got != "" {
					t.Errorf("protocol %q, want none", got)
				}
				if _, _, synced := r.counts(); !synced {
					t.Error("the first listing is not complete")
				}
				if reason, _ := r.state(); (reason != "") != test.degraded {
					t.Errorf("degraded: %q", reason)
				}
			})
		})
	}
}

// TestTurnsOfImported shows that imported services beyond the connections are
// followed beside local ones, whose looks they leave alone.
func TestTurnsOfImported(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const n = 300
		f := crowd(t, n)
		for i := range n {
			f.set("beta@svc"+strconv.Itoa(i), entry("svc", "i", 80))
		}
		r, _ := startFake(t, f, func(c *Config) { c.Peers = []string{"beta"} })
		time.Sleep(10 * time.Second)
		if sets, _, synced := r.counts(); sets != 2*n || !synced {
			t.Fatalf("%d sets, synced %t; want %d and true", sets, synced, 2*n)
		}
		for i := range n {
			f.set("svc"+strconv.Itoa(i), entry("svc", "i", 81))
			f.set("beta@svc"+strconv.Itoa(i), entry("svc", "i", 81))
		}
		time.Sleep(3 * time.Second)
		if got := r.ports(81); got != 2*n {
			t.Errorf("%d services of %d have changed", got, 2*n)
		}
		f.set("beta@svc1")
		time.Sleep(30 * time.Second)
		if _, removes, _ := r.counts(); removes != 1 {
			t.Errorf("%d removes, want 1", removes)
		}
		if reason, _ := r.state(); reason != "" {
			t.Errorf("degraded: %q", reason)
		}
	})
}
