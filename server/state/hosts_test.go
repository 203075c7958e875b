package state

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	networking "istio.io/api/networking/v1alpha3"

	"github.com/isthmus-mesh/isthmus/plugin/collection"
	pluginv1 "github.com/isthmus-mesh/isthmus/plugin/proto/isthmus/plugin/v1"
	"github.com/isthmus-mesh/isthmus/server/encode"
	"github.com/isthmus-mesh/isthmus/server/state/record"
	"github.com/isthmus-mesh/isthmus/server/state/saved"
	"github.com/isthmus-mesh/isthmus/server/state/status"
)

// port is a port of a service; its name says its protocol.
func port(name string, number uint32) *networking.ServicePort {
	proto, _, _ := strings.Cut(name, "-")
	return &networking.ServicePort{Name: name, Number: number, Protocol: strings.ToUpper(proto)}
}

func serviceOf(name string, se *networking.ServiceEntry) *pluginv1.Upsert {
	return &pluginv1.Upsert{Service: name, Resource: raw(name, se)}
}

func endpointOf(service, name string, we *networking.WorkloadEntry) *pluginv1.Upsert {
	return &pluginv1.Upsert{Service: service, Resource: raw(name, we)}
}

// dump returns what sinks of a shape get, one line per resource.
func (e env) dump(shape encode.Shape) string {
	e.t.Helper()
	var lines []string
	text := func(we *networking.WorkloadEntry) string {
		s := we.GetAddress()
		for _, name := range slices.Sorted(maps.Keys(we.GetPorts())) {
			s += fmt.Sprintf(" %s:%d", name, we.GetPorts()[name])
		}
		if w := we.GetWeight(); w > 0 {
			s += fmt.Sprintf(" *%d", w)
		}
		return s
	}
	for _, coll := range []string{collection.ServiceEntry, collection.WorkloadEntry} {
		for c := range e.Changes(Kind{coll, shape}, &Cursor{}) {
			body, err := decode(e.t, c.Record, encode.Form{Shape: shape}).GetBody().UnmarshalNew()
			if err != nil {
				e.t.Fatal(err)
			}
			switch b := body.(type) {
			case *networking.ServiceEntry:
				line := "se " + c.Name + " " + strings.Join(b.GetHosts(), ",")
				for _, ep := range b.GetEndpoints() {
					line += " [" + text(ep) + "]"
				}
				if sel := b.GetWorkloadSelector(); sel != nil {
					line += " selects " + sel.GetLabels()[encode.SelectorLabel]
				}
				lines = append(lines, line)
			case *networking.WorkloadEntry:
				lines = append(lines, "we "+c.Name+" ["+text(b)+"] of "+b.GetLabels()[encode.SelectorLabel])
			}
		}
	}
	slices.Sort(lines)
	return strings.Join(lines, "\n")
}

// wantDump compares what sinks of both shapes get.
func (e env) wantDump(what, inline, workload string) {
	e.t.Helper()
	for shape, want := range map[encode.Shape]string{encode.Inline: inline, encode.Workload: workload} {
		lines := strings.Fields(strings.ReplaceAll(strings.TrimSpace(want), " ", "\x00"))
		for i, l := range lines {
			lines[i] = strings.ReplaceAll(l, "\x00", " ")
			lines[i] = strings.TrimSpace(lines[i])
		}
		if d := cmp.Diff(strings.Join(lines, "\n"), e.dump(shape)); d != "" {
			e.t.Errorf("%s: shape %v (-want +got):\n%s", what, shape, d)
		}
	}
}

// twoOfOneHost has two registries whose services have one host, in a namespace
// each.
func twoOfOneHost(t testing.TB, rules ...ConflictRule) env {
	e := newEnv(t, Options{Conflicts: rules}, "a", "b")
	e.Registry("b").Apply(upserts(entry("b/web", "web.example.org"), instance("b/web", "b/web-1", "10.2.0.1"), instance("b/web", "b/web-2", "10.2.0.2")))
	e.Registry("b").Apply(synced)
	e.Registry("a").Apply(upserts(entry("a/web", "web.example.org"), instance("a/web", "a/web-1", "10.1.0.1")))
	e.Registry("a").Apply(synced)
	return e
}

func removed(coll string, names ...string) *pluginv1.WatchResponse {
	m := &pluginv1.WatchResponse{}
	for _, n := range names {
		m.Removals = append(m.Removals, gone(coll, n))
	}
	return m
}

func rule(policy Policy, weights map[string]uint32) ConflictRule {
	return ConflictRule{Hosts: []string{"*.example.org"}, Policy: policy, Weights: weights}
}

// Without a rule the first registry of the configuration serves the host, and
// the next one at once when it has it no longer.
func TestPriority(t *testing.T) {
	for _, rules := range [][]ConflictRule{nil, {rule(Priority, nil)}, {{Hosts: []string{"other.*"}, Policy: Isolate}}} {
		e := twoOfOneHost(t, rules...)
		e.wantDump("both", `
			se a/web web.example.org [10.1.0.1]`, `
			se a/web web.example.org selects web
			we a/web-1 [10.1.0.1] of web`)
		problems := e.Registry("b").Problems()
		if len(problems) != 1 || !strings.Contains(problems[0].Reason, `registry "a", which comes first in the configuration, has the host web.example.org too (a/web)`) ||
			!strings.Contains(problems[0].Reason, "conflicts with policy merge") {
			t.Errorf("problems: %v", problems)
		}
		for s := range e.Services() {
			if want := map[string]string{"b": "a"}[s.Registry]; s.ShadowedBy != want {
				t.Errorf("%s is shadowed by %q, want %q", s.Name, s.ShadowedBy, want)
			}
		}
		e.Registry("a").Apply(removed(collection.ServiceEntry, "a/web"))
		e.wantDump("the first one lost it", `
			se b/web web.example.org [10.2.0.1] [10.2.0.2]`, `
			se b/web web.example.org selects web
			we b/web-1 [10.2.0.1] of web
			we b/web-2 [10.2.0.2] of web`)
		if p := e.Registry("b").Problems(); len(p) > 0 {
			t.Errorf("problems: %v", p)
		}
	}
}

