package admin

import (
	"bufio"
	"context"
	"fmt"
	"iter"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/isthmus-mesh/isthmus/server/access"
	"github.com/isthmus-mesh/isthmus/server/state/history"
)

// moving is a Source whose changes grow.
type moving struct {
	*world

	mu      sync.Mutex
	events  []history.Event // newest first
	changed chan struct{}
}

func (m *moving) Changes() iter.Seq[history.Event] {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.Values(slices.Clone(m.events))
}

func (m *moving) Changed() <-chan struct{} {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.changed
}

func (m *moving) add(names ...string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, name := range names {
		m.events = slices.Insert(m.events, 0, history.Event{
			Registry: "dc1", Collection: "g/WorkloadEntry", Name: name, Op: "upsert", Time: time.Unix(0, 0), Number: uint64(len(m.events) + 1),
			Old: &history.Endpoint{Address: "10.0.0.1", Weight: 1}, New: &history.Endpoint{Address: "10.0.0.2", Weight: 3},
		})
	}
	close(m.changed)
	m.changed = make(chan struct{})
}

// serveMoving returns the address of a server, which ends with the test or by
// end.
func serveMoving(t *testing.T) (m *moving, s *Server, url string, end func()) {
	t.Helper()
	m = &moving{world: &world{}, changed: make(chan struct{})}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	s = New(m, Options{})
	ended := make(chan error, 1)
	go func() { ended <- s.Run(ctx, l) }() // the cleanup waits for it
	end = sync.OnceFunc(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("Run: %v", err)
		}
	})
	t.Cleanup(end)
	return m, s, "http://" + l.Addr().String(), end
}

// events opens a stream and returns its events as "NAME DATA".
func events(t *testing.T, url string, header ...string) (next func() string) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url, nil)
	if err != nil {
		t.Fatal(err)
	}
	for i := 0; i < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	resp, err := client.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { resp.Body.Close() })
	if kind := resp.Header.Get("Content-Type"); resp.StatusCode != http.StatusOK || kind != "text/event-stream" {
		t.Fatalf("%s: %d %s", url, resp.StatusCode, kind)
	}
	lines := bufio.NewScanner(resp.Body)
	return func() string {
		name := ""
		for lines.Scan() {
			if n, ok := strings.CutPrefix(lines.Text(), "event: "); ok {
				name = n
			}
			if data, ok := strings.CutPrefix(lines.Text(), "data: "); ok {
				return name + " " + data
			}
		}
		return "ended"
	}
}

// A stream begins after what the page shows, has each change once, only those
// that match, and says so if there were too many. The end of the server ends
// it.
func TestStreamOfChanges(t *testing.T) {
	m, _, url, end := serveMoving(t)
	m.add("n/old", "n/first")
	next := events(t, url+"/changes/stream?after=1&q=n/")
	got := next()
	if !strings.HasPrefix(got, "changes <tr>") || !strings.Contains(got, "n/first") || strings.Contains(got, "n/old") || !strings.Contains(got, "10.0.0.1 → 10.0.0.2, weight 1 → 3") {
		t.Errorf("first event: %s", got)
	}
	m.add("x/other", "n/<b>")
	if got = next(); !strings.Contains(got, "n/&lt;b&gt;") || strings.Contains(got, "x/other") || strings.Contains(got, "n/first") {
		t.Errorf("second event: %s", got)
	}
	var many []string
	for i := range maxStreamed + 1 {
		many = append(many, fmt.Sprint("n/", i))
	}
	m.add(many...)
	if got = next(); got != "missed -" {
		t.Errorf("after many changes: %s", got)
	}
	if got := events(t, url+"/changes/stream?after=0", "Last-Event-ID", "1000000")(); got != "missed -" {
		t.Errorf("after a restart of the bridge: %s", got)
	}
	end()
	if got = next(); got != "ended" {
		t.Errorf("after the end: %s", got)
	}
}

// The number of streams is bounded, and one address, or network of IPv6, does
// not have them all.
func TestStreamsAreBounded(t *testing.T) {
	_, s, _, _ := serveMoving(t)
	ask := func(from string) (int, string) {
		t.Helper()
		ctx, cancel := context.WithCancel(t.Context())
		cancel() // a stream that is let in ends at once
		r, w := httptest.NewRequestWithContext(ctx, http.MethodGet, "/changes/stream", nil), httptest.NewRecorder()
		r.RemoteAddr = from
		s.ServeHTTP(w, r)
		return w.Code, w.Body.String()
	}
	var leave []func()
	enter := func(n int, from string) {
		for range n {
			l, ok := s.following.Take(access.Network(netip.MustParseAddr(from)).String())
			if !ok {
				t.Fatalf("no stream of %s", from)
			}
			leave = append(leave, l)
		}
	}
	enter(maxOwnStreams, "10.0.0.1")
	enter(maxOwnStreams, "2001:db8::1")
	for from, want := range map[string]int{"10.0.0.1:5": http.StatusServiceUnavailable, "10.0.0.2:5": http.StatusOK, "[2001:db8::2]:5": http.StatusServiceUnavailable, "[2001:db8:0:1::2]:5": http.StatusOK} {
		if code, body := ask(from); code != want {
			t.Errorf("one more stream of %s: %d %s", from, code, body)
		}
	}
	for i := range (maxStreams - len(leave)) / maxOwnStreams {
		enter(maxOwnStreams, fmt.Sprintf("10.0.1.%d", i))
	}
	if code, body := ask("10.0.0.9:5"); code != http.StatusServiceUnavailable || !strings.Contains(body, "50 pages follow changes already") {
		t.Errorf("one more stream than there may be: %d %s", code, body)
	}
	for _, l := range leave {
		l()
	}
	if code, body := ask("10.0.0.1:5"); code != http.StatusOK {
		t.Errorf("when all have left: %d %s", code, body)
	}
	if code, _, _ := get(t, s, "/changes/stream?after=x"); code != http.StatusBadRequest {
		t.Errorf("after=x: %d", code)
	}
}

// A stream that nothing happens on ends after a while, so that a caller whose
// rule is gone sees no more; until then it is kept alive.
func TestStreamEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := &moving{world: &world{}, changed: make(chan struct{})}
		w, began := httptest.NewRecorder(), time.Now()
		New(m, Options{}).streamChanges(w, httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/changes/stream", nil))
		if lasted := time.Since(began); lasted != streamLongest {
			t.Errorf("it lasted %v", lasted)
		}
		if got := w.Body.String(); !strings.HasPrefix(got, "retry: 500\n\n: alive") {
			t.Errorf("it sent %q", got)
		}
	})
}
