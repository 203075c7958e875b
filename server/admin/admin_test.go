package admin

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"iter"
	"maps"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/goleak"

	"github.com/isthmus-mesh/isthmus/server/conditions"
	"github.com/isthmus-mesh/isthmus/server/state"
	"github.com/isthmus-mesh/isthmus/server/state/history"
	"github.com/isthmus-mesh/isthmus/server/state/status"
	"github.com/isthmus-mesh/isthmus/server/stream"
	"github.com/isthmus-mesh/isthmus/server/supervisor"
	"github.com/isthmus-mesh/isthmus/server/view"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// world is a Source that shows what it is told to.
type world struct {
	overview  Overview
	services  []status.Service
	resources []Resource
	changes   []history.Event
	kept      []status.Removal
	decide    func(registry string, accept bool) (state.Protection, error)
	explained Explanation
	changed   chan struct{}
	samples   []history.Sample
}

func (w *world) Explain(_ context.Context, host string) Explanation {
	e := w.explained
	e.Host = host
	return e
}

func (w *world) Overview() Overview                 { return w.overview }
func (w *world) NotReady() []string                 { return w.overview.NotReady }
func (w *world) Services() iter.Seq[status.Service] { return slices.Values(w.services) }
func (w *world) Resources(string) (iter.Seq[Resource], error) {
	return slices.Values(w.resources), nil
}
func (w *world) Changes() iter.Seq[history.Event] { return slices.Values(w.changes) }
func (w *world) Changed() <-chan struct{}         { return w.changed }
func (w *world) Samples() []history.Sample        { return w.samples }

func (w *world) Conditions() []conditions.Condition { return w.overview.Conditions }

func (w *world) Removals(registry string) iter.Seq[status.Removal] {
	return func(yield func(status.Removal) bool) {
		for _, k := range w.kept {
			if (registry == "" || k.Registry == registry) && !yield(k) {
				return
			}
		}
	}
}

func (w *world) Decide(registry string, accept bool) (state.Protection, error) {
	return w.decide(registry, accept)
}

func get(t *testing.T, s *Server, path string) (code int, body string, header http.Header) {
	t.Helper()
	r := httptest.NewRecorder()
	s.ServeHTTP(r, httptest.NewRequest(http.MethodGet, path, nil))
	return r.Code, r.Body.String(), r.Header()
}

func getJSON[T any](t *testing.T, s *Server, path string) T {
	t.Helper()
	code, body, header := get(t, s, path)
	if code != http.StatusOK || header.Get("Content-Type") != "application/json" {
		t.Fatalf("GET %s: %d %s: %s", path, code, header.Get("Content-Type"), body)
	}
	var v T
	if err := json.Unmarshal([]byte(body), &v); err != nil {
		t.Fatalf("GET %s: %v in %s", path, err, body)
	}
	return v
}

func TestHealth(t *testing.T) {
	w := &world{overview: Overview{NotReady: []string{"registry dc1: connecting", "registry dc2: no leader"}}}
	s := New(w, Options{})
	if code, body, _ := get(t, s, "/healthz"); code != 200 || body != "ok\n" {
		t.Errorf("/healthz = %d %q", code, body)
	}
	if code, body, _ := get(t, s, "/readyz"); code != 503 || body != "registry dc1: connecting\nregistry dc2: no leader\n" {
		t.Errorf("/readyz = %d %q", code, body)
	}
	w.overview.NotReady = nil
	if code, body, _ := get(t, s, "/readyz"); code != 200 || body != "ready\n" {
		t.Errorf("/readyz = %d %q", code, body)
	}
	wrong := conditions.New(conditions.RegistryNotLive, "registry dc1", time.Now(), "connection refused")
	w.overview.Conditions = []conditions.Condition{wrong}
	if code, body, _ := get(t, s, "/readyz"); code != 200 || body != "ready\n"+wrong.String()+"\n" {
		t.Errorf("/readyz with a dead registry = %d %q", code, body)
	}
	if got := getJSON[list[conditions.Condition]](t, s, "/api/v1/conditions"); got.Total != 1 || got.Items[0].Link != wrong.Link || got.Items[0].Problem != wrong.Problem {
		t.Errorf("/api/v1/conditions = %+v", got)
	}
	_, page, _ := get(t, s, "/")
	for _, want := range []string{`class="banner warn"`, "1 thing is wrong", wrong.Problem, wrong.Cure, wrong.Link} {
		if !strings.Contains(page, want) {
			t.Errorf("the page lacks %q", want)
		}
	}
	if strings.Contains(page, `class="banner good"`) {
		t.Error("the page says that all is well")
	}
}

