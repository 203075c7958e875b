package admin

import (
	"fmt"
	"html"
	"net/http"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/isthmus-mesh/isthmus/server/state"
	"github.com/isthmus-mesh/isthmus/server/state/history"
	"github.com/isthmus-mesh/isthmus/server/state/status"
)

// Problems of one kind are one group, however many there are, and those that
// another registry or another field is about are others.
func TestGroupProblems(t *testing.T) {
	var problems []state.Problem
	for i := range 200 {
		owner := []string{"prod", "test"}[i%2]
		problems = append(problems, state.Problem{
			ID: fmt.Sprint("resource r", i), Field: "conflicts",
			Reason: fmt.Sprintf(`registry %q, which comes first in the configuration, has the host h%d.example.org too (%s/h%d); shadowed`, owner, i, owner, i),
		})
		problems = append(problems, state.Problem{
			ID: fmt.Sprint("instance i", i), Field: "translate.health",
			Reason: fmt.Sprintf("has the port number %d: left out; see translate.health", 70_000+i),
		})
	}
	problems = append(problems, state.Problem{ID: "service odd", Reason: "something else"})
	var got []string
	for _, g := range groupProblems("p", "old", problems) {
		got = append(got, fmt.Sprintf("%s|%d|%d|%s", g.Title, len(g.Items), g.More, g.Field))
	}
	want := []string{
		"200: has the port number …|50|150|translate.health",
		"100 names owned by prod|50|50|conflicts",
		"100 names owned by test|50|50|conflicts",
		"service odd|1|0|",
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("groups (-want +got):\n%s", d)
	}
}

// The pages of services together have each once, whatever the filter.
func TestServicesPage(t *testing.T) {
	w := &world{}
	for i := range 250 {
		v := status.Service{Registry: "dc1", Name: fmt.Sprintf("ns/web-%03d", i), Hosts: []string{fmt.Sprintf("web-%03d.example.org", i)}, Endpoints: i % 2}
		if i%10 == 0 {
			v.ShadowedBy = "dc0"
		}
		w.services = append(w.services, v)
	}
	s := New(w, Options{})
	for filter, want := range map[string]int{"": 250, "show=kept": 25, "show=shadowed": 25, "show=empty": 125, "show=served": 225, "show=shared": 25, "q=WEB-01": 10, "registry=other": 0} {
		n := 0
		for path := "services?" + filter; path != ""; {
			code, body, _ := get(t, s, "/"+path)
			if code != http.StatusOK {
				t.Fatalf("%s: %d", path, code)
			}
			n += strings.Count(body, `<th scope="row"><a href="host/`)
			path = ""
			if _, link, ok := strings.Cut(body, `" rel="next"`); ok {
				before, _, _ := strings.Cut(body, link)
				path = html.UnescapeString(strings.TrimSuffix(before[strings.LastIndex(before, `href="`)+6:], `" rel="next"`))
			}
		}
		if n != want {
			t.Errorf("%q: %d services on all pages, want %d", filter, n, want)
		}
	}
}

// Columns sort in both directions over all pages, and an address finds the
// service of the instance that has it.
func TestServicesSort(t *testing.T) {
	w := &world{}
	for i := range 230 {
		name := fmt.Sprintf("ns/web-%03d", i)
		w.services = append(w.services, status.Service{Registry: "dc1", Name: name, Hosts: []string{fmt.Sprintf("h-%03d.example.org", 999-i)}, Endpoints: i * 7 % 230})
		w.resources = append(w.resources, Resource{Collection: "networking.istio.io/ServiceEntry", Name: name, HasAddress: func(a string, whole bool) bool {
			is := fmt.Sprintf("10.0.0.%d", i)
			return a == is || !whole && strings.HasPrefix(is, a)
		}})
	}
	s := New(w, Options{})
	row := regexp.MustCompile(`<code>ns/web-(\d+)</code></td><td class="number[^"]*">(\d+)<`)
	rows := func(filter string) (out [][2]int) {
		t.Helper()
		for path := "services?" + filter; path != ""; {
			code, body, _ := get(t, s, "/"+path)
			if code != http.StatusOK {
				t.Fatalf("%s: %d %s", path, code, body)
			}
			for _, m := range row.FindAllStringSubmatch(body, -1) {
				i, _ := strconv.Atoi(m[1])
				n, _ := strconv.Atoi(m[2])
				out = append(out, [2]int{i, n})
			}
			path = ""
			if before, _, ok := strings.Cut(body, `" rel="next"`); ok {
				path = html.UnescapeString(before[strings.LastIndex(before, `href="`)+6:])
			}
		}
		return out
	}
	for order, inOrder := range map[string]func(a, b [2]int) bool{
		"name": func(a, b [2]int) bool { return a[0] < b[0] }, "-name": func(a, b [2]int) bool { return a[0] > b[0] },
		"host": func(a, b [2]int) bool { return a[0] > b[0] }, "endpoints": func(a, b [2]int) bool { return a[1] < b[1] }, "-endpoints": func(a, b [2]int) bool { return a[1] > b[1] },
	} {
		got := rows("sort=" + order)
		if len(got) != 230 || !slices.IsSortedFunc(got, func(a, b [2]int) int {
			if inOrder(a, b) {
				return -1
			}
			return 1
		}) {
			t.Errorf("sort=%s: %d rows, %v", order, len(got), got)
		}
	}
	if got := rows("q=10.0.0.17"); len(got) != 1 || got[0][0] != 17 {
		t.Errorf("an address finds %v, want web-017", got)
	}
	for prefix, want := range map[string]int{"10.": 230, "10.0.0.": 230, "10.0.0.22": 1, "10.0.1.": 0, "0.0.": 0} {
		if got := rows("q=" + prefix); len(got) != want {
			t.Errorf("%s finds %d services, want %d", prefix, len(got), want)
		}
	}
	if found := getJSON[list[status.Service]](t, s, "/api/v1/services?q=10.0.0.17"); found.Total != 1 {
		t.Errorf("the API finds %d", found.Total)
	}
	if code, _, _ := get(t, s, "/services?sort=size"); code != http.StatusBadRequest {
		t.Errorf("an unknown column: %d", code)
	}
}

