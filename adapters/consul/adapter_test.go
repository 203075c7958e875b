package consul

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	gocmp "github.com/google/go-cmp/cmp"
	"github.com/hashicorp/consul/api"

	"github.com/isthmus-mesh/isthmus/plugin"
	"github.com/isthmus-mesh/isthmus/plugin/plugintest"
	"github.com/isthmus-mesh/isthmus/plugin/registry"
)

func wantView(t *testing.T, r *recorder, want map[string][]string) {
	t.Helper()
	if diff := gocmp.Diff(want, r.view()); diff != "" {
		t.Errorf("catalog (-want +got):\n%s", diff)
	}
}

func wantState(t *testing.T, r *recorder, part string) {
	t.Helper()
	reason, _ := r.state()
	if part == "" && reason != "" || !strings.Contains(reason, part) {
		t.Errorf("degraded with %q, want %q in it", reason, part)
	}
}

func status(code int, body string) func(http.ResponseWriter, *http.Request) bool {
	return func(w http.ResponseWriter, _ *http.Request) bool {
		http.Error(w, body, code)
		return true
	}
}

// TestFollow shows the ordinary life of services: listed, changed, gone and
// back, each told once.
func TestFollow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFake(t)
		f.set("web", entry("web", "web-1", 80), entry("web", "web-2", 80))
		r, _ := startFake(t, f)
		synctest.Wait()
		if sets, removes, synced := r.counts(); sets != 1 || removes != 0 || !synced {
			t.Errorf("after the first listing: %d sets, %d removes, synced %t; want 1, 0, true", sets, removes, synced)
		}
		both := map[string][]string{"web": {"n1/web-1 10.0.0.1:80 passing", "n1/web-2 10.0.0.1:80 passing"}}
		wantView(t, r, both)

		// An instance goes: at once, not after a listing.
		f.set("web", entry("web", "web-1", 80))
		synctest.Wait()
		wantView(t, r, map[string][]string{"web": {"n1/web-1 10.0.0.1:80 passing"}})

		// The last one goes and comes back.
		time.Sleep(2 * time.Second)
		f.set("web")
		time.Sleep(listEvery + time.Millisecond)
		synctest.Wait()
		wantView(t, r, map[string][]string{})
		f.set("web", entry("web", "web-1", 80), entry("web", "web-2", 80))
		time.Sleep(listEvery + time.Millisecond)
		synctest.Wait()
		wantView(t, r, both)

		// A new service is found by the listing, which is asked for once a
		// second.
		time.Sleep(2 * time.Second)
		f.set("db", entry("db", "db-1", 5432))
		synctest.Wait()
		wantView(t, r, map[string][]string{"web": both["web"], "db": {"n1/db-1 10.0.0.1:5432 passing"}})
		wantState(t, r, "")
		if sets, removes, _ := r.counts(); sets != 4 || removes != 1 {
			t.Errorf("%d sets, %d removes; want 4 and 1", sets, removes)
		}
	})
}

// TestWakesWithoutChange shows that a wake with nothing new reaches nobody, and
// that a storm of them is asked for at a bounded rate.
func TestWakesWithoutChange(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFake(t)
		f.set("web", entry("web", "web-1", 80))
		r, _ := startFake(t, f)
		synctest.Wait()
		f.count("/v1/health/service/web")
		f.count(listPath)
		for range 10_000 {
			time.Sleep(time.Millisecond)
			f.set("web", entry("web", "web-1", 80))
		}
		if sets, _, _ := r.counts(); sets != 1 {
			t.Errorf("%d sets, want only the first", sets)
		}
		if n := f.count("/v1/health/service/web"); n > 25 {
			t.Errorf("%d health queries in 10 s of empty wakes, want at most about two a second", n)
		}
		if n := f.count(listPath); n > 11 {
			t.Errorf("%d listings in 10 s, want one a second", n)
		}
		time.Sleep(2 * time.Second)
		f.set("web", entry("web", "web-1", 81))
		time.Sleep(time.Second)
		wantView(t, r, map[string][]string{"web": {"n1/web-1 10.0.0.1:81 passing"}})
	})
}

