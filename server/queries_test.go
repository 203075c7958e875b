package server

import (
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/isthmus-mesh/isthmus/server/access"
)

// newTestCrowd returns a crowd with a limit of connections of an address.
func newTestCrowd(connections int) *crowd {
	c := &crowd{perPeer: connections, peers: access.NewSeats(connections, 0), log: slog.New(slog.DiscardHandler), refused: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "x"}, []string{"limit"})}
	c.intake = newIntake(1<<30, connections, func(string) {}, c.slowed)
	return c
}

// An address that asks an admin port without end waits for itself, whatever the
// answer is, and another does not wait.
func TestQueryPace(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newTestCrowd(100).queries(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusTooManyRequests) }))
		ask := func(from string, times int) time.Duration {
			began := time.Now()
			var all sync.WaitGroup
			for range times {
				all.Go(func() {
					r, w := httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/healthz", nil), httptest.NewRecorder()
					r.RemoteAddr = from
					if h.ServeHTTP(w, r); w.Code != http.StatusTooManyRequests {
						t.Errorf("answered %d", w.Code)
					}
				})
			}
			all.Wait()
			return time.Since(began)
		}
		if took := ask("[2001:db8::1]:1", queryBurst); took != 0 {
			t.Errorf("the burst took %v", took)
		}
		if took := ask("[2001:db8::2]:1", 3*queryRate); took < 2900*time.Millisecond || took > 3*time.Second {
			t.Errorf("what may come in three seconds took %v", took)
		}
		for _, other := range []string{"10.0.0.1:1", "unix:/run/x#7"} {
			if took := ask(other, 1); took != 0 {
				t.Errorf("another address waited %v", took)
			}
		}
	})
}

// An address that connects to an admin port without end waits before anything
// of it is read, such as a TLS handshake.
func TestQueryConnections(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const burst = 100
		queue := make(chan net.Conn, 1)
		l := queryListener{crowdListener{queued{conns: queue}, newTestCrowd(burst)}}
		connect := func(host string) time.Duration {
			t.Helper()
			queue <- from{host: host, sent: http.NoBody}
			c, err := l.Accept()
			if err != nil {
				t.Fatal(err)
			}
			began := time.Now()
			_, _ = c.Read(make([]byte, 1)) // there is nothing
			if err := c.Close(); err != nil {
				t.Error(err)
			}
			return time.Since(began)
		}
		for range burst {
			if took := connect("10.0.0.1"); took != 0 {
				t.Errorf("one of the burst took %v", took)
			}
		}
		if took := connect("10.0.0.1"); took < refill/burst || took > 2*refill/burst {
			t.Errorf("one more took %v", took)
		}
		if took := connect("10.0.0.2"); took != 0 {
			t.Errorf("another address waited %v", took)
		}
	})
}