// Each registry's entry is served, but for one in the namespace of the other.
func TestIsolate(t *testing.T) {
	e := twoOfOneHost(t, rule(Isolate, nil))
	e.wantDump("both", `
		se a/web web.example.org [10.1.0.1]
		se b/web web.example.org [10.2.0.1] [10.2.0.2]`, `
		se a/web web.example.org selects web
		se b/web web.example.org selects web
		we a/web-1 [10.1.0.1] of web
		we b/web-1 [10.2.0.1] of web
		we b/web-2 [10.2.0.2] of web`)
	if p := e.Registry("b").Problems(); len(p) > 0 {
		t.Errorf("problems: %v", p)
	}
	for s := range e.Services() {
		if want := map[string]string{"b": "a"}[s.Registry]; s.Beside != want || s.ShadowedBy != "" {
			t.Errorf("%s stands beside %q (shadowed by %q), want %q", s.Name, s.Beside, s.ShadowedBy, want)
		}
	}
	b := e.Registry("b")
	b.Apply(removed(collection.ServiceEntry, "b/web"))
	b.Apply(upserts(entry("a/web", "web.example.org"), instance("a/web", "a/web-9", "10.2.0.9")))
	e.wantDump("one name", `
		se a/web web.example.org [10.1.0.1]`, `
		se a/web web.example.org selects web
		we a/web-1 [10.1.0.1] of web`)
	if p := b.Problems(); len(p) != 1 || !strings.Contains(p[0].Reason, "both are in the namespace a; give one of the two another") {
		t.Errorf("problems: %v", p)
	}
}

// Of two services of one registry that have one host, the first by name is
// served and the other one listed; it takes over when the first is gone. A rule
// with the registry may say otherwise.
func TestOneRegistry(t *testing.T) {
	two := func(rules ...ConflictRule) env {
		e := newEnv(t, Options{Conflicts: rules}, "a")
		e.Registry("a").Apply(upserts(entry("ns/db-prod", "db.example.org"), instance("ns/db-prod", "ns/db-prod-1", "10.1.0.2")))
		e.Registry("a").Apply(upserts(entry("ns/db", "db.example.org"), instance("ns/db", "ns/db-1", "10.1.0.1")))
		e.Registry("a").Apply(synced)
		return e
	}
	for name, rules := range map[string][]ConflictRule{"no rule": nil, "a rule between registries": {rule(Merge, nil)}} {
		t.Run(name, func(t *testing.T) {
			e := two(rules...)
			e.wantDump("both", `
				se ns/db db.example.org [10.1.0.1]`, `
				se ns/db db.example.org selects db
				we ns/db-1 [10.1.0.1] of db`)
			p := e.Registry("a").Problems()
			if len(p) != 1 || p[0].ID != "resource networking.istio.io/ServiceEntry ns/db-prod" || !strings.Contains(p[0].Reason, `ns/db of the same registry "a", which comes first by name, has the host db.example.org too`) {
				t.Errorf("problems: %v", p)
			}
			want := []status.Conflict{{Host: "db.example.org", Policy: Priority, Registry: "a", Name: "ns/db-prod", Outcome: "shadowed", Owner: "a", OwnerName: "ns/db"}}
			if d := cmp.Diff(want, e.Conflicts()); d != "" {
				t.Errorf("conflicts (-want +got):\n%s", d)
			}
			for s := range e.Services() {
				if want := map[string]string{"ns/db-prod": "ns/db"}[s.Name]; s.ShadowedBy != want {
					t.Errorf("%s is shadowed by %q, want %q", s.Name, s.ShadowedBy, want)
				}
			}
			e.Registry("a").Apply(removed(collection.ServiceEntry, "ns/db"))
			e.wantDump("one", `
				se ns/db-prod db.example.org [10.1.0.2]`, `
				se ns/db-prod db.example.org selects db-prod
				we ns/db-prod-1 [10.1.0.2] of db-prod`)
			if p := e.Registry("a").Problems(); len(p) > 0 || len(e.Conflicts()) > 0 {
				t.Errorf("problems: %v, conflicts: %v", p, e.Conflicts())
			}
		})
	}
	merged := rule(Merge, nil)
	merged.Registry = "a"
	e := two(merged)
	e.wantDump("merged", `
		se ns/db db.example.org [10.1.0.1] [10.1.0.2]`, `
		se ns/db db.example.org selects db
		we ns/db-1 [10.1.0.1] of db
		we ns/db-prod-1.ns.a [10.1.0.2] of db`)
	e.Registry("a").Apply(removed(collection.WorkloadEntry, "ns/db-prod-1"))
	e.wantDump("an instance is gone", `
		se ns/db db.example.org [10.1.0.1]`, `
		se ns/db db.example.org selects db
		we ns/db-1 [10.1.0.1] of db`)
	if p := e.Registry("a").Problems(); len(p) > 0 {
		t.Errorf("problems: %v", p)
	}
}

// whenLogged calls f with each line.
type whenLogged struct {
	slog.Handler
	f func(line string)
}

// Enabled implements slog.Handler.
func (h whenLogged) Enabled(context.Context, slog.Level) bool { return true }

// Handle implements slog.Handler.
func (h whenLogged) Handle(_ context.Context, r slog.Record) error {
	h.f(r.Message)
	return nil
}

