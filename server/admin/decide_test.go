package admin

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/isthmus-mesh/isthmus/server/conditions"
	"github.com/isthmus-mesh/isthmus/server/state"
	"github.com/isthmus-mesh/isthmus/server/state/protect"
	"github.com/isthmus-mesh/isthmus/server/state/status"
	"github.com/isthmus-mesh/isthmus/server/supervisor"
)

// A decision needs a request of type JSON that no page of another origin sends;
// any other changes nothing.
func TestDecide(t *testing.T) {
	const asJSON = "application/json"
	for name, tt := range map[string]struct {
		path, method string
		header       map[string]string
		err          error
		code         int
		text         string // part of the answer
		called       string
	}{
		"allow":               {path: "dc1/removals/allow", header: map[string]string{"Content-Type": asJSON}, code: 200, text: `"decision": "allowed"`, called: "dc1 true"},
		"the former name":     {path: "dc1/accept", header: map[string]string{"Content-Type": asJSON}, code: 200, text: `"decision": "allowed"`, called: "dc1 true"},
		"keep":                {path: "dc1/removals/keep", header: map[string]string{"Content-Type": asJSON + "; charset=utf-8"}, code: 200, text: `"services": 7`, called: "dc1 false"},
		"the page itself":     {path: "dc1/removals/allow", header: map[string]string{"Content-Type": asJSON, "Origin": "http://example.com", "Sec-Fetch-Site": "same-origin"}, code: 200, called: "dc1 true"},
		"no registry":         {path: "dc9/removals/allow", header: map[string]string{"Content-Type": asJSON}, err: ErrNoRegistry, code: 404, text: "/api/v1/registries", called: "dc9 true"},
		"nothing held back":   {path: "dc1/removals/allow", header: map[string]string{"Content-Type": asJSON}, err: protect.ErrNothingPaused, code: 409, text: "no removal is paused", called: "dc1 true"},
		"no content type":     {path: "dc1/removals/allow", code: 415, text: "Content-Type: application/json"},
		"a form":              {path: "dc1/removals/allow", header: map[string]string{"Content-Type": "application/x-www-form-urlencoded"}, code: 415},
		"plain text":          {path: "dc1/removals/allow", header: map[string]string{"Content-Type": "text/plain"}, code: 415},
		"another origin":      {path: "dc1/removals/allow", header: map[string]string{"Content-Type": asJSON, "Origin": "http://evil.example"}, code: 403, text: "another origin"},
		"an opaque origin":    {path: "dc1/removals/allow", header: map[string]string{"Content-Type": asJSON, "Origin": "null"}, code: 403},
		"cross-site":          {path: "dc1/removals/allow", header: map[string]string{"Content-Type": asJSON, "Sec-Fetch-Site": "cross-site"}, code: 403},
		"same site":           {path: "dc1/removals/allow", header: map[string]string{"Content-Type": asJSON, "Sec-Fetch-Site": "same-site"}, code: 403},
		"get":                 {path: "dc1/removals/allow", method: http.MethodGet, code: 405, text: "use POST"},
		"another decision":    {path: "dc1/reboot", header: map[string]string{"Content-Type": asJSON}, code: 405},
		"a parameter":         {path: "dc1/removals/allow?force=true", header: map[string]string{"Content-Type": asJSON}, code: 400, text: "force"},
		"preflight":           {path: "dc1/removals/allow", method: http.MethodOptions, header: map[string]string{"Origin": "http://evil.example"}, code: 405},
		"put, another origin": {path: "dc1/removals/allow", method: http.MethodPut, header: map[string]string{"Content-Type": asJSON}, code: 405},
	} {
		t.Run(name, func(t *testing.T) {
			called := ""
			s := New(&world{decide: func(registry string, accept bool) (state.Protection, error) {
				called = fmt.Sprint(registry, " ", accept)
				return state.Protection{Services: 7}, tt.err
			}}, Options{})
			if tt.method == "" {
				tt.method = http.MethodPost
			}
			r := httptest.NewRequest(tt.method, "http://example.com/api/v1/registries/"+tt.path, strings.NewReader("{}"))
			for k, v := range tt.header {
				r.Header.Set(k, v)
			}
			w := httptest.NewRecorder()
			s.ServeHTTP(w, r)
			if w.Code != tt.code || !strings.Contains(w.Body.String(), tt.text) || called != tt.called {
				t.Errorf("%d %s, called %q; want %d, %q, %q", w.Code, w.Body, called, tt.code, tt.text, tt.called)
			}
			if w.Header().Get("Access-Control-Allow-Origin") != "" {
				t.Error("other origins are let in")
			}
		})
	}
}