// blind is a Source that only says whether the bridge is ready.
type blind struct{ Source }

func (blind) NotReady() []string { return nil }

// Conditions implements Source.
func (blind) Conditions() []conditions.Condition { return nil }

// A probe asks for nothing that takes long to collect.
func TestProbesCollectNothing(t *testing.T) {
	s := New(blind{}, Options{})
	for _, path := range []string{"/healthz", "/readyz"} {
		if code, body, _ := get(t, s, path); code != 200 {
			t.Errorf("%s = %d %q", path, code, body)
		}
	}
}

func TestMetrics(t *testing.T) {
	reg := prometheus.NewRegistry()
	c := prometheus.NewCounter(prometheus.CounterOpts{Name: "isthmus_tests_total", Help: "Tests."})
	reg.MustRegister(c)
	c.Inc()
	if code, body, _ := get(t, New(&world{}, Options{Gatherer: reg}), "/metrics"); code != 200 || !strings.Contains(body, "isthmus_tests_total 1") {
		t.Errorf("/metrics = %d %s", code, body)
	}
}

func TestPprofIsOffUnlessEnabled(t *testing.T) {
	if code, _, _ := get(t, New(&world{}, Options{}), "/debug/pprof/"); code != 404 {
		t.Errorf("/debug/pprof/ = %d, want 404", code)
	}
	if code, body, _ := get(t, New(&world{}, Options{Pprof: true}), "/debug/pprof/"); code != 200 || !strings.Contains(body, "goroutine") {
		t.Errorf("/debug/pprof/ = %d, want the index", code)
	}
}

// The pages of a list together hold each item once, in order, whatever the
// order of the source.
func TestPages(t *testing.T) {
	w := &world{}
	var want []string
	for i := range 250 {
		name := fmt.Sprintf("ns/web-%03d", i)
		w.services = append(w.services, status.Service{Registry: []string{"dc1", "dc2"}[i%2], Name: name, Hosts: []string{name[3:] + ".example.org"}})
		want = append(want, name)
	}
	rand.New(rand.NewPCG(1, 2)).Shuffle(len(w.services), func(i, j int) { w.services[i], w.services[j] = w.services[j], w.services[i] })
	s := New(w, Options{})
	for _, limit := range []int{1, 7, 50, 249, 250, 251} {
		var got []string
		after := ""
		for {
			page := getJSON[list[status.Service]](t, s, fmt.Sprintf("/api/v1/services?limit=%d&after=%s", limit, url.QueryEscape(after)))
			if page.Total != 250 || len(page.Items) > limit {
				t.Fatalf("limit %d: total %d, %d items", limit, page.Total, len(page.Items))
			}
			for _, item := range page.Items {
				got = append(got, item.Name)
			}
			if after = page.Next; after == "" {
				break
			}
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("limit %d (-want +got):\n%s", limit, diff)
		}
	}
	if page := getJSON[list[status.Service]](t, s, "/api/v1/services?registry=dc2&q=WEB-01"); page.Total != 5 || page.Items[0].Name != "ns/web-011" {
		t.Errorf("filtered: %+v", page)
	}
	if page := getJSON[list[status.Service]](t, s, "/api/v1/services?q=example.org"); page.Total != 250 || len(page.Items) != DefaultLimit {
		t.Errorf("by host: total %d, %d items", page.Total, len(page.Items))
	}
}

// A name that several registries have is on the pages once for each, in the
// order of the registries' names.
func TestPagesOfSharedNames(t *testing.T) {
	w := &world{}
	var want []string
	for i := range 12 {
		for _, registry := range []string{"dc1", "dc2", "dc3"}[:1+i%3] {
			v := status.Service{Registry: registry, Name: fmt.Sprintf("ns/web-%d", 10+i)}
			if registry != "dc1" {
				v.ShadowedBy = "dc1"
			}
			w.services = append(w.services, v)
			want = append(want, v.Name+" "+v.Registry+" "+v.ShadowedBy)
		}
	}
	s := New(w, Options{})
	for limit := 1; limit <= len(want)+1; limit++ {
		var got []string
		for after := ""; ; {
			rand.Shuffle(len(w.services), func(i, j int) { w.services[i], w.services[j] = w.services[j], w.services[i] })
			page := getJSON[list[map[string]any]](t, s, fmt.Sprintf("/api/v1/services?limit=%d&after=%s", limit, url.QueryEscape(after)))
			if page.Total != len(want) || len(page.Items) > limit {
				t.Fatalf("limit %d: total %d, %d items", limit, page.Total, len(page.Items))
			}
			for _, item := range page.Items {
				by, _ := item["shadowed_by"].(string)
				got = append(got, fmt.Sprint(item["name"], " ", item["registry"], " ", by))
			}
			if after = page.Next; after == "" {
				break
			}
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("limit %d (-want +got):\n%s", limit, diff)
		}
	}
}