// WithAttrs implements slog.Handler.
func (h whenLogged) WithAttrs([]slog.Attr) slog.Handler { return h }

// Whoever waits for the line finds the registry listed.
func TestListingLineComesLast(t *testing.T) {
	var d *DB
	lines := 0
	d = New([]string{"a"}, Options{}, slog.New(whenLogged{slog.DiscardHandler, func(line string) {
		if line != "listing complete" {
			return
		}
		lines++
		if s := d.Registry("a").Status(); !s.Synced || s.Resources[collection.ServiceEntry] != 1 || !d.Initialized(collection.ServiceEntry) {
			t.Errorf("when it is logged, the status is %+v", s)
		}
	}}), prometheus.NewRegistry())
	r := d.Registry("a")
	r.Begin(nil)
	if err := r.Apply(&pluginv1.WatchResponse{Upserts: []*pluginv1.Upsert{entry("ns/a", "a.example.org")}, Synced: true}); err != nil || lines != 1 {
		t.Errorf("%d lines, %v", lines, err)
	}
}

// The line of a complete listing counts resources that belong to no service
// where there are any.
func TestListingLine(t *testing.T) {
	for want, m := range map[string]*pluginv1.WatchResponse{
		"services=1 instances=1\n":                   upserts(entry("ns/s", "s.example.org"), instance("ns/s", "ns/s-1", "10.0.0.1")),
		"services=0 instances=0 other_resources=1\n": upserts(route("ns/r", "r.example.org")),
	} {
		var log bytes.Buffer
		d := New([]string{"a"}, Options{}, slog.New(slog.NewTextHandler(&log, nil)), prometheus.NewRegistry())
		d.Registry("a").Begin(nil)
		d.Registry("a").Apply(m)
		d.Registry("a").Apply(synced)
		if line := `msg="listing complete" registry=a ` + want; !strings.Contains(log.String(), line) {
			t.Errorf("the log lacks %q:\n%s", line, &log)
		}
	}
}

// The first registry's entry has the endpoints of all, and one changed instance
// of any is one small update.
func TestMerge(t *testing.T) {
	e := twoOfOneHost(t, rule(Merge, nil))
	e.wantDump("both", `
		se a/web web.example.org [10.1.0.1] [10.2.0.1] [10.2.0.2]`, `
		se a/web web.example.org selects web
		we a/web-1 [10.1.0.1] of web
		we a/web-1.b [10.2.0.1] of web
		we a/web-2.b [10.2.0.2] of web`)
	for s := range e.Services() {
		want := map[string]string{"a": "b", "b": "a"}[s.Registry]
		if strings.Join(s.MergedWith, " ") != want || s.ShadowedBy != "" {
			t.Errorf("%s is merged with %q (shadowed by %q), want %q", s.Name, s.MergedWith, s.ShadowedBy, want)
		}
	}
	before := e.Revision()
	e.Registry("b").Apply(upserts(instance("b/web", "b/web-1", "10.2.0.9")))
	if n := e.Revision() - before; n != 2 {
		t.Errorf("one changed instance cost %d revisions, want one per shape", n)
	}
	e.wantDump("b's instance changed", `
		se a/web web.example.org [10.1.0.1] [10.2.0.2] [10.2.0.9]`, `
		se a/web web.example.org selects web
		we a/web-1 [10.1.0.1] of web
		we a/web-1.b [10.2.0.9] of web
		we a/web-2.b [10.2.0.2] of web`)
	e.Registry("a").Apply(upserts(instance("a/web", "a/web-1", "10.2.0.2"), instance("a/web", "a/web-2", "10.1.0.2")))
	e.wantDump("an endpoint that both have is served once", `
		se a/web web.example.org [10.1.0.2] [10.2.0.2] [10.2.0.9]`, `
		se a/web web.example.org selects web
		we a/web-1 [10.2.0.2] of web
		we a/web-1.b [10.2.0.9] of web
		we a/web-2 [10.1.0.2] of web`)
	e.Registry("a").Apply(removed(collection.ServiceEntry, "a/web"))
	e.wantDump("a lost it", `
		se b/web web.example.org [10.2.0.2] [10.2.0.9]`, `
		se b/web web.example.org selects web
		we b/web-1 [10.2.0.9] of web
		we b/web-2 [10.2.0.2] of web`)
}

// Hosts that differ only in the case of letters are one, as proxies route to
// one of them. The letters of the first registry are served.
func TestConflictsIgnoreCase(t *testing.T) {
	for policy, want := range map[Policy]string{
		Priority: `
			se a/web Web.Example.org [10.1.0.1]`,
		Merge: `
			se a/web Web.Example.org [10.1.0.1] [10.2.0.1]`,
		Isolate: `
			se a/web Web.Example.org [10.1.0.1]
			se b/web web.example.ORG,web.example.org [10.2.0.1]`,
	} {
		e := newEnv(t, Options{Conflicts: []ConflictRule{{Hosts: []string{"WEB.*"}, Policy: policy}}}, "a", "b")
		a, b := e.Registry("a"), e.Registry("b")
		other := &networking.ServiceEntry{Hosts: []string{"web.example.ORG", "web.example.org"}, Resolution: networking.ServiceEntry_STATIC}
		b.Apply(upserts(serviceOf("b/web", other), instance("b/web", "b/web-1", "10.2.0.1")))
		a.Apply(upserts(entry("a/web", "Web.Example.org"), instance("a/web", "a/web-1", "10.1.0.1")))
		inline := func(what, want string) {
			t.Helper()
			if d := cmp.Diff(strings.ReplaceAll(strings.TrimSpace(want), "\t", ""), e.dump(encode.Inline)); d != "" {
				t.Errorf("%s: %s (-want +got):\n%s", policy, what, d)
			}
		}
		inline("both", want)
		a.Apply(removed(collection.ServiceEntry, "a/web"))
		inline("the first one lost it", "se b/web web.example.ORG,web.example.org [10.2.0.1]")
		if p := b.Problems(); len(p) > 0 {
			t.Errorf("%s: problems: %v", policy, p)
		}
		b.Apply(removed(collection.ServiceEntry, "b/web"))
		if n := e.hosts.Len(); n > 0 {
			t.Errorf("%s: %d hosts, verdicts and policies are left", policy, n)
		}
	}
}

