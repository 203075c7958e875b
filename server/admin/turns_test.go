package admin

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"iter"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// slow is a Source whose resources take a second, with bodies of a size.
type slow struct {
	*world
	most, now atomic.Int32
	size      int
}

func (s *slow) Resources(string) (iter.Seq[Resource], error) {
	return func(yield func(Resource) bool) {
		if n := s.now.Add(1); n > s.most.Load() {
			s.most.Store(n)
		}
		defer s.now.Add(-1)
		time.Sleep(time.Second) // of a fake clock
		for i := range 20 {
			if !yield(Resource{Collection: "c", Name: fmt.Sprintf("n/%02d", i), Body: func() (json.RawMessage, error) {
				return json.RawMessage(`"` + strings.Repeat("x", s.size) + `"`), nil
			}}) {
				return
			}
		}
	}, nil
}

func ask(t *testing.T, s *Server, from, path string) *httptest.ResponseRecorder {
	t.Helper()
	r, w := httptest.NewRequestWithContext(t.Context(), http.MethodGet, path, nil), httptest.NewRecorder()
	r.RemoteAddr = from
	s.ServeHTTP(w, r)
	return w
}

// Queries are answered one at a time and a quarter of the time, those of an
// address in turn: who asks without end waits for himself. Probes do not wait.
func TestQueriesInTurn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		source := &slow{world: &world{}}
		s := New(source, Options{})
		codes := make(chan int, 100)
		for range 100 {
			go func() { codes <- ask(t, s, "10.0.0.1:5", "/api/v1/resources").Code }()
		}
		synctest.Wait()
		for range 100 - queriesWaiting - 1 {
			if code := <-codes; code != http.StatusTooManyRequests {
				t.Errorf("one query too many: %d", code)
			}
		}
		began := time.Now()
		if w := ask(t, s, "10.0.0.1:5", "/healthz"); w.Code != http.StatusOK || time.Since(began) != 0 {
			t.Errorf("a probe: %d after %v", w.Code, time.Since(began))
		}
		if w := ask(t, s, "10.0.0.2:5", "/api/v1/resources"); w.Code != http.StatusOK || time.Since(began) > 5*time.Second {
			t.Errorf("another address: %d after %v", w.Code, time.Since(began))
		}
		time.Sleep(queryWait)
		synctest.Wait()
		if n := source.most.Load(); n != 1 {
			t.Errorf("%d queries at a time", n)
		}
		if answered, all := 0, len(codes); all != queriesWaiting+1 {
			t.Errorf("%d are answered", all)
		} else {
			for range all {
				if <-codes == http.StatusOK {
					answered++
				}
			}
			if answered < 2 || answered > 3 {
				t.Errorf("%d of a second each are answered in ten seconds", answered)
			}
		}
		time.Sleep(time.Minute) // the turns end
	})
}

// A page of resources is bounded in bytes, and the next begins where it ends.
func TestBodiesAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := New(&slow{world: &world{}, size: 1 << 20}, Options{})
		seen, after := map[string]bool{}, ""
		for pages := 0; ; pages++ {
			w := ask(t, s, "10.0.0.1:5", "/api/v1/resources?body=true&limit=1000&after="+after)
			var page list[resource]
			if err := json.Unmarshal(w.Body.Bytes(), &page); err != nil {
				t.Fatal(err)
			}
			if w.Body.Len() > 10<<20 || len(page.Items) == 0 {
				t.Errorf("%d items of %d bytes", len(page.Items), w.Body.Len())
			}
			for _, item := range page.Items {
				seen[item.Name] = true
			}
			if after = strings.ReplaceAll(page.Next, " ", "+"); after == "" || pages > 20 {
				break
			}
		}
		if len(seen) != 20 {
			t.Errorf("%d of 20 are on the pages", len(seen))
		}
		time.Sleep(time.Minute) // the turns end
	})
}

// Answers that clients do not read are bounded together: those that were given
// first are cut off for others, and who reads gets all of it.
func TestAnswersAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := New(&slow{world: &world{}, size: 1 << 20}, Options{})
		ctx, end := context.WithCancel(t.Context())
		l, ended := pipes{make(chan net.Conn), ctx.Done()}, make(chan error)
		go func() { ended <- s.Run(ctx, l) }()
		var clients []net.Conn
		for i := range 6 { // 7 MiB each
			client, server := net.Pipe()
			l.conns <- pipe{server, netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, 0, byte(i)}), 1)}
			if _, err := io.WriteString(client, "GET /api/v1/resources?body=true HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"); err != nil {
				t.Fatal(err)
			}
			clients = append(clients, client)
			time.Sleep(5 * time.Second) // its turn
		}
		synctest.Wait()
		s.held.mu.Lock()
		if s.held.bytes > maxHeld || len(s.held.oldest) != 4 {
			t.Errorf("%d answers of %d bytes are held", len(s.held.oldest), s.held.bytes)
		}
		s.held.mu.Unlock()
		for i, client := range clients {
			resp, err := http.ReadResponse(bufio.NewReader(client), nil)
			if err == nil {
				_, err = io.Copy(io.Discard, resp.Body)
				resp.Body.Close()
			}
			if cut := i < 2; (err != nil) != cut {
				t.Errorf("client %d: %v", i, err)
			}
			client.Close()
		}
		synctest.Wait()
		if s.held.bytes != 0 {
			t.Errorf("%d bytes are held after all", s.held.bytes)
		}
		end()
		if err := <-ended; err != nil {
			t.Error(err)
		}
		time.Sleep(time.Minute) // the turns end
	})
}

// pipes is a listener of connections in memory.
type pipes struct {
	conns chan net.Conn
	done  <-chan struct{}
}

func (l pipes) Accept() (net.Conn, error) {
	select {
	case c := <-l.conns:
		return c, nil
	case <-l.done:
		return nil, http.ErrServerClosed
	}
}
func (pipes) Close() error   { return nil }
func (pipes) Addr() net.Addr { return &net.TCPAddr{} }

type pipe struct {
	net.Conn
	of netip.AddrPort
}

func (p pipe) RemoteAddr() net.Addr { return net.TCPAddrFromAddrPort(p.of) }