func TestResources(t *testing.T) {
	bodies := 0
	body := func() (json.RawMessage, error) { bodies++; return json.RawMessage(`{"hosts":["a"]}`), nil }
	s := New(&world{resources: []Resource{
		{Registry: "dc1", Collection: "g/WorkloadEntry", Name: "n/a", Version: "1", Body: body},
		{Registry: "dc1", Collection: "g/ServiceEntry", Name: "n/b", Version: "2", Body: body},
		{Registry: "dc2", Collection: "g/ServiceEntry", Name: "n/c", Version: "3", Body: body},
	}}, Options{})
	page := getJSON[list[map[string]any]](t, s, "/api/v1/resources?collection=g/ServiceEntry")
	if page.Total != 2 || page.Items[0]["name"] != "n/b" || page.Items[1]["name"] != "n/c" || page.Items[0]["body"] != nil || bodies != 0 {
		t.Errorf("ServiceEntries: %+v after %d bodies", page, bodies)
	}
	page = getJSON[list[map[string]any]](t, s, "/api/v1/resources?q=c&body=true")
	want := map[string]any{"registry": "dc2", "collection": "g/ServiceEntry", "name": "n/c", "version": "3", "body": map[string]any{"hosts": []any{"a"}}}
	if diff := cmp.Diff([]map[string]any{want}, page.Items); diff != "" || bodies != 1 {
		t.Errorf("with its body, %d rendered (-want +got):\n%s", bodies, diff)
	}
}

// The pages of the changes together hold each once, newest first, also where
// several came in one batch.
func TestChanges(t *testing.T) {
	w := &world{}
	var want []string
	for i := range 20 {
		name := fmt.Sprint("n/", i)
		w.changes = append(w.changes, history.Event{Revision: state.Revision(20 - i/3), Registry: "dc1", Collection: "c", Name: name, Op: "upsert"})
		if i%2 == 0 {
			w.changes[i].Registry = "dc2"
			want = append(want, name)
		}
	}
	s := New(w, Options{})
	for _, limit := range []int{1, 2, 3, 9, 10, 11} {
		var got []string
		path := fmt.Sprintf("/api/v1/changes?registry=dc2&limit=%d", limit)
		for after := ""; ; {
			page := getJSON[list[history.Event]](t, s, path+after)
			for _, c := range page.Items {
				got = append(got, c.Name)
			}
			if page.Total != 10 || len(page.Items) > limit {
				t.Errorf("limit %d: total %d, %d items", limit, page.Total, len(page.Items))
			}
			if page.Next == "" {
				break
			}
			after = "&after=" + page.Next
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("limit %d (-want +got):\n%s", limit, diff)
		}
	}
}

// What is particular to a sink of the legacy protocol is in the API, and absent
// for others.
func TestSinks(t *testing.T) {
	s := New(&world{overview: Overview{Sinks: []stream.Status{
		{Protocol: "mcp", StaleNonces: 3, Subscriptions: []stream.SubscriptionStatus{{Incremental: true, Oversize: true}, {Status: view.Status{State: "waiting"}, Waiting: "penalty"}}},
		{Protocol: "sotw", Subscriptions: []stream.SubscriptionStatus{{Status: view.Status{State: "current"}}}},
	}}}, Options{})
	sinks := getJSON[list[map[string]any]](t, s, "/api/v1/sinks").Items
	of := func(v map[string]any) string {
		return fmt.Sprintf("%v %v %v %v", v["stale_nonces"], v["incremental"], v["oversize"], v["waiting"])
	}
	var got []string
	for _, sink := range sinks {
		got = append(got, of(sink))
		for _, sub := range sink["subscriptions"].([]any) {
			got = append(got, of(sub.(map[string]any)))
		}
	}
	want := []string{
		"3 <nil> <nil> <nil>", "<nil> true true <nil>", "<nil> <nil> <nil> penalty",
		"<nil> <nil> <nil> <nil>", "<nil> <nil> <nil> <nil>",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("sinks (-want +got):\n%s", diff)
	}
}