// Equal names are merged too: names of endpoints stay unique.
func TestMergeOfEqualNames(t *testing.T) {
	e := newEnv(t, Options{Conflicts: []ConflictRule{rule(Merge, nil)}}, "a", "b")
	for n, name := range []string{"a", "b"} {
		e.Registry(name).Apply(upserts(entry("ns/web", "web.example.org"), instance("ns/web", "ns/web-1", fmt.Sprintf("10.%d.0.1", n+1))))
	}
	e.wantDump("both", `
		se ns/web web.example.org [10.1.0.1] [10.2.0.1]`, `
		se ns/web web.example.org selects web
		we ns/web-1 [10.1.0.1] of web
		we ns/web-1.ns.b [10.2.0.1] of web`)
	e.Registry("a").Apply(removed(collection.ServiceEntry, "ns/web"))
	e.wantDump("a lost it", `
		se ns/web web.example.org [10.2.0.1]`, `
		se ns/web web.example.org selects web
		we ns/web-1 [10.2.0.1] of web`)
}

// Weights move traffic from one registry to the other, without a change of the
// ServiceEntry's name or of its selector.
func TestWeights(t *testing.T) {
	weights := func(a, b uint32) ConflictRule { return rule(Merge, map[string]uint32{"a": a, "b": b}) }
	e := twoOfOneHost(t, weights(100, 0))
	e.wantDump("100/0", `
		se a/web web.example.org [10.1.0.1 *268435456]`, `
		se a/web web.example.org selects web
		we a/web-1 [10.1.0.1 *268435456] of web`)
	e.SetConflicts([]ConflictRule{weights(90, 10)})
	e.wantDump("90/10", `
		se a/web web.example.org [10.1.0.1 *241591910] [10.2.0.1 *13421773] [10.2.0.2 *13421773]`, `
		se a/web web.example.org selects web
		we a/web-1 [10.1.0.1 *241591910] of web
		we a/web-1.b [10.2.0.1 *13421773] of web
		we a/web-2.b [10.2.0.2 *13421773] of web`)
	e.SetConflicts([]ConflictRule{weights(0, 100)})
	e.wantDump("0/100", `
		se a/web web.example.org [10.2.0.1 *134217728] [10.2.0.2 *134217728]`, `
		se a/web web.example.org selects web
		we a/web-1.b [10.2.0.1 *134217728] of web
		we a/web-2.b [10.2.0.2 *134217728] of web`)
	e.SetConflicts([]ConflictRule{rule(Merge, map[string]uint32{"a": 1})})
	e.wantDump("b is not named", `
		se a/web web.example.org [10.1.0.1]`, `
		se a/web web.example.org selects web
		we a/web-1 [10.1.0.1] of web`)
	if p := e.Registry("b").Problems(); len(p) != 1 || !strings.Contains(p[0].Reason, `conflicts[0].weights does not name registry "b"`) {
		t.Errorf("problems: %v", p)
	}
	e.SetConflicts(nil)
	e.wantDump("no rule", `
		se a/web web.example.org [10.1.0.1]`, `
		se a/web web.example.org selects web
		we a/web-1 [10.1.0.1] of web`)
}

// A registry that is renamed together with its share changes names of endpoints
// only: at no time a reader sees the host without them.
func TestRenameWithWeights(t *testing.T) {
	e := twoOfOneHost(t, rule(Merge, map[string]uint32{"a": 0, "b": 1}))
	before := e.dump(encode.Inline)
	c, revision := At(e.Revision()), e.Revision()
	e.Configure([]string{"a", "z"}, map[string]string{"z": "b"}, []ConflictRule{rule(Merge, map[string]uint32{"a": 0, "z": 1})}, netip.Prefix{})
	if after := e.dump(encode.Inline); strings.Count(after, "10.2.0.") != 2 || strings.Count(before, "10.2.0.") != 2 {
		t.Errorf("before:\n%s\nafter:\n%s", before, after)
	}
	for change := range e.Changes(Kind{collection.ServiceEntry, encode.Workload}, &c) {
		t.Errorf("%s changed", change.Name)
	}
	batches := make(map[Revision]bool)
	for event := range e.History() {
		if event.Collection == collection.ServiceEntry && event.Revision > revision {
			t.Errorf("%s is told to have changed, of which endpoints alone did", event.Name)
		}
		if event.Revision > revision {
			batches[event.Revision] = true
		}
	}
	if len(batches) != 1 {
		t.Errorf("the endpoints changed %d times, want once, for the names", len(batches))
	}
}