// Services that the bridge does not want are listed and never asked for.
func TestUnwanted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFake(t)
		for _, name := range []string{"web", "api", "db"} {
			f.set(name, entry(name, name+"-1", 80))
		}
		a, err := newAdapter(config(), plugin.Env{Only: func(key registry.Key) bool { return key.Name != "api" }})
		if err != nil {
			t.Fatal(err)
		}
		r, _ := startOver(t, a, f)
		synctest.Wait()
		wantView(t, r, map[string][]string{"web": {"n1/web-1 10.0.0.1:80 passing"}, "db": {"n1/db-1 10.0.0.1:80 passing"}})
		f.set("api", entry("api", "api-1", 80), entry("api", "api-2", 80))
		f.set("web", entry("web", "web-1", 80), entry("web", "web-2", 80))
		f.set("more", entry("more", "more-1", 80))
		time.Sleep(listEvery + time.Millisecond)
		synctest.Wait()
		wantView(t, r, map[string][]string{"web": {"n1/web-1 10.0.0.1:80 passing", "n1/web-2 10.0.0.1:80 passing"}, "db": {"n1/db-1 10.0.0.1:80 passing"}, "more": {"n1/more-1 10.0.0.1:80 passing"}})
		if n := f.count("/v1/health/service/api"); n != 0 {
			t.Errorf("the unwanted service was asked for %d times", n)
		}
	})
}

// TestQuiet shows that nothing is polled: a quiet hour costs each query one
// renewal in some minutes.
func TestQuiet(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFake(t)
		f.set("web", entry("web", "web-1", 80))
		r, _ := startFake(t, f)
		synctest.Wait()
		f.count("/v1/health/service/web")
		time.Sleep(time.Hour)
		synctest.Wait()
		if n := f.count("/v1/health/service/web"); n < 11 || n > 15 {
			t.Errorf("%d health queries in an hour, want one in 4.5 to 5 minutes", n)
		}
		if _, calls := r.state(); calls != 0 {
			t.Errorf("degraded %d times", calls)
		}
	})
}

// TestErrorsRemoveNothing goes through every answer that is no answer: what is
// known stays, the reason is shown in one state, and afterwards everything is
// as Consul says.
func TestErrorsRemoveNothing(t *testing.T) {
	answer := func(w http.ResponseWriter, header, body string) bool {
		w.Header().Set("X-Consul-Index", "500")
		w.Header().Set("X-Consul-Knownleader", "true")
		w.Header().Set("X-Consul-Lastcontact", "0")
		if name, value, ok := strings.Cut(header, ": "); ok {
			w.Header().Set(name, value)
		}
		_, _ = io.WriteString(w, body)
		return true
	}
	filtered := func(w http.ResponseWriter, body string) bool {
		return answer(w, "X-Consul-Results-Filtered-By-Acls: true", body)
	}
	plain := func(w http.ResponseWriter, body string) bool { return answer(w, "", body) }
	isList := func(r *http.Request) bool { return r.URL.Path == listPath }
	tests := map[string]struct {
		answer func(http.ResponseWriter, *http.Request) bool
		down   error
		want   []string
	}{
		"refused":        {down: errRefused, want: []string{"cannot be reached", "connection refused", "127.0.0.1:8500"}},
		"broken":         {down: io.ErrUnexpectedEOF, want: []string{"cannot be reached"}},
		"no leader":      {answer: status(500, "No cluster leader"), want: []string{"No cluster leader"}},
		"token unknown":  {answer: status(403, "ACL not found"), want: []string{"refuses the token", "ACL not found", `service_prefix "" read`}},
		"connections":    {answer: status(429, "Your IP is issuing too many concurrent connections, please rate limit your calls"), want: []string{"https", "limits.http_max_conns_per_client"}},
		"rate":           {answer: status(429, "rate limit exceeded, try again later"), want: []string{"limits.request_limits"}},
		"bad filter":     {answer: status(500, "Failed to create boolean expression evaluator: 1:4"), want: []string{"does not accept filter"}},
		"bad datacenter": {answer: status(400, "no such thing"), want: []string{"does not accept the query", "no such thing"}},
		"redirect":       {answer: status(301, "moved"), want: []string{"does not accept the query"}},
		"garbage": {answer: func(w http.ResponseWriter, _ *http.Request) bool {
			w.Header().Set("X-Consul-Index", "500")
			_, _ = io.WriteString(w, "<html>")
			return true
		}, want: []string{"cannot be reached"}},
		"no index": {answer: func(w http.ResponseWriter, r *http.Request) bool {
			_, _ = io.WriteString(w, map[bool]string{true: `{"consul":[]}`, false: `[]`}[isList(r)])
			return true
		}, want: []string{"X-Consul-Index"}},
		"leader unknown": {answer: func(w http.ResponseWriter, r *http.Request) bool {
			return answer(w, "X-Consul-Knownleader: false", map[bool]string{true: `{"consul":[]}`, false: `[]`}[isList(r)])
		}, want: []string{"no leader"}},
		"token without any read": {answer: func(w http.ResponseWriter, r *http.Request) bool {
			return filtered(w, map[bool]string{true: `{}`, false: `[]`}[isList(r)])
		}, want: []string{"token", `node_prefix "" read`}},
		"token without some": {answer: func(w http.ResponseWriter, r *http.Request) bool {
			return filtered(w, map[bool]string{true: `{"consul":[]}`, false: `[]`}[isList(r)])
		}, want: []string{"leaves out", "accept_filtered"}},
		"anonymous": {answer: func(w http.ResponseWriter, r *http.Request) bool {
			return plain(w, map[bool]string{true: `{}`, false: `[]`}[isList(r)])
		}, want: []string{"no service at all"}},
		"own service missing": {answer: func(w http.ResponseWriter, r *http.Request) bool {
			return plain(w, map[bool]string{true: `{"other":[]}`, false: `[]`}[isList(r)])
		}, want: []string{"consul's own service is missing in its listing"}},
		"empty listing": {answer: func(w http.ResponseWriter, r *http.Request) bool {
			if isList(r) {
				return filtered(w, `{}`)
			}
			return plain(w, `[]`)
		}, want: []string{"sees no service at all"}},
		"listed without instances": {answer: func(w http.ResponseWriter, r *http.Request) bool {
			return !isList(r) && plain(w, `[]`)
		}, want: []string{"that they have no instances"}},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := newFake(t)
				f.set("web", entry("web", "web-1", 80), entry("web", "web-2", 80))
				f.set("db", entry("db", "db-1", 5432))
				r, _ := startFake(t, f)
				synctest.Wait()
				before := r.view()
				if len(before) != 2 {
					t.Fatalf("catalog holds %v before the fault", before)
				}
				f.change(func() {
					f.answer, f.down = test.answer, test.down
					// Every wait ends, as it does when an agent dies.
					for _, s := range f.services {
						s.index = f.index + 1
					}
					f.index++
				})
				f.count("/v1/health/service/web")
				time.Sleep(10 * time.Minute)
				synctest.Wait()
				wantView(t, r, before)
				for _, part := range test.want {
					wantState(t, r, part)
				}
				if _, calls := r.state(); calls > 6 {
					t.Errorf("degraded was called %d times for one lasting fault:\n%s", calls, strings.Join(r.held().Reasons, "\n"))
				}
				if n := f.count("/v1/health/service/web"); n > 90 {
					t.Errorf("%d health queries in 10 minutes of failure, want a back-off", n)
				}

				f.change(func() {
					f.answer, f.down = nil, nil
					f.index = 1000
					f.setLocked("web", entry("web", "web-1", 80))
					f.setLocked("db", entry("db", "db-1", 5432))
				})
				time.Sleep(2 * time.Minute)
				synctest.Wait()
				wantState(t, r, "")
				wantView(t, r, map[string][]string{"web": {"n1/web-1 10.0.0.1:80 passing"}, "db": {"n1/db-1 10.0.0.1:5432 passing"}})
				if _, removes, _ := r.counts(); removes != 0 {
					t.Errorf("%d removes", removes)
				}
			})
		})
	}
}