func TestListsAreNeverNull(t *testing.T) {
	s := New(&world{}, Options{})
	for _, name := range []string{"registries", "services", "resources", "sinks", "changes"} {
		if code, body, _ := get(t, s, "/api/v1/"+name); code != 200 || !strings.Contains(body, `"items": []`) {
			t.Errorf("%s = %d %s", name, code, body)
		}
	}
}

func TestErrorsAreJSON(t *testing.T) {
	s := New(&world{}, Options{})
	for path, want := range map[string]string{
		"/api/v1/things":              `404 there is no /api/v1/things; there are /api/v1/status, /api/v1/registries, /api/v1/services, /api/v1/resources, /api/v1/sinks, /api/v1/consumers, /api/v1/changes, /api/v1/removals, /api/v1/conditions, /api/v1/explain`,
		"/api/v1/services?nmae=x":     `400 unknown query parameter "nmae"; there are registry, q, limit, after`,
		"/api/v1/sinks?q=x":           `400 unknown query parameter "q"; there is none`,
		"/api/v1/resources?limit=0":   `400 limit=0: must be a number from 1 to 1000`,
		"/api/v1/resources?body=5":    `400 body=5: must be true or false`,
		"/api/v1/changes?after=x":     `400 after=x: must be what next of the page before says`,
		"/api/v1/changes?limit=10000": `400 limit=10000: must be a number from 1 to 1000`,
	} {
		code, body, header := get(t, s, path)
		var e struct{ Error string }
		if err := json.Unmarshal([]byte(body), &e); err != nil {
			t.Errorf("GET %s: %v in %s", path, err, body)
		}
		if got := fmt.Sprint(code, " ", e.Error); got != want || header.Get("Content-Type") != "application/json" {
			t.Errorf("GET %s = %s, want %s", path, got, want)
		}
	}
	r := httptest.NewRecorder()
	s.ServeHTTP(r, httptest.NewRequest(http.MethodPost, "/api/v1/services", nil))
	if r.Code != 405 || r.Header().Get("Allow") != "GET, HEAD" || !strings.Contains(r.Body.String(), "read-only") {
		t.Errorf("POST = %d %s", r.Code, r.Body)
	}
}