// The shares hold with any number of instances and any weights of theirs, and
// no sum overflows.
func TestShares(t *testing.T) {
	for _, counts := range [][2]int{{1, 1}, {1, 3}, {7, 100}, {129, 1}, {131, 1000}, {5000, 3}, {3000, 2000}} {
		for _, own := range []uint32{0, 1, 100, 1_000_000} {
			e := newEnv(t, Options{Conflicts: []ConflictRule{rule(Merge, map[string]uint32{"a": 90, "b": 10})}}, "a", "b")
			for n, name := range []string{"a", "b"} {
				m := upserts(entry(name+"/web", "web.example.org"))
				for i := range counts[n] {
					we := &networking.WorkloadEntry{Address: fmt.Sprintf("10.%d.%d.%d", n, i>>8, i&255), Weight: own}
					m.Upserts = append(m.Upserts, endpointOf(name+"/web", fmt.Sprintf("%s/web-%d", name, i), we))
				}
				e.Registry(name).Apply(m)
			}
			c, _ := e.Get(Kind{collection.ServiceEntry, encode.Inline}, "a/web")
			var sums [2]uint64
			for r := range c.Instances() {
				n := 0
				if strings.HasPrefix(r.Address(), "10.1.") {
					n = 1
				}
				sums[n] += uint64(encode.Weight(r.Spec()))
			}
			if sums[0]+sums[1] >= 1<<32 {
				t.Errorf("%v: the sum of weights is %d", counts, sums[0]+sums[1])
			}
			share := float64(sums[1]) / float64(sums[0]+sums[1])
			if share < 0.099 || share > 0.101 {
				t.Errorf("%v instances of weight %d: b has a share of %.4f, want 0.1", counts, own, share)
			}
		}
	}
}

// Ports of the first registry hold; what has no place for them is not merged.
func TestPortsOfMerged(t *testing.T) {
	for _, tt := range []struct {
		name       string
		a, b       []*networking.ServicePort
		endpoint   map[string]uint32 // of b
		want, says string            // b's endpoint, and what is listed
	}{
		{
			"same",
			[]*networking.ServicePort{port("http", 80)},
			[]*networking.ServicePort{port("http", 80)},
			map[string]uint32{"http": 8080},
			"10.2.0.1 http:8080", "",
		},
		{
			"number by name",
			[]*networking.ServicePort{port("http", 80)},
			[]*networking.ServicePort{port("http", 8080)},
			nil, "10.2.0.1 http:8080", "its port http is 8080 and that of the other one 80, which holds",
		},
		{
			"name by number",
			[]*networking.ServicePort{port("http", 80), port("grpc", 90)},
			[]*networking.ServicePort{port("http-main", 80), port("grpc", 90), port("tcp", 70)},
			map[string]uint32{"http-main": 8080},
			"10.2.0.1 grpc:90 http:8080", "its port tcp (70) is not served",
		},
		{
			"the only one",
			[]*networking.ServicePort{port("http", 80)},
			[]*networking.ServicePort{port("tcp", 9000)},
			map[string]uint32{"tcp": 9001},
			"10.2.0.1 http:9001", "its port tcp is TCP and that of the other one HTTP, which holds",
		},
		{
			"missing",
			[]*networking.ServicePort{port("http", 80), port("grpc", 90)},
			[]*networking.ServicePort{port("http", 80)},
			nil, "", "it has no port grpc (90); shadowed",
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			e := newEnv(t, Options{Conflicts: []ConflictRule{rule(Merge, nil)}}, "a", "b")
			for name, ports := range map[string][]*networking.ServicePort{"a": tt.a, "b": tt.b} {
				e.Registry(name).Apply(upserts(serviceOf(name+"/web", &networking.ServiceEntry{
					Hosts: []string{"web.example.org"}, Ports: ports, Resolution: networking.ServiceEntry_STATIC,
				})))
			}
			e.Registry("b").Apply(upserts(endpointOf("b/web", "b/web-1", &networking.WorkloadEntry{Address: "10.2.0.1", Ports: tt.endpoint})))
			inline, workload := "se a/web web.example.org", "se a/web web.example.org selects web"
			if tt.want != "" {
				inline += " [" + tt.want + "]"
				workload += "\nwe a/web-1.b [" + tt.want + "] of web"
			}
			e.wantDump("served", inline, workload)
			p := e.Registry("b").Problems()
			if (len(p) > 0) != (tt.says != "") || len(p) > 0 && !strings.Contains(p[0].Reason, tt.says) || e.Registry("b").Status().ProblemCount != len(p) {
				t.Errorf("problems: %v, want %q", p, tt.says)
			}
		})
	}
}

// An entry gives way to one only that is visible wherever it is.
func TestVisibility(t *testing.T) {
	for _, tt := range []struct {
		a, b   string // exportTo
		served string // names
		says   string
	}{
		{"", "", "a/web", "shadowed"},
		{"*", ".", "a/web", "shadowed"},
		{".", ".", "a/web b/web", ""},
		{"~", "*", "a/web b/web", ""},
		{".", "*", "a/web b/web", "visible in namespaces that do not see the other one"},
		{"b,c", ".", "a/web", "shadowed"},
		{"b", "b,c", "a/web b/web", "visible in namespaces"},
	} {
		for _, policy := range []Policy{Priority, Merge} {
			e := newEnv(t, Options{Conflicts: []ConflictRule{rule(policy, nil)}}, "a", "b")
			for name, to := range map[string]string{"a": tt.a, "b": tt.b} {
				se := &networking.ServiceEntry{Hosts: []string{"web.example.org"}, Resolution: networking.ServiceEntry_STATIC}
				if to != "" {
					se.ExportTo = strings.Split(to, ",")
				}
				e.Registry(name).Apply(upserts(serviceOf(name+"/web", se), instance(name+"/web", name+"/web-1", "10.0.0.1")))
			}
			var names []string
			for c := range e.Changes(Kind{Collection: collection.ServiceEntry}, &Cursor{}) {
				names = append(names, c.Name)
			}
			slices.Sort(names)
			p := e.Registry("b").Problems()
			says := tt.says
			if says == "shadowed" && policy == Merge {
				says = ""
			}
			if strings.Join(names, " ") != tt.served || (len(p) > 0) != (says != "") || len(p) > 0 && !strings.Contains(p[0].Reason, says) {
				t.Errorf("exportTo %q and %q, %s: served are %v, problems %v", tt.a, tt.b, policy, names, p)
			}
		}
	}
}