// TestTokenRevoked shows that a new token in the file is used soon, although
// the watch that was refused with the one before has come to its longest
// pauses, and the listing, which waits, has not learnt of it.
func TestTokenRevoked(t *testing.T) {
	file := filepath.Join(t.TempDir(), "token")
	write := func(token string) {
		if err := os.WriteFile(file, []byte(token+"\n"), 0o600); err != nil {
			t.Error(err)
		}
	}
	write("old")
	synctest.Test(t, func(t *testing.T) {
		f := newFake(t)
		f.set("web", entry("web", "web-1", 80))
		r, _ := startFake(t, f, func(c *Config) { c.TokenFile = file })
		time.Sleep(2 * listEvery)
		synctest.Wait() // everything waits
		refused, replaced := 0, make(chan struct{})
		var mu sync.Mutex // guards refused
		f.setAnswer(func(w http.ResponseWriter, q *http.Request) bool {
			if q.Header.Get(httpTokenHeader) != "old" {
				return false
			}
			mu.Lock()
			defer mu.Unlock()
			if q.URL.Path == healthPath+"web" {
				if refused++; refused == 8 {
					write("new")
					close(replaced)
				}
			}
			return status(http.StatusForbidden, "ACL not found")(w, q)
		})
		f.flip(&f.checks, "web", entry("web", "web-1", 81))
		<-replaced
		wantState(t, r, "refuses the token")
		time.Sleep(6 * time.Second)
		synctest.Wait()
		wantState(t, r, "")
	})
}