// The page shows every state, and text from a registry or a sink stays text.
func TestPage(t *testing.T) {
	now := time.Now()
	problems := make([]state.Problem, 61)
	for i := range problems {
		problems[i] = state.Problem{ID: fmt.Sprint("service s", i), Reason: "no address"}
	}
	s := New(&world{overview: Overview{
		Version: "1.2.3", Started: now.Add(-3 * time.Hour), Revision: 77, NotReady: []string{"registry dc1: <b>"},
		Registries: []Registry{{
			Plugin: Plugin{Registry: "dc1", Adapter: "consul", Phase: supervisor.PhaseDegraded, Sentence: "It cannot be followed.", Since: now.Add(-5 * time.Minute), LastError: "<script>alert(1)</script>", LastErrorAt: now, LastHeard: now.Add(-6 * time.Minute)},
			Served: Served{ListingSince: now.Add(-7 * time.Minute), ProblemCount: 61, SkippedCount: 61}, Problems: problems, Skipped: []state.Problem{{ID: "instance web/1", Reason: "fails its check"}},
		}, {Plugin: Plugin{Registry: "dc2", Phase: supervisor.PhaseLive}}},
		Sinks: []stream.Status{
			{Node: "sidecar~1", Address: "127.0.0.1:9", Protocol: "sotw", Profile: "istio-1.30", Shape: "inline", Connected: now, Subscriptions: []stream.SubscriptionStatus{{Status: view.Status{Collection: "g/K", State: "sent", SentVersion: "abc", AckedVersion: "def", Bytes: 1_234_567, Nacks: 1, LastNack: "no <i>"}, Lag: 4}}},
			{Node: "", Address: "127.0.0.1:7", Protocol: "mcp", Profile: "pilot-1.8", Connected: now, StaleNonces: 3, Subscriptions: []stream.SubscriptionStatus{
				{TypeURL: "istio/serviceentries", Status: view.Status{Collection: "g/S", State: "sent", Bytes: 5_000_000}, Incremental: true, Oversize: true},
				{TypeURL: "istio/workloadgroups", Status: view.Status{Collection: "g/W", State: "waiting"}, Waiting: "istio/serviceentries"},
			}},
			{Node: "quiet", Address: "127.0.0.1:8", Protocol: "delta", Connected: now},
		},
	}}, Options{})
	var header http.Header
	all := ""
	for _, path := range []string{"/", "/registries", "/services", "/sinks", "/changes", "/problems", "/host/web.example.org"} {
		code, body, h := get(t, s, path)
		if code != 200 || !strings.HasPrefix(h.Get("Content-Type"), "text/html") {
			t.Fatalf("%s = %d %v %s", path, code, h, body)
		}
		header = h
		all += body
	}
	for _, want := range []string{"Not ready", "instance web/1", "Skipped: 61", "dc1: &lt;b&gt;", "1.2.3, up 3 h, revision 77", "degraded", "It cannot be followed.", "5 min", "listing incomplete for 7 min", "Last heard from</dt><dd>6 min ago", "Last heard from</dt><dd>not told", "&lt;script&gt;", "service s49", "11 more are in the", "61: no address", "sidecar~1", "abc", "def", "1.2 MB", "Last response", "no &lt;i&gt;", "3 stale nonces", "incremental", "too large", "waits for istio/serviceentries", "has asked for nothing yet"} {
		if !strings.Contains(all, want) {
			t.Errorf("the pages lack %q", want)
		}
	}
	for _, never := range []string{"<script>", "<i>", "service s60<", "http://", "https://", "style=", "onclick"} {
		if strings.Contains(all, never) {
			t.Errorf("a page has %q", never)
		}
	}
	if csp := header.Get("Content-Security-Policy"); !strings.Contains(csp, "default-src 'none'") || header.Get("X-Content-Type-Options") != "nosniff" {
		t.Errorf("security headers: %v", header)
	}
	if code, body, header := get(t, s, "/style.css"); code != 200 || !strings.HasPrefix(header.Get("Content-Type"), "text/css") || !strings.Contains(body, "color-scheme") {
		t.Errorf("/style.css = %d %v", code, header)
	}
	if code, _, _ := get(t, s, "/nothing"); code != 404 {
		t.Errorf("/nothing = %d, want 404", code)
	}
}

// An error that is over is told from one that lasts, in the API as on the page.
func TestLastError(t *testing.T) {
	now := time.Now()
	was := Registry{Plugin: Plugin{Registry: "dc1", Phase: supervisor.PhaseLive, LastError: "connection refused", LastErrorAt: now.Add(-5 * time.Minute)}}
	for _, present := range []string{"", "connection refused"} {
		r := was
		r.Error = present
		s := New(&world{overview: Overview{Registries: []Registry{r}}}, Options{})
		_, body, _ := get(t, s, "/")
		if over := strings.Contains(body, "5 min ago; it is over"); over != (present == "") || !strings.Contains(body, "connection refused") {
			t.Errorf("present error %q: the page says that it is over: %t", present, over)
		}
		item := getJSON[list[map[string]any]](t, s, "/api/v1/registries").Items[0]
		if got, _ := item["error"].(string); got != present || item["last_error"] != "connection refused" || item["last_error_at"] == nil {
			t.Errorf("present error %q: %v", present, item)
		}
	}
}

// The page shows who else has a host, and what became of that.
func TestConflicts(t *testing.T) {
	var conflicts []status.Conflict
	for n := range maxShown + 1 {
		conflicts = append(conflicts, status.Conflict{
			Host: fmt.Sprintf("h%d.example.org", n), Policy: state.Merge, Registry: "new", Name: "new/web", Outcome: "merged", Owner: "old", OwnerName: "old/web",
		})
	}
	for _, n := range []int{0, 1, maxShown + 1} {
		_, body, _ := get(t, New(&world{overview: Overview{Conflicts: conflicts[:n]}}, Options{}), "/problems")
		if shown := strings.Contains(body, fmt.Sprintf("Hosts that several services have: %d", n)); shown != (n > 0) {
			t.Errorf("%d conflicts: shown is %t", n, shown)
		}
		row := `<th scope="row"><a href="host/h0.example.org">h0.example.org</a></th><td>merge</td><td>old <code>old/web</code></td><td>new <code>new/web</code></td><td>merged</td>`
		if strings.Contains(body, row) != (n > 0) || strings.Contains(body, "The others are in the list of") != (n > maxShown) {
			t.Errorf("%d conflicts: %s", n, body)
		}
	}
}