// The summary of a host says what holds it back, and what to do.
func TestExplainSummary(t *testing.T) {
	until := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	served := ExplainedRegistry{Registry: "dc1", Listed: true, Claims: []status.Claim{{Registry: "dc1", Name: "ns/web", Outcome: "served"}}}
	for name, tt := range map[string]struct {
		e    Explanation
		want string
	}{
		"nobody":      {Explanation{Registries: []ExplainedRegistry{{Registry: "dc1", Listed: true}}}, "No registry has web.example.org: register the service"},
		"not yet":     {Explanation{Registries: []ExplainedRegistry{{Registry: "dc1", Phase: "syncing"}}}, "Registry dc1 has not completed its first listing, so it may yet have the host: it is syncing."},
		"shard":       {Explanation{Host: "a", Shard: "1/2", OwnShards: "0/2"}, "web.example.org is not one of this process's hosts: it would be in shard 1/2, and this process follows 0/2 (--shards); ask the one that has it."},
		"away":        {Explanation{Registries: []ExplainedRegistry{{Registry: "dc1", Listed: true, Error: "refused"}}}, "Registry dc1 cannot be followed, so it may have the host by now: refused."},
		"no registry": {Explanation{}, "The configuration has no registry; add one under registries."},
		"protected": {
			Explanation{Registries: []ExplainedRegistry{{Registry: "dc1", Claims: []status.Claim{{Name: "ns/web", Outcome: "served", RemovalCount: 2, Removals: []status.Removal{{Reason: "swept", Until: until}}}}}}},
			"Registry dc1 no longer has 2 resources of ns/web, which is still served (swept), until 03:04:05 UTC: isthmus removals allow dc1 removes it now, isthmus removals keep dc1 keeps it.",
		},
		"filtered": {
			Explanation{Registries: []ExplainedRegistry{{Registry: "dc1", Services: []ExplainedService{{Key: "web", Steps: []ExplainedStep{{Rule: "translate.relabel.services[0]", Text: "left out by translate.relabel.services[0]"}}}}}}},
			"Registry dc1 has the service web, which is not served: left out by translate.relabel.services[0].",
		},
		"without a port": {
			Explanation{Registries: []ExplainedRegistry{{Registry: "dc1", Services: []ExplainedService{{Key: "web", Instances: []ExplainedInstance{{ID: "i", Steps: []ExplainedStep{{Rule: "translate.fallback_port", Text: "has no port"}}}}}}}}},
			"Registry dc1 has the service web, which is not served: instance i has no port (translate.fallback_port).",
		},
		"loopback": {
			Explanation{Registries: []ExplainedRegistry{{Registry: "dc1", Services: []ExplainedService{{Key: "web", Entry: "ns/web", Instances: []ExplainedInstance{{ID: "i", Address: "127.0.0.1", Resource: "ns/i"}}}}}}},
			"Instance i is served with an address of the machine itself",
		},
		"renamed": {
			Explanation{Registries: []ExplainedRegistry{{Registry: "dc1", Services: []ExplainedService{{Key: "x", Entry: "ns/web", Host: "shop.example.org"}}}}},
			"Its host is shop.example.org.",
		},
		"refused": {
			Explanation{Registries: []ExplainedRegistry{served}, Sinks: []ExplainedSink{{Node: "istiod", State: "refused", LastNack: "bad"}, {State: "acknowledged"}}},
			"1 of 2 sinks have acknowledged it; the rest: istiod (refused: bad).",
		},
	} {
		s := New(&world{explained: tt.e}, Options{})
		got := getJSON[Explanation](t, s, "/api/v1/explain?host=Web.Example.org.")
		if text := strings.Join(got.Summary, "\n"); !strings.Contains(text, tt.want) {
			t.Errorf("%s: no %q in\n%s", name, tt.want, text)
		}
		if _, page, _ := get(t, s, "/host/web.example.org"); !strings.Contains(page, "<h1 class=\"host\">web.example.org</h1>") {
			t.Errorf("%s: the page is %s", name, page)
		}
	}
}

