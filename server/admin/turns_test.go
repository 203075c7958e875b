package admin

import (
	"encoding/json"
	"fmt"
	"iter"
	"net/http"
	"net/http/httptest"
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