// TestReplacedEmpty shows the grace period: an agent killed and started again
// without its state lacks everything, which is kept until the grace is over;
// what registers again meanwhile never left.
func TestReplacedEmpty(t *testing.T) {
	for name, low := range map[string]uint64{"index lower": 20, "index higher": 2000} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := newFake(t)
				f.set("web", entry("web", "web-1", 80))
				f.set("api", entry("api", "api-1", 80), entry("api", "api-2", 80))
				f.set("db", entry("db", "db-1", 5432))
				r, _ := startFake(t, f)
				synctest.Wait()
				before := r.view()

				f.setDown(errRefused)
				time.Sleep(5 * time.Second)
				f.replace(low)
				f.setDown(nil)
				time.Sleep(15 * time.Second)
				wantView(t, r, before)
				wantState(t, r, "remove_grace")

				// Two register again, one of them with one instance of two.
				f.set("web", entry("web", "web-1", 80))
				f.set("api", entry("api", "api-1", 80))
				time.Sleep(5 * time.Second)
				wantView(t, r, before)
				time.Sleep(40 * time.Second)
				wantView(t, r, map[string][]string{"web": {"n1/web-1 10.0.0.1:80 passing"}, "api": {"n1/api-1 10.0.0.1:80 passing"}})
				wantState(t, r, "")
				if _, removes, _ := r.counts(); removes != 1 {
					t.Errorf("%d removes, want db's only", removes)
				}

				// Long after, removals are at once again.
				f.set("api", entry("api", "api-9", 80))
				time.Sleep(time.Second)
				wantView(t, r, map[string][]string{"web": {"n1/web-1 10.0.0.1:80 passing"}, "api": {"n1/api-9 10.0.0.1:80 passing"}})
			})
		})
	}
}

// TestReplacedUnseen shows that a server replaced behind a load balancer,
// without any connection breaking, is noticed by its index when the first wait
// ends, and that all watches then begin again instead of waiting at an index
// that the server does not have.
func TestReplacedUnseen(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFake(t)
		for i := range 20 {
			f.set("svc"+strconv.Itoa(i), entry("svc", "i", 80))
		}
		r, _ := startFake(t, f)
		time.Sleep(10 * time.Second)
		before := r.view()
		f.replace(20)
		time.Sleep(4 * time.Minute)
		wantView(t, r, before)
		f.mu.Lock()
		f.services["new"], f.index = &fakeService{index: 21, entries: []*api.ServiceEntry{entry("new", "new-1", 80)}}, 21
		f.mu.Unlock()
		time.Sleep(2 * time.Minute)
		wantView(t, r, map[string][]string{"new": {"n1/new-1 10.0.0.1:80 passing"}})
	})
}

// TestReplacedNoticedByOne shows that one query which sees the index go
// backwards makes all others begin again.
func TestReplacedNoticedByOne(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFake(t)
		f.set("web", entry("web", "web-1", 80))
		f.set("db", entry("db", "db-1", 5432))
		r, _ := startFake(t, f)
		time.Sleep(10 * time.Second)
		f.replace(20)
		f.mu.Lock()
		f.services["web"] = &fakeService{index: 20, entries: []*api.ServiceEntry{entry("web", "web-1", 81)}}
		f.mu.Unlock()
		f.cut(listPath)
		time.Sleep(5 * time.Second)
		wantView(t, r, map[string][]string{"web": {"n1/web-1 10.0.0.1:81 passing"}, "db": {"n1/db-1 10.0.0.1:5432 passing"}})
		wantState(t, r, "remove_grace")
		time.Sleep(time.Minute)
		wantView(t, r, map[string][]string{"web": {"n1/web-1 10.0.0.1:81 passing"}})
	})
}

// TestFlapping shows that what left a Consul that comes and goes is removed
// once the answers lacked it for the grace period, a service that is not listed
// any more as well as an instance, and that the rest stays throughout.
func TestFlapping(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFake(t)
		f.set("web", entry("web", "web-1", 80), entry("web", "web-2", 80))
		f.set("db", entry("db", "db-1", 5432))
		r, _ := startFake(t, f)
		synctest.Wait()
		before := r.view()
		f.setDown(errRefused)
		f.set("web", entry("web", "web-1", 80))
		f.set("db")
		for range 2 {
			time.Sleep(10 * time.Second)
			f.setDown(nil)
			time.Sleep(14 * time.Second)
			wantView(t, r, before)
			wantState(t, r, "remove_grace")
			f.setDown(errRefused)
		}
		for range 2 {
			time.Sleep(10 * time.Second)
			f.setDown(nil)
			time.Sleep(14 * time.Second)
			f.setDown(errRefused)
		}
		f.setDown(nil)
		time.Sleep(10 * time.Second)
		wantView(t, r, map[string][]string{"web": {"n1/web-1 10.0.0.1:80 passing"}})
		wantState(t, r, "")
		if _, removes, _ := r.counts(); removes != 1 {
			t.Errorf("%d removes, want db's only", removes)
		}
	})
}