// What is kept comes in pages, of one registry or of all.
func TestRemovals(t *testing.T) {
	w := &world{}
	var want []string
	for i := range 250 {
		name := fmt.Sprintf("ns/web-%03d", i)
		w.kept = append(w.kept, status.Removal{Registry: []string{"dc1", "dc2"}[i%2], Collection: "c", Name: name, Service: "ns/web", Reason: "r", Since: time.Now()})
		if i%2 == 1 {
			want = append(want, name)
		}
	}
	s := New(w, Options{})
	var got []string
	for after := ""; ; {
		page := getJSON[list[status.Removal]](t, s, "/api/v1/removals?registry=dc2&limit=7&after="+url.QueryEscape(after))
		if page.Total != 125 || len(page.Items) > 7 {
			t.Fatalf("total %d, %d items", page.Total, len(page.Items))
		}
		for _, k := range page.Items {
			got = append(got, k.Name)
		}
		if after = page.Next; after == "" {
			break
		}
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if page := getJSON[list[status.Removal]](t, s, "/api/v1/kept"); page.Total != 250 || len(page.Items) != DefaultLimit {
		t.Errorf("of all registries: total %d, %d items", page.Total, len(page.Items))
	}
}

// What is held and what is held back is on the page, and the latter does not
// make the bridge unready.
func TestHeldIsShown(t *testing.T) {
	now := time.Now()
	s := New(&world{overview: Overview{
		Conditions: []conditions.Condition{conditions.New(conditions.RemovalPaused, "registry dc1", now, "protected: <b>")},
		Registries: []Registry{
			{Plugin: Plugin{Registry: "dc1", Phase: supervisor.PhaseRemovalPaused}, Served: Served{Required: true, Protection: &state.Protection{Pending: true, Services: 11, Of: 20, Endpoints: 22, Since: now.Add(-time.Minute), Until: now.Add(9 * time.Minute)}}},
			{Plugin: Plugin{Registry: "dc2", Phase: supervisor.PhaseSyncing}, Served: Served{Waits: []string{"networking.istio.io/ServiceEntry", "networking.istio.io/WorkloadEntry"}, WaitingSince: now.Add(-50 * time.Second)}},
			{Plugin: Plugin{Registry: "dc3", Phase: supervisor.PhaseDegraded}, Served: Served{Released: true, Protection: &state.Protection{Services: 3, Of: 9}}, Error: "connection refused"},
		},
	}}, Options{})
	if code, body, _ := get(t, s, "/readyz"); code != 200 || !strings.HasPrefix(body, "ready\nregistry dc1: removal-paused: protected: <b>, since ") {
		t.Errorf("/readyz = %d %q", code, body)
	}
	_, page, _ := get(t, s, "/")
	_, registries, _ := get(t, s, "/registries")
	page += registries
	for _, want := range []string{
		"would remove 11 of 20 services, 22 endpoints", "since 60 s, until " + now.Add(9*time.Minute).UTC().Format("15:04:05"),
		"types that wait for it, for 50 s: ServiceEntry, WorkloadEntry", "optional: served without it", "Last heard from</dt><dd>not since the start", "removal kept: would remove 3 of 9 services", "protected: &lt;b&gt;",
	} {
		if !strings.Contains(page, want) {
			t.Errorf("the page lacks %q:\n%s", want, page)
		}
	}
}