// Conflicts of hosts are counted by policy, and logged once.
func TestConflictsAreShown(t *testing.T) {
	var log text
	reg := prometheus.NewRegistry()
	d := New([]string{"a", "b"}, Options{Conflicts: []ConflictRule{{Hosts: []string{"m.*"}, Policy: Merge}, {Hosts: []string{"i.*"}, Policy: Isolate}}},
		slog.New(slog.NewTextHandler(&log, nil)), reg)
	want := func(what string, counts map[string]float64) {
		t.Helper()
		families, err := reg.Gather()
		if err != nil {
			t.Fatal(err)
		}
		got := map[string]float64{}
		for _, f := range families {
			if f.GetName() == "isthmus_conflicts" {
				for _, m := range f.GetMetric() {
					got[m.GetLabel()[0].GetValue()] = m.GetGauge().GetValue()
				}
			}
		}
		if d := cmp.Diff(counts, got); d != "" {
			t.Errorf("%s (-want +got):\n%s", what, d)
		}
	}
	want("none", map[string]float64{"merge": 0, "isolate": 0, "priority": 0})
	for _, name := range []string{"a", "b"} {
		d.Registry(name).Apply(upserts(entry(name+"/m", "m.org"), entry(name+"/i", "i.org"), entry(name+"/p", "p.org"), entry(name+"/q", "q.org"), entry(name+"/alone", name+".org")))
	}
	want("all", map[string]float64{"merge": 1, "isolate": 1, "priority": 2})
	for _, line := range []string{
		`msg="another service has the host; shadowed" registry=b host=p.org name=b/p owner=a owner_name=a/p policy=priority`,
		`msg="another service has the host; merged" registry=b host=m.org`, `msg="another service has the host; served too" registry=b host=i.org`,
	} {
		if strings.Count(log.String(), line) != 1 {
			t.Errorf("the log does not say once %s:\n%s", line, log.String())
		}
	}
	log.Reset()
	d.Registry("b").Apply(upserts(instance("b/m", "b/m-1", "10.0.0.1")))
	if log.Len() > 0 {
		t.Errorf("an instance is logged: %s", log.String())
	}
	d.Registry("a").Apply(removed(collection.ServiceEntry, "a/m", "a/i", "a/p", "a/q", "a/alone"))
	want("none again", map[string]float64{"merge": 0, "isolate": 0, "priority": 0})
}

// worldOfHosts is what registries say, at random: services of few hosts, with
// ports, weights and exportTo, in namespaces of their own or in one that they
// share.
type worldOfHosts map[string]map[string]map[string]*pluginv1.Upsert // by registry, service and resource

func (w worldOfHosts) change(rnd *rand.Rand, registry string) *pluginv1.WatchResponse {
	ns := registry
	if rnd.IntN(3) == 0 {
		ns = "shared"
	}
	name := fmt.Sprintf("%s/s%d", ns, rnd.IntN(3))
	s := w[registry][name]
	m := &pluginv1.WatchResponse{}
	if s != nil && rnd.IntN(6) == 0 {
		delete(w[registry], name)
		m.Removals = append(m.Removals, gone(collection.ServiceEntry, name))
		return m
	}
	if s == nil || rnd.IntN(4) == 0 {
		if s == nil {
			s = map[string]*pluginv1.Upsert{}
			w[registry][name] = s
		}
		se := &networking.ServiceEntry{Hosts: []string{fmt.Sprintf("h%d.example.org", rnd.IntN(3))}, Resolution: networking.ServiceEntry_STATIC}
		if rnd.IntN(8) == 0 {
			se.Resolution = networking.ServiceEntry_DNS
		}
		switch rnd.IntN(10) {
		case 0:
			se.ExportTo = []string{"."}
		case 1:
			se.ExportTo = []string{"a", "b"}
		}
		switch rnd.IntN(5) {
		case 0:
			se.Ports = []*networking.ServicePort{port("http", 80), port("grpc", 90)}
		case 1:
			se.Ports = []*networking.ServicePort{port("tcp", 80)}
		default:
			se.Ports = []*networking.ServicePort{port("http", 80)}
		}
		if rnd.IntN(10) == 0 {
			se.Hosts = append(se.Hosts, "h3.example.org")
		}
		s[name] = serviceOf(name, se)
		m.Upserts = append(m.Upserts, s[name])
	}
	for i := range 4 {
		id := fmt.Sprintf("%s-%d", name, i)
		switch rnd.IntN(4) {
		case 0:
			we := &networking.WorkloadEntry{Address: fmt.Sprintf("10.0.0.%d", rnd.IntN(8)), Weight: uint32(rnd.IntN(3)), Ports: map[string]uint32{"http": uint32(8080 + rnd.IntN(2))}}
			s[id] = endpointOf(name, id, we)
			m.Upserts = append(m.Upserts, s[id])
		case 1:
			if s[id] != nil {
				delete(s, id)
				m.Removals = append(m.Removals, gone(collection.WorkloadEntry, id))
			}
		}
	}
	return m
}

// all is everything that a registry has, in random order.
func (w worldOfHosts) all(rnd *rand.Rand, registry string) *pluginv1.WatchResponse {
	m := &pluginv1.WatchResponse{Synced: true}
	for _, s := range w[registry] {
		m.Upserts = slices.AppendSeq(m.Upserts, maps.Values(s))
	}
	rnd.Shuffle(len(m.Upserts), func(i, j int) { m.Upserts[i], m.Upserts[j] = m.Upserts[j], m.Upserts[i] })
	return m
}

