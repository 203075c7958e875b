package consul

import (
	"encoding/json"
	"maps"
	"net/http"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	gocmp "github.com/google/go-cmp/cmp"
)

// enterprise is what Consul Enterprise has besides: namespaces, by partition.
// Services are the same in all of them.
type enterprise struct {
	f          *fakeConsul
	namespaces map[string][]string // guarded by f.mu
	denied     bool                // the token may list nothing
}

// answer answers in place of the fake as the API's documentation says.
func (e *enterprise) answer(w http.ResponseWriter, r *http.Request) bool {
	e.f.mu.Lock()
	defer e.f.mu.Unlock()
	type named struct{ Name string }
	list := func(names []string) bool {
		all := []named{}
		for _, name := range names {
			if !e.denied {
				all = append(all, named{name})
			}
		}
		_ = json.NewEncoder(w).Encode(all)
		return true
	}
	q := r.URL.Query()
	switch {
	case r.URL.Path == "/v1/partitions":
		return list(slices.Collect(maps.Keys(e.namespaces)))
	case r.URL.Path == "/v1/namespaces":
		return list(e.namespaces[q.Get("partition")])
	case slices.Contains(e.namespaces[q.Get("partition")], q.Get("ns")):
		return false
	}
	// Nothing is left of what is gone.
	w.Header().Set("X-Consul-Index", "1000")
	w.Header().Set("X-Consul-Lastcontact", "0")
	w.Header().Set("X-Consul-Knownleader", "true")
	if r.URL.Path == listPath {
		_, _ = w.Write([]byte("{}"))
	} else {
		_, _ = w.Write([]byte("[]"))
	}
	return true
}

// TestAllNamespaces shows all partitions and all namespaces: each is followed
// soon after it is there, one that is gone goes with its services, and a list
// that lacks everything removes nothing.
func TestAllNamespaces(t *testing.T) {
	for _, http1 := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			f := newFake(t)
			f.http1 = http1
			f.set("web", entry("web", "web-1", 80))
			e := &enterprise{f: f, namespaces: map[string][]string{"default": {"default", "team"}, "edge": {"default"}}}
			f.answer = e.answer
			r, _ := startFake(t, f, func(c *Config) {
				c.Token, c.Partitions, c.Namespaces, c.RemoveGrace = "t", []string{"*"}, []string{"*"}, 0
			})
			time.Sleep(time.Second)
			want := func(keys ...string) {
				t.Helper()
				got := slices.Sorted(maps.Keys(r.view()))
				if diff := gocmp.Diff(keys, got); diff != "" {
					t.Errorf("catalog (-want +got):\n%s", diff)
				}
			}
			want("default/default/web", "default/team/web", "edge/default/web")
			if !r.held().Synced {
				t.Errorf("not synced; %q", r.held().Degraded)
			}
			f.change(func() { e.namespaces["edge"] = append(e.namespaces["edge"], "new") })
			time.Sleep(findEvery + time.Second)
			want("default/default/web", "default/team/web", "edge/default/web", "edge/new/web")
			f.set("web", entry("web", "web-1", 81))
			time.Sleep(3 * time.Second)
			for key, instances := range r.view() {
				if instances[0] != "n1/web-1 10.0.0.1:81 passing" {
					t.Errorf("%s: %s", key, instances[0])
				}
			}

			f.change(func() { e.denied = true })
			time.Sleep(10 * time.Minute)
			want("default/default/web", "default/team/web", "edge/default/web", "edge/new/web")
			wantState(t, r, "the token may read none")
			f.change(func() { e.denied, e.namespaces["default"] = false, []string{"default"} })
			f.cut("")
			time.Sleep(10 * time.Minute)
			want("default/default/web", "edge/default/web", "edge/new/web")
			wantState(t, r, "")
			gone := 0
			f.change(func() {
				f.answer = func(w http.ResponseWriter, r *http.Request) bool {
					if strings.Contains(r.URL.RawQuery, "ns=team") {
						gone++
					}
					return e.answer(w, r)
				}
			})
			time.Sleep(10 * time.Minute)
			f.mu.Lock()
			defer f.mu.Unlock()
			if gone > 0 {
				t.Errorf("%d queries about a namespace that is gone", gone)
			}
		})
	}
}