// TestOneServiceFails shows that the grace period holds for one service too,
// where only its own queries failed or went backwards.
func TestOneServiceFails(t *testing.T) {
	both := []string{"n1/web-1 10.0.0.1:80 passing", "n1/web-2 10.0.0.1:80 passing"}
	t.Run("error", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			f := newFake(t)
			f.set("web", entry("web", "web-1", 80), entry("web", "web-2", 80))
			r, _ := startFake(t, f)
			time.Sleep(10 * time.Second)
			f.setAnswer(func(w http.ResponseWriter, r *http.Request) bool {
				return strings.HasSuffix(r.URL.Path, "/web") && status(500, "rpc error")(w, r)
			})
			f.cut("/v1/health/service/web")
			time.Sleep(10 * time.Second)
			f.set("web", entry("web", "web-1", 80))
			f.setAnswer(nil)
			time.Sleep(20 * time.Second)
			wantView(t, r, map[string][]string{"web": both})
			time.Sleep(time.Minute)
			wantView(t, r, map[string][]string{"web": both[:1]})
		})
	})
	t.Run("index backwards", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			f := newFake(t)
			f.set("web", entry("web", "web-1", 80), entry("web", "web-2", 80))
			r, _ := startFake(t, f)
			time.Sleep(10 * time.Second)
			f.mu.Lock()
			f.services["web"] = &fakeService{index: 5, entries: []*api.ServiceEntry{entry("web", "web-1", 80)}}
			f.mu.Unlock()
			f.cut("/v1/health/service/web")
			time.Sleep(20 * time.Second)
			wantView(t, r, map[string][]string{"web": both})
			time.Sleep(time.Minute)
			wantView(t, r, map[string][]string{"web": both[:1]})
		})
	})
}

// TestComesBackWhileConfirmed shows a service that registers again between the
// listing that confirms its end and the end of its watch.
func TestComesBackWhileConfirmed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFake(t)
		f.set("web", entry("web", "web-1", 80))
		r, _ := startFake(t, f)
		time.Sleep(10 * time.Second)
		var back atomic.Bool
		f.setAnswer(func(w http.ResponseWriter, r *http.Request) bool {
			if r.URL.Path != listPath || r.URL.Query().Has("index") || !back.CompareAndSwap(false, true) {
				return false
			}
			time.Sleep(2 * time.Second) // the listing is armed again meanwhile
			f.set("web", entry("web", "web-1", 81))
			time.Sleep(100 * time.Millisecond) // and shows web
			w.Header().Set("X-Consul-Index", "103")
			w.Header().Set("X-Consul-Knownleader", "true")
			w.Header().Set("X-Consul-Lastcontact", "0")
			_, _ = io.WriteString(w, `{"consul":[]}`)
			return true
		})
		f.set("web")
		time.Sleep(time.Minute)
		if !back.Load() {
			t.Fatal("no listing was asked for to confirm")
		}
		wantView(t, r, map[string][]string{"web": {"n1/web-1 10.0.0.1:81 passing"}})
	})
}

// TestIdleConnectionsCut shows that a proxy which closes what waits too long is
// no outage: removals stay immediate and the state is untouched.
func TestIdleConnectionsCut(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFake(t)
		f.set("web", entry("web", "web-1", 80), entry("web", "web-2", 80))
		r, _ := startFake(t, f)
		for range 10 {
			time.Sleep(time.Minute)
			f.cut("")
		}
		time.Sleep(time.Second)
		f.set("web", entry("web", "web-1", 80))
		time.Sleep(3 * time.Second)
		wantView(t, r, map[string][]string{"web": {"n1/web-1 10.0.0.1:80 passing"}})
		if _, calls := r.state(); calls != 0 {
			t.Errorf("degraded: %q", r.held().Reasons)
		}
	})
}

// TestSlowAnswers shows that a server that answers late, or not within the time
// limit, removes nothing.
func TestSlowAnswers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFake(t)
		f.set("web", entry("web", "web-1", 80), entry("web", "web-2", 80))
		r, _ := startFake(t, f)
		synctest.Wait()
		before := r.view()
		f.change(func() {
			f.answer = func(_ http.ResponseWriter, r *http.Request) bool { <-r.Context().Done(); return true }
			f.setLocked("web", entry("web", "web-1", 80))
		})
		// What waited is answered; what asks now hangs.
		time.Sleep(10 * time.Minute)
		if got := r.view(); len(got["web"]) == 0 {
			t.Errorf("catalog holds %v, before %v", got, before)
		}
		wantState(t, r, "no answer in time")
		f.setAnswer(nil)
		time.Sleep(3 * time.Minute)
		wantState(t, r, "")
		wantView(t, r, map[string][]string{"web": {"n1/web-1 10.0.0.1:80 passing"}})
	})
}