// bytesOf is everything that sinks get, and its version.
func (e env) bytesOf() map[string]string {
	e.t.Helper()
	out := map[string]string{}
	for _, f := range []encode.Form{{}, {Shape: encode.Workload}, {Address: true, EndpointsHash: true, PortSets: true}, {Shape: encode.Workload, Address: true}} {
		l := encode.NewLayout(f)
		for _, coll := range []string{collection.ServiceEntry, collection.WorkloadEntry} {
			n := 0
			for c := range e.Changes(Kind{coll, f.Shape}, &Cursor{}) {
				enc := c.Record.Encode(l)
				b := enc.Append(nil)
				if !bytes.Equal(b, bytes.Join(enc.Segments(nil), nil)) || len(b) != enc.Size {
					e.t.Fatalf("%s: Size is %d, there are %d bytes", c.Name, enc.Size, len(b))
				}
				out[fmt.Sprintf("%+v %s %s", f, coll, c.Name)] = enc.Version.String() + " " + string(b)
				n++
			}
			if n != e.Len(Kind{coll, f.Shape}) {
				e.t.Errorf("%d of %s are read, and %d counted", n, coll, e.Len(Kind{coll, f.Shape}))
			}
		}
	}
	return out
}

// However three registries come to what they have, and whatever the rules, the
// order and the names of registries were before: what is served is a function
// of what they have, of their order and of the rules, byte for byte, in both
// shapes, and so are the lists of problems. A reader that follows ends with the
// same. When all is gone, nothing is left.
func TestHostsAreDecidedAlike(t *testing.T) {
	sets := [][]ConflictRule{
		nil,
		{rule(Isolate, nil)},
		{rule(Merge, nil)},
		{rule(Merge, map[string]uint32{"a": 90, "b": 10, "c": 5})},
		{rule(Merge, map[string]uint32{"a": 0, "b": 1})},
		{{Hosts: []string{"h0.*"}, Policy: Merge}, {Hosts: []string{"h1.*", "h3.*"}, Policy: Isolate}, rule(Merge, map[string]uint32{"b": 1, "c": 2, "a": 1})},
	}
	for seed := range uint64(40) {
		t.Run(strconv.FormatUint(seed, 10), func(t *testing.T) {
			rnd := rand.New(rand.NewPCG(seed, 7))
			w, names := worldOfHosts{"a": {}, "b": {}, "c": {}}, []string{"a", "b", "c"}
			rules := sets[rnd.IntN(len(sets))]
			e := newEnv(t, Options{Conflicts: rules}, names...)
			contents := map[string]string{} // by name and version
			seen := map[Kind]map[string]string{}
			cursors := map[Kind]*Cursor{}
			disk := &savedClaims{}
			for step := range 60 {
				name := names[rnd.IntN(len(names))]
				r := e.Registry(name)
				switch rnd.IntN(12) {
				case 0: // everything is gone
					w[name] = map[string]map[string]*pluginv1.Upsert{}
					r.Begin(nil)
					r.Apply(synced)
				case 1: // and comes back
					r.Begin(nil)
					r.Apply(w.all(rnd, name))
				case 2:
					rules = sets[rnd.IntN(len(sets))]
					e.SetConflicts(rules)
				case 3: // another order, one removed and added again, or one renamed
					rnd.Shuffle(len(names), func(i, j int) { names[i], names[j] = names[j], names[i] })
					e.SetRegistries(names, nil)
					switch rnd.IntN(3) {
					case 0:
						w[names[0]] = map[string]map[string]*pluginv1.Upsert{}
						e.SetRegistries(names[1:], nil)
						e.SetRegistries(names, nil)
					case 1:
						e.SetRegistries([]string{names[0], "z", names[2]}, map[string]string{"z": names[1]})
						e.SetRegistries(names, map[string]string{names[1]: "z"})
					}
				default:
					r.Apply(w.change(rnd, name))
				}
				for _, shape := range []encode.Shape{encode.Inline, encode.Workload} {
					for _, coll := range []string{collection.ServiceEntry, collection.WorkloadEntry} {
						k := Kind{coll, shape}
						if cursors[k] == nil {
							cursors[k], seen[k] = &Cursor{}, map[string]string{}
						}
						for c := range e.Changes(k, cursors[k]) {
							if c.Removed {
								delete(seen[k], c.Name)
								continue
							}
							enc := c.Record.Encode(encode.NewLayout(encode.Form{Shape: shape}))
							b := string(enc.Append(nil))
							id := fmt.Sprint(k, c.Name, enc.Version)
							if was, known := contents[id]; known && was != b {
								t.Errorf("%s: two contents have one version", id)
							}
							contents[id], seen[k][c.Name] = b, b
						}
					}
				}
				disk.follow(e.DB)
				if step%4 > 0 {
					continue
				}
				restarted := newEnv(t, Options{Conflicts: rules}, names...)
				disk.restore(restarted)
				wantAlike(t, restarted, e, names)
				fresh := newEnv(t, Options{Conflicts: rules}, names...)
				for _, n := range rnd.Perm(len(names)) {
					m := w.all(rnd, names[n])
					fresh.Registry(names[n]).Apply(m)
				}
				want, got := fresh.bytesOf(), e.bytesOf()
				if d := cmp.Diff(want, got); d != "" {
					t.Fatalf("step %d: fed anew (-), and step by step (+):\n%s\n\n%s\n\n%s", step, fresh.dump(encode.Workload), e.dump(encode.Workload), d)
				}
				for _, name := range names {
					want, got := fresh.Registry(name).Problems(), e.Registry(name).Problems()
					if d := cmp.Diff(want, got); d != "" {
						t.Fatalf("step %d: problems of %s, fed anew (-), and step by step (+):\n%s", step, name, d)
					}
					if n := e.Registry(name).Status().ProblemCount; n != len(got) {
						t.Errorf("%d problems are counted, there are %d", n, len(got))
					}
					if want, got := fresh.Registry(name).Status().Resources, e.Registry(name).Status().Resources; !maps.Equal(want, got) {
						t.Errorf("served of %s: %v, want %v", name, got, want)
					}
				}
				for k, have := range seen {
					if len(have) != e.Len(k) {
						t.Errorf("step %d: who follows %v has %d names, there are %d", step, k, len(have), e.Len(k))
					}
					for name, b := range have {
						if c, ok := e.Get(k, name); !ok {
							t.Errorf("who follows has %s, which is gone", name)
						} else if enc := c.Encode(encode.NewLayout(encode.Form{Shape: k.Shape})); string(enc.Append(nil)) != b {
							t.Errorf("who follows has an old %s", name)
						}
					}
				}
			}
			for _, name := range names {
				e.Registry(name).Begin(nil)
				e.Registry(name).Apply(synced)
			}
			if n := e.hosts.Len(); n > 0 {
				t.Errorf("%d hosts, verdicts and policies of nothing", n)
			}
			for _, table := range e.tables {
				for name, c := range table.Heads() {
					if !c.Is(record.Tombstone) {
						t.Errorf("%s is left", name)
					}
				}
			}
		})
	}
}