// A change says where an endpoint was and is, and what became of its health.
func TestChangeRow(t *testing.T) {
	at := func(address string, weight uint32) *history.Endpoint {
		return &history.Endpoint{Address: address, Weight: weight}
	}
	for _, tt := range []struct {
		event              history.Event
		what, text, health string
	}{
		{history.Event{Op: "upsert", New: at("10.0.0.1", 2)}, "added", "10.0.0.1, weight 2", "→ in traffic"},
		{history.Event{Op: "upsert", Old: at("10.0.0.1", 2), New: at("10.0.0.2", 3)}, "changed", "10.0.0.1 → 10.0.0.2, weight 2 → 3", ""},
		{history.Event{Op: "remove", Old: at("10.0.0.1", 2)}, "removed", "was 10.0.0.1", "in traffic → gone"},
		{history.Event{Op: "remove", Old: at("10.0.0.1", 2), Health: "critical", Reason: "fails its check"}, "taken out", "was 10.0.0.1", "in traffic → critical<br><span class=\"faint\">fails its check</span>"},
		{history.Event{Op: "remove", Old: at("10.0.0.1", 2), Reason: "has weight 0"}, "taken out", "was 10.0.0.1", "in traffic → idle<br><span class=\"faint\">has weight 0</span>"},
		{history.Event{Op: "upsert", Version: "abc"}, "set", "version abc", ""},
	} {
		tt.event.Collection = "g/Kind"
		var row strings.Builder
		if err := templates["changes"].ExecuteTemplate(&row, "change-row", tt.event); err != nil {
			t.Fatal(err)
		}
		if got := row.String(); !strings.Contains(got, ">"+tt.what+"</span>") || !strings.Contains(got, "<td>"+tt.text+"</td><td>"+tt.health+"</td></tr>") {
			t.Errorf("%+v is %s", tt.event, got)
		}
	}
}

// A host counts once, however many services have it.
func TestConflictsOfHosts(t *testing.T) {
	conflict := func(host, name string) status.Conflict {
		return status.Conflict{Host: host, Registry: "dc2", Name: name, Owner: "dc1", OwnerName: "dc1/web"}
	}
	w := &world{overview: Overview{Conflicts: []status.Conflict{conflict("a.example.org", "n/a"), conflict("a.example.org", "m/a"), conflict("b.example.org", "n/b")}}}
	_, body, _ := get(t, New(w, Options{}), "/problems")
	for _, want := range []string{"Hosts that several services have: 2</h2>", "<strong>2 hosts</strong>"} {
		if !strings.Contains(body, want) {
			t.Errorf("the page lacks %q", want)
		}
	}
}

// The overview tells how many changes a second there are, also a moment after
// the last sample, and how large what is served is.
func TestRateOfChanges(t *testing.T) {
	w := &world{overview: Overview{Registries: []Registry{{Served: state.Status{Services: 70, Instances: 700}}}}}
	for _, s := range []struct {
		at      time.Duration
		changes uint64
	}{{0, 0}, {5 * time.Second, 10}, {10 * time.Second, 20}, {10600 * time.Millisecond, 22}} {
		w.samples = append(w.samples, history.Sample{Time: time.Unix(0, 0).Add(s.at), Services: 7, Endpoints: 21, Changes: s.changes})
	}
	_, body, _ := get(t, New(w, Options{}), "/")
	for _, want := range []string{`Services</a></dt><dd>7</dd>`, `Endpoints</a></dt><dd>21</dd>`, `Changes a second</a></dt><dd>2.1</dd>`} {
		if !strings.Contains(body, want) {
			t.Errorf("the page lacks %q", want)
		}
	}
}