// TestNotSyncedWhilePartial shows that the first listing is not called complete
// before each service was answered for once.
func TestNotSyncedWhilePartial(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFake(t)
		f.set("web", entry("web", "web-1", 80))
		f.set("db", entry("db", "db-1", 5432))
		f.setAnswer(func(w http.ResponseWriter, r *http.Request) bool {
			return strings.HasSuffix(r.URL.Path, "/db") && status(500, "rpc error")(w, r)
		})
		r, _ := startFake(t, f)
		time.Sleep(time.Minute)
		wantView(t, r, map[string][]string{"web": {"n1/web-1 10.0.0.1:80 passing"}})
		if _, _, synced := r.counts(); synced {
			t.Error("synced without db")
		}
		wantState(t, r, "rpc error")
		f.setAnswer(nil)
		time.Sleep(time.Minute)
		if _, _, synced := r.counts(); !synced {
			t.Error("not synced with everything there")
		}
		wantState(t, r, "")
	})
}

// TestUnreachableAtStart shows that a registry that is away at start is a
// state, not an end.
func TestUnreachableAtStart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFake(t)
		f.set("web", entry("web", "web-1", 80))
		f.setDown(errRefused)
		r, _ := startFake(t, f)
		time.Sleep(time.Hour)
		wantState(t, r, "connection refused")
		if _, _, synced := r.counts(); synced {
			t.Error("synced without an answer")
		}
		f.setDown(nil)
		time.Sleep(6 * time.Second)
		wantState(t, r, "")
		wantView(t, r, map[string][]string{"web": {"n1/web-1 10.0.0.1:80 passing"}})
		if _, _, synced := r.counts(); !synced {
			t.Error("not synced")
		}
	})
}

// TestEmptyRegistry shows that a registry that holds nothing but Consul's own
// service is synced and empty.
func TestEmptyRegistry(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, _ := startFake(t, newFake(t))
		synctest.Wait()
		if sets, _, synced := r.counts(); sets != 0 || !synced {
			t.Errorf("%d sets, synced %t", sets, synced)
		}
		wantState(t, r, "")
	})
}

// TestAcceptFiltered shows that a token which is meant to see a part can follow
// that part: it syncs, and what goes is removed.
func TestAcceptFiltered(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFake(t)
		f.set("web", entry("web", "web-1", 80))
		f.set("db", entry("db", "db-1", 5432))
		f.change(func() { delete(f.services, "consul") })
		r, _ := startFake(t, f, func(c *Config) { c.AcceptFiltered, c.Token = true, "narrow" })
		synctest.Wait()
		if _, _, synced := r.counts(); !synced {
			t.Error("not synced")
		}
		time.Sleep(5 * time.Second)
		f.set("web")
		time.Sleep(2 * time.Second)
		wantView(t, r, map[string][]string{"db": {"n1/db-1 10.0.0.1:5432 passing"}})
		wantState(t, r, "")
		// An answer that became empty by a filter still counts for nothing.
		f.change(func() {
			f.index++
			f.services["db"].index, f.services["db"].filtered = f.index, true
		})
		time.Sleep(time.Minute)
		wantView(t, r, map[string][]string{"db": {"n1/db-1 10.0.0.1:5432 passing"}})
		wantState(t, r, "may not read")
	})
}

// TestStreamHidesInstances shows that an answer to a query that waited, which
// does not say what was filtered by ACL, removes nothing by itself: the answer
// at index 0 decides.
func TestStreamHidesInstances(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFake(t)
		f.set("web", entry("web", "web-1", 80), entry("web", "web-2", 80))
		r, _ := startFake(t, f)
		synctest.Wait()
		f.change(func() {
			f.setLocked("web", entry("web", "web-1", 81), entry("web", "web-2", 80))
			f.services["web"].filtered, f.services["web"].visible = true, 1
		})
		time.Sleep(time.Minute)
		wantView(t, r, map[string][]string{"web": {"n1/web-1 10.0.0.1:81 passing", "n1/web-2 10.0.0.1:80 passing"}})
		wantState(t, r, "may not read")
		f.set("web", entry("web", "web-1", 81))
		time.Sleep(time.Minute)
		wantView(t, r, map[string][]string{"web": {"n1/web-1 10.0.0.1:81 passing"}})
		wantState(t, r, "")
	})
}