// savedClaims is what a follower of all claims keeps on disk.
type savedClaims struct {
	items   []byte
	names   []string
	cursors map[string]*ClaimsCursor
}

// follow appends what changed, a restart of the follower included.
func (s *savedClaims) follow(d *DB) {
	if s.cursors == nil {
		s.cursors = map[string]*ClaimsCursor{}
	}
	for _, coll := range []string{collection.WorkloadEntry, collection.ServiceEntry} {
		if s.cursors[coll] == nil {
			s.cursors[coll] = &ClaimsCursor{}
		}
		for c := range d.Claims(coll, s.cursors[coll]) {
			s.items = c.AppendSaved(s.items, coll, func(r *Record) int {
				name := r.Registry()
				if !slices.Contains(s.names, name) {
					s.names = append(s.names, name)
				}
				return slices.Index(s.names, name)
			})
		}
	}
}

// restore serves what was saved.
func (s *savedClaims) restore(e env) {
	e.t.Helper()
	parsed, err := e.ParseSaved(s.items)
	if err != nil {
		e.t.Fatal(err)
	}
	var registries []saved.Registry
	for _, name := range s.names {
		registries = append(registries, saved.Registry{Name: name, AsOf: time.Now()})
	}
	if _, err := e.Restore([]Saved{parsed}, registries); err != nil {
		e.t.Fatal(err)
	}
}

// wantAlike compares what two states serve and show of conflicts.
func wantAlike(t *testing.T, got, want env, names []string) {
	t.Helper()
	if d := cmp.Diff(want.bytesOf(), got.bytesOf()); d != "" {
		t.Fatalf("before the restart (-), and after it (+):\n%s\n\n%s\n\n%s", want.dump(encode.Workload), got.dump(encode.Workload), d)
	}
	if d := cmp.Diff(want.Conflicts(), got.Conflicts()); d != "" {
		t.Fatalf("conflicts before the restart (-), and after it (+):\n%s", d)
	}
	for _, name := range names {
		want, got := want.Registry(name), got.Registry(name)
		if d := cmp.Diff(want.Problems(), got.Problems()); d != "" {
			t.Fatalf("problems of %s before the restart (-), and after it (+):\n%s", name, d)
		}
		if want, got := want.Status().Resources, got.Status().Resources; !maps.Equal(want, got) {
			t.Errorf("served of %s: %v, want %v", name, got, want)
		}
		if want.resources != got.resources || want.bytes != got.bytes || want.services != got.services || want.instances != got.instances || want.shadowed != got.shadowed {
			t.Errorf("counts of %s: %d %d %d %d %d, want %d %d %d %d %d", name, got.resources, got.bytes, got.services, got.instances, got.shadowed,
				want.resources, want.bytes, want.services, want.instances, want.shadowed)
		}
	}
}

// After a restart with every registry down a merged host is served as before,
// and belongs to the same registries: the listing of one takes nothing of the
// other, and the second serves the host at once when the first loses it.
func TestConflictsAreRestored(t *testing.T) {
	weights := map[string]uint32{"a": 90, "b": 10}
	for name, rules := range map[string][]ConflictRule{
		"priority": nil, "isolate": {rule(Isolate, nil)}, "merge": {rule(Merge, nil)}, "weights": {rule(Merge, weights)},
	} {
		t.Run(name, func(t *testing.T) {
			before := twoOfOneHost(t, rules...)
			disk := &savedClaims{}
			disk.follow(before.DB)
			e := newEnv(t, Options{Conflicts: rules}, "a", "b")
			disk.restore(e)
			wantAlike(t, e, before, []string{"a", "b"})

			// The first registry is in again, and has what it had.
			for _, e := range []env{before, e} {
				a := e.Registry("a")
				a.Begin(nil)
				a.Apply(upserts(entry("a/web", "web.example.org"), instance("a/web", "a/web-1", "10.1.0.1")))
				a.Apply(synced)
			}
			wantAlike(t, e, before, []string{"a", "b"})
			for _, e := range []env{before, e} {
				e.Registry("a").Apply(removed(collection.ServiceEntry, "a/web"))
			}
			wantAlike(t, e, before, []string{"a", "b"})
			e.wantDump("the first one lost it", `
				se b/web web.example.org [10.2.0.1] [10.2.0.2]`, `
				se b/web web.example.org selects web
				we b/web-1 [10.2.0.1] of web
				we b/web-2 [10.2.0.2] of web`)
		})
	}
}