func TestRunEndsWithItsContext(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- New(&world{}, Options{}).Run(ctx, l) }()
	client := &http.Client{Transport: &http.Transport{}}
	r, err := client.Get("http://" + l.Addr().String() + "/healthz")
	if err != nil {
		t.Fatal(err)
	}
	if body, err := io.ReadAll(r.Body); err != nil || string(body) != "ok\n" {
		t.Errorf("/healthz = %q, %v", body, err)
	}
	r.Body.Close()
	cancel()
	if err := <-ended; err != nil {
		t.Errorf("Run = %v", err)
	}
	client.CloseIdleConnections()
}

func TestRunTellsWhyItEnded(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	l.Close()
	if err := New(&world{}, Options{}).Run(t.Context(), l); err == nil || !strings.Contains(err.Error(), l.Addr().String()) {
		t.Errorf("Run on a closed listener = %v", err)
	}
}

// The fields of the API stay what they are: tools read them.
func TestFields(t *testing.T) {
	now := time.Now()
	s := New(&world{
		overview: Overview{
			Registries: []Registry{{
				Plugin: Plugin{
					Registry: "dc1", Adapter: "consul", Version: "1", Since: now, Waiting: "w", PID: 1, RetryAt: now, LastError: "e", LastErrorAt: now,
					Violations: []supervisor.Violation{{Field: "f"}}, Services: 1, Instances: 1, LastMessage: now, LastHeard: now,
					Confinement: []string{"c"},
				},
				Served: Served{
					Registry: "dc1", Restored: now, Released: true, Waits: []string{"c"}, WaitingSince: now, Listing: true, ListingSince: now, Down: "d", Error: "e", Detail: "d", Since: now,
					Services: 2, Instances: 3, Resources: map[string]int{"c": 4}, Protection: &state.Protection{Since: now, Until: now},
				},
				Error: "e", Resources: 4, Problems: []state.Problem{{ID: "i"}},
			}},
			Sinks: []stream.Status{{Version: "v", StaleNonces: 1, Subscriptions: []stream.SubscriptionStatus{
				{Status: view.Status{LastNack: "n"}, Incremental: true, Oversize: true, Waiting: "w"},
			}}},
		},
		services:  []status.Service{{ShadowedBy: "dc1"}},
		resources: []Resource{{Name: "n"}},
		changes:   []history.Event{{Time: now, Registry: "dc1", Version: "v"}},
		kept:      []status.Removal{{Service: "s", Until: now}},
	}, Options{})
	item := func(list string) map[string]any {
		return getJSON[struct{ Items []map[string]any }](t, s, "/api/v1/"+list).Items[0]
	}
	registry, sink := item("registries"), item("sinks")
	if got := fmt.Sprint(registry["name"], " ", registry["services"], registry["instances"], registry["resources"]); got != "dc1 2 3 4" {
		t.Errorf("registry = %s", got)
	}
	for _, tt := range []struct {
		object any
		want   string
	}{
		{registry, "adapter bytes confinement detail error explanation instances kept last_error last_error_at last_heard left_out left_out_count listing_since name phase pid problem_count problems protection released removals required resources restarts restored revision services since skipped skipped_count synced version waiting waiting_since"},
		{registry["problems"].([]any)[0], "id reason"},
		{registry["protection"], "endpoints of pending resources services since until"},
		{item("kept"), "collection name reason registry service since until"},
		{sink, "address connected node profile protocol shape stale_nonces subscriptions version"},
		{sink["subscriptions"].([]any)[0], "acked_revision acked_version bytes collection held incremental lag last_nack nacks oversize resources sent sent_revision sent_version state type_url waiting"},
		{item("services"), "endpoints hosts name registry shadowed_by version"},
		{item("resources"), "collection name registry version"},
		{item("changes"), "collection name op registry revision time version"},
	} {
		if diff := cmp.Diff(tt.want, strings.Join(slices.Sorted(maps.Keys(tt.object.(map[string]any))), " ")); diff != "" {
			t.Errorf("fields (-want +got):\n%s", diff)
		}
	}
}