// TestOlderAnswer shows that an answer to a query that waited, at an index that
// went down, changes nothing: the answer at index 0 decides.
func TestOlderAnswer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFake(t)
		f.set("web", entry("web", "web-1", 80))
		r, _ := startFake(t, f)
		synctest.Wait()
		f.set("web", entry("web", "web-1", 81))
		time.Sleep(time.Minute)
		before, _, _ := r.counts()
		var older atomic.Bool
		f.setAnswer(func(w http.ResponseWriter, r *http.Request) bool {
			if r.URL.Path != healthPath+"web" || r.URL.Query().Get("index") == "" || !older.CompareAndSwap(false, true) {
				return false
			}
			w.Header().Set("X-Consul-Index", "50")
			w.Header().Set("X-Consul-Lastcontact", "0")
			w.Header().Set("X-Consul-Knownleader", "false")
			w.Header().Set("X-Consul-Query-Backend", "streaming")
			_ = json.NewEncoder(w).Encode([]*api.ServiceEntry{entry("web", "web-1", 80)})
			return true
		})
		f.cut(healthPath + "web")
		time.Sleep(time.Minute)
		if !older.Load() {
			t.Fatal("the older answer was not asked for")
		}
		wantView(t, r, map[string][]string{"web": {"n1/web-1 10.0.0.1:81 passing"}})
		if now, _, _ := r.counts(); now != before {
			t.Errorf("%d updates, want none", now-before)
		}
	})
}

// TestSelection shows what services, kinds, tags, meta and filter select, and
// that a service of which nothing is selected is not there.
func TestSelection(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		tagged := func(e *api.ServiceEntry, tags ...string) *api.ServiceEntry { e.Service.Tags = tags; return e }
		f := newFake(t)
		f.set("web", tagged(entry("web", "web-1", 80), "mesh"), entry("web", "web-2", 80))
		f.set("web-internal", tagged(entry("web-internal", "x", 80), "mesh"))
		f.set("webapi", entry("webapi", "y", 80))
		f.set("other", tagged(entry("other", "z", 80), "mesh"))
		r, _ := startFake(t, f, func(c *Config) {
			c.Services = plugin.Selection{Include: plugin.Globs{"web*"}, Exclude: plugin.Globs{"*-internal"}}
			c.Filter = "mesh"
		})
		synctest.Wait()
		wantView(t, r, map[string][]string{"web": {"n1/web-1 10.0.0.1:80 passing"}})
		if _, _, synced := r.counts(); !synced {
			t.Error("not synced")
		}
		r.Look(func(h *plugintest.Held) {
			if h.LeftOut["config.services.exclude"] != `1 name left out by config.services.exclude: "web-internal"` ||
				!strings.Contains(h.LeftOut["config.services.include"], `"other"`) {
				t.Errorf("left out: %q", h.LeftOut)
			}
		})
		if n := f.count("/v1/health/service/other") + f.count("/v1/health/service/web-internal"); n != 0 {
			t.Errorf("%d queries about services that are not selected", n)
		}
		// The last instance that is selected goes; the service itself stays in
		// Consul.
		f.set("web", entry("web", "web-2", 80))
		time.Sleep(2 * time.Second)
		wantView(t, r, map[string][]string{})
		f.set("web", tagged(entry("web", "web-2", 80), "mesh"))
		time.Sleep(2 * time.Second)
		wantView(t, r, map[string][]string{"web": {"n1/web-2 10.0.0.1:80 passing"}})
		wantState(t, r, "")
	})
}

// TestScopes shows that each datacenter is asked for by name and that one of
// them being away leaves the others alone.
func TestScopes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFake(t)
		f.set("web", entry("web", "web-1", 80))
		r, _ := startFake(t, f, func(c *Config) { c.Datacenters = []string{"dc1", "dc2"} })
		synctest.Wait()
		wantView(t, r, map[string][]string{"dc1/web": {"n1/web-1 10.0.0.1:80 passing"}, "dc2/web": {"n1/web-1 10.0.0.1:80 passing"}})
		f.change(func() {
			f.index++
			f.answer = func(w http.ResponseWriter, r *http.Request) bool {
				return r.URL.Query().Get("dc") == "dc2" && status(500, "No path to datacenter")(w, r)
			}
			f.setLocked("web", entry("web", "web-2", 80))
		})
		time.Sleep(10 * time.Second)
		v := r.view()
		if diff := gocmp.Diff([]string{"n1/web-2 10.0.0.1:80 passing"}, v["dc1/web"]); diff != "" || len(v["dc2/web"]) != 1 {
			t.Errorf("catalog holds %v", v)
		}
		wantState(t, r, "dc2: consul answers with an error (500: No path to datacenter")
	})
}

// TestManyServices shows the first listing of many services: few queries at
// once, one Set each, Synced once; and that one change is one Set.
func TestManyServices(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const n = 1000
		f := newFake(t)
		for i := range n {
			name := fmt.Sprintf("svc%04d", i)
			f.set(name, entry(name, name+"-1", 80))
		}
		var now, most, fetched int
		f.setAnswer(func(_ http.ResponseWriter, r *http.Request) bool {
			f.mu.Lock()
			if r.URL.Query().Has("index") {
				if strings.Contains(r.URL.Path, "health") && fetched < n {
					t.Errorf("%s: waits before the first listing is complete, and may take a connection from it", r.URL)
				}
				f.mu.Unlock()
				return false
			}
			if strings.Contains(r.URL.Path, "health") {
				defer func() { f.mu.Lock(); fetched++; f.mu.Unlock() }()
			}
			now++
			most = max(most, now)
			f.mu.Unlock()
			time.Sleep(10 * time.Millisecond)
			f.mu.Lock()
			now--
			f.mu.Unlock()
			return false
		})
		r, _ := startFake(t, f)
		time.Sleep(time.Second)
		if sets, _, synced := r.counts(); sets != n || !synced {
			t.Errorf("%d sets, synced %t; want %d and true", sets, synced, n)
		}
		if most < 32 || most > 64 {
			t.Errorf("%d queries at once, want 32 to 64", most)
		}
		f.set("svc0500", entry("svc0500", "svc0500-1", 81))
		synctest.Wait()
		if sets, _, _ := r.counts(); sets != n+1 {
			t.Errorf("%d sets for one change, want 1", sets-n)
		}

		// An outage of all of them is one sentence, and its end another.
		f.setDown(errRefused)
		time.Sleep(time.Minute)
		before := f.tried()
		time.Sleep(4 * time.Minute)
		if tries := f.tried() - before; tries > n/2 {
			t.Errorf("%d requests in 4 minutes of an outage of %d services; the listing finds its end for all", tries, n)
		}
		f.setDown(nil)
		// The listing is tried every 5 s at most, and its return wakes all
		// others.
		time.Sleep(7 * time.Second)
		if _, calls := r.state(); calls > 4 {
			t.Errorf("degraded was called %d times for one outage of %d services: %q", calls, n, r.held().Reasons)
		}
		wantState(t, r, "")
		if sets, removes, _ := r.counts(); sets != n+1 || removes != 0 {
			t.Errorf("%d sets, %d removes by an outage", sets-n-1, removes)
		}
	})
}

// TestUnaskableName shows that a name which HTTP cannot carry is listed and
// holds up nothing.
func TestUnaskableName(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFake(t)
		f.set("a/../b", entry("a", "1", 80))
		f.set("web", entry("web", "web-1", 80))
		r, _ := startFake(t, f)
		synctest.Wait()
		if _, _, synced := r.counts(); !synced || r.held().Problems["service a/../b"] == "" {
			t.Errorf("synced %t, problem %q", synced, r.held().Problems["service a/../b"])
		}
		time.Sleep(5 * time.Second)
		f.set("a/../b")
		time.Sleep(5 * time.Second)
		if reason := r.held().Problems["service a/../b"]; reason != "" {
			t.Errorf("still listed after it went: %s", reason)
		}
	})
}

// TestNewRefuses shows that New names each field that is wrong, also where it
// is a file that shows it.
func TestNewRefuses(t *testing.T) {
	_, err := New(Config{Address: "ftp://x", Wait: 1}, plugin.Env{})
	if err == nil || !strings.Contains(err.Error(), "address") || !strings.Contains(err.Error(), "wait") {
		t.Errorf("New: %v", err)
	}
	empty := filepath.Join(t.TempDir(), "empty")
	if err := os.WriteFile(empty, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for field, configs := range map[string][]Config{
		"tls.ca_file": {{Address: "https://x", TLS: plugin.TLS{CAFile: "/does/not/exist"}}, {Address: "https://x", TLS: plugin.TLS{CAFile: empty}}},
		"token_file":  {{TokenFile: "/does/not/exist"}, {TokenFile: empty}},
	} {
		for _, c := range configs {
			_, err := New(c, plugin.Env{})
			f, ok := errors.AsType[*plugin.FieldError](err)
			if file := cmp.Or(c.TokenFile, c.TLS.CAFile); !ok || f.Field != field || !strings.Contains(f.Reason, file) {
				t.Errorf("New: %v, want %s with %s", err, field, file)
			}
		}
	}
}

// TestAtRest goes through what other tests show, with watches that never have a
// connection to wait on.
func TestAtRest(t *testing.T) {
	atRest = true
	defer func() { atRest = false }()
	for name, test := range map[string]func(*testing.T){
		"wakes": TestWakesWithoutChange, "quiet": TestQuiet, "errors": TestErrorsRemoveNothing, "replaced empty": TestReplacedEmpty,
		"replaced unseen": TestReplacedUnseen, "replaced noticed": TestReplacedNoticedByOne, "comes back": TestComesBackWhileConfirmed,
		"cut": TestIdleConnectionsCut, "slow": TestSlowAnswers, "partial": TestNotSyncedWhilePartial, "unreachable": TestUnreachableAtStart,
		"empty": TestEmptyRegistry, "accept filtered": TestAcceptFiltered, "stream hides": TestStreamHidesInstances,
		"selection": TestSelection, "scopes": TestScopes, "unaskable": TestUnaskableName,
	} {
		t.Run(name, test)
	}
}
