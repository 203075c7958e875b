package conflict

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/isthmus-mesh/isthmus/server/encode"
)

// entry returns a contender: the registry a, b or c, and its hosts.
func entry(registry, name string, hosts ...string) *Contender[string] {
	ns, _, _ := strings.Cut(name, "/")
	return &Contender[string]{
		ID: registry + " " + name, Owner: int(registry[0]), Registry: registry, Namespace: ns, Name: name, Composed: true,
		Spec: encode.Entry{Hosts: hosts, Resolution: "STATIC", Ports: []encode.ServicePort{{Number: 80, Name: "http", Protocol: "HTTP", Target: 8080}}},
	}
}

// with changes a contender.
func with(e *Contender[string], f func(*encode.Entry)) *Contender[string] {
	f(&e.Spec)
	return e
}

func exportTo(to ...string) func(*encode.Entry) { return func(s *encode.Entry) { s.ExportTo = to } }

// asIs returns a contender whose endpoints are part of it.
func asIs(e *Contender[string]) *Contender[string] {
	e.Composed = false
	return e
}

// own has a rule for the services of one registry.
func own(registry string, p Policy) Rules {
	return Rules{{Registry: registry, Hosts: []string{"*"}, Policy: p}}
}

func rules(p Policy, weights map[string]uint32) Rules {
	return Rules{{Hosts: []string{"*"}, Policy: p, Weights: weights}}
}

// says returns the decision in words: a verdict each, and members.
func says(all []*Contender[string]) (out []string) {
	for _, e := range all {
		text := e.ID + ": served"
		if v := e.Verdict; v != nil {
			text = fmt.Sprintf("%s: %s, %s, rule %d", e.ID, v.Outcome, v.By, v.Rule)
			for _, more := range []string{v.Host, v.Why, v.Notes} {
				if more != "" {
					text += ", " + more
				}
			}
		}
		for _, m := range e.Members {
			text += " + " + m.ID
		}
		out = append(out, text)
	}
	return out
}

// Each case is two or three entries, and what is decided on them.
func TestDecide(t *testing.T) {
	a, b := entry("a", "a/web", "web"), entry("b", "b/web", "web")
	fresh := func() []*Contender[string] { x, y := *a, *b; return []*Contender[string]{&x, &y} }
	for _, test := range []struct {
		name  string
		all   []*Contender[string]
		rules Rules
		want  []string
	}{
		{"no rule", fresh(), nil, []string{"a a/web: served", "b b/web: shadowed, a a/web, rule -1, web"}},
		{"priority", fresh(), rules(Priority, nil), []string{"a a/web: served", "b b/web: shadowed, a a/web, rule 0, web"}},
		{"isolate", fresh(), rules(Isolate, nil), []string{"a a/web: served", "b b/web: served too, a a/web, rule 0, web"}},
		{"merge", fresh(), rules(Merge, nil), []string{"a a/web: served + b b/web", "b b/web: merged, a a/web, rule 0, web"}},
		{
			"the first rule that fits", fresh(),
			Rules{{Hosts: []string{"other"}, Policy: Isolate}, {Hosts: []string{"WEB"}, Policy: Merge}, {Hosts: []string{"*"}}},
			[]string{"a a/web: served + b b/web", "b b/web: merged, a a/web, rule 1, web"},
		},
		{"letters of a host", []*Contender[string]{a, entry("b", "b/web", "WEB")}, nil, []string{"a a/web: served", "b b/web: shadowed, a a/web, rule -1, web"}},
		{"one registry", []*Contender[string]{entry("a", "a/other", "web"), entry("a", "a/web", "web")}, nil, []string{"a a/other: served", "a a/web: shadowed, a a/other, rule -1, web"}},
		{"one registry, and a rule for several", []*Contender[string]{entry("a", "a/1", "web"), entry("a", "a/2", "web")}, rules(Merge, nil), []string{
			"a a/1: served", "a a/2: shadowed, a a/1, rule -1, web",
		}},
		{"one registry, merge", []*Contender[string]{entry("a", "a/1", "web"), entry("a", "a/2", "web"), entry("b", "b/1", "web"), entry("b", "b/2", "web")}, own("a", Merge), []string{
			"a a/1: served + a a/2", "a a/2: merged, a a/1, rule 0, web", "b b/1: shadowed, a a/1, rule -1, web", "b b/2: shadowed, a a/1, rule -1, web",
		}},
		{"one registry, isolate", []*Contender[string]{entry("a", "x/web", "web"), entry("a", "y/web", "web"), entry("a", "y/www", "web")}, own("a", Isolate), []string{
			"a x/web: served", "a y/web: served too, a x/web, rule 0, web", "a y/www: shadowed, a y/web, rule 0, web, both are in the namespace y; give one of the two another (translate.namespace)",
		}},
		{
			"two of a registry that is merged into another",
			[]*Contender[string]{entry("a", "a/1", "web"), entry("b", "b/1", "web"), entry("b", "b/2", "web")},
			rules(Merge, nil),
			[]string{"a a/1: served + b b/1", "b b/1: merged, a a/1, rule 0, web", "b b/2: shadowed, b b/1, rule -1, web"},
		},
		{
			"both are merged into another",
			[]*Contender[string]{entry("a", "a/1", "web"), entry("b", "b/1", "web"), entry("b", "b/2", "web")},
			append(rules(Merge, nil), own("b", Merge)...),
			[]string{"a a/1: served + b b/1 + b b/2", "b b/1: merged, a a/1, rule 0, web", "b b/2: merged, a a/1, rule 1, web"},
		},
		{
			"the share of a registry is that of one service",
			[]*Contender[string]{entry("a", "a/1", "web"), entry("b", "b/1", "web"), entry("b", "b/2", "web")},
			append(rules(Merge, map[string]uint32{"a": 1, "b": 1}), own("b", Merge)...),
			[]string{"a a/1: served + b b/1", "b b/1: merged, a a/1, rule 0, web", "b b/2: shadowed, b b/1, rule 1, web, " + errWeights.Error()},
		},
		{
			"merged ones get no weights",
			[]*Contender[string]{entry("a", "a/1", "web"), entry("a", "a/2", "web"), entry("b", "b/1", "web")},
			append(rules(Merge, map[string]uint32{"a": 1, "b": 1}), own("a", Merge)...),
			[]string{"a a/1: served + a a/2", "a a/2: merged, a a/1, rule 1, web", "b b/1: shadowed, a a/1, rule 0, web, " + errWeights.Error()},
		},
		{"one registry's own resources", []*Contender[string]{asIs(entry("a", "a/1", "web")), asIs(entry("a", "a/2", "web")), entry("a", "a/3", "web")}, nil, []string{
			"a a/1: served", "a a/2: served", "a a/3: served",
		}},
		{"one namespace", []*Contender[string]{entry("a", "x/1", "web"), entry("b", "x/2", "web")}, rules(Isolate, nil), []string{
			"a x/1: served", "b x/2: shadowed, a x/1, rule 0, web, both are in the namespace x; give one of the two another (translate.namespace)",
		}},
		{"one name", []*Contender[string]{entry("a", "x/web", "web"), entry("b", "x/web", "other")}, rules(Isolate, nil), []string{
			"a x/web: served", "b x/web: shadowed, a x/web, rule -1",
		}},
		{"one name and host", []*Contender[string]{entry("a", "x/web", "web"), entry("b", "x/web", "web")}, rules(Isolate, nil), []string{
			"a x/web: served", "b x/web: shadowed, a x/web, rule 0, web, both are in the namespace x; give one of the two another (translate.namespace)",
		}},
		{"who is shadowed has nothing", []*Contender[string]{entry("a", "a/1", "x"), entry("b", "b/1", "x", "y"), entry("c", "c/1", "y")}, nil, []string{
			"a a/1: served", "b b/1: shadowed, a a/1, rule -1, x", "c c/1: served",
		}},
		{"no common reader", []*Contender[string]{with(entry("a", "a/web", "web"), exportTo(".")), with(entry("b", "b/web", "web"), exportTo("."))}, nil, []string{
			"a a/web: served", "b b/web: served",
		}},
		{"hidden", []*Contender[string]{with(entry("a", "a/web", "web"), exportTo("~")), b}, nil, []string{"a a/web: served", "b b/web: served"}},
		{"more readers", []*Contender[string]{with(entry("a", "a/web", "web"), exportTo("ns")), with(entry("b", "b/web", "web"), exportTo("*"))}, rules(Merge, nil), []string{
			"a a/web: served", "b b/web: served too, a a/web, rule 0, web, it is visible in namespaces that do not see the other one",
		}},
		{"fewer readers", []*Contender[string]{with(entry("a", "a/web", "web"), exportTo("x", "y")), with(entry("b", "b/web", "web"), exportTo("y"))}, nil, []string{
			"a a/web: served", "b b/web: shadowed, a a/web, rule -1, web",
		}},
		{"merge of more hosts", []*Contender[string]{entry("a", "a/web", "web"), entry("b", "b/web", "web", "www")}, rules(Merge, nil), []string{
			"a a/web: served", "b b/web: shadowed, a a/web, rule 0, web, it has other hosts besides",
		}},
		{"merge of fewer hosts", []*Contender[string]{entry("a", "a/web", "web", "www"), entry("b", "b/web", "web")}, rules(Merge, nil), []string{
			"a a/web: served + b b/web", "b b/web: merged, a a/web, rule 0, web",
		}},
		{"merge of three", []*Contender[string]{entry("a", "a/web", "web"), entry("b", "b/web", "web"), entry("c", "c/web", "web")}, rules(Merge, nil), []string{
			"a a/web: served + b b/web + c c/web", "b b/web: merged, a a/web, rule 0, web", "c c/web: merged, a a/web, rule 0, web",
		}},
		{"resolution", []*Contender[string]{entry("a", "a/web", "web"), with(entry("b", "b/web", "web"), func(s *encode.Entry) { s.Resolution = "DNS" })}, rules(Merge, nil), []string{
			"a a/web: served", "b b/web: shadowed, a a/web, rule 0, web, its resolution is DNS and that of the other one STATIC",
		}},
		{"weights", fresh(), rules(Merge, map[string]uint32{"a": 1}), []string{
			"a a/web: served", `b b/web: shadowed, a a/web, rule 0, web, conflicts[0].weights does not name registry "b"`,
		}},
	} {
		t.Run(test.name, func(t *testing.T) {
			for _, e := range test.all {
				e.Verdict, e.Members = nil, nil
			}
			Decide(test.all, test.rules)
			if d := cmp.Diff(test.want, says(test.all)); d != "" {
				t.Errorf("(-want +got):\n%s", d)
			}
		})
	}
}

// What is contested has the policy of its rule.
func TestContested(t *testing.T) {
	all := []*Contender[string]{entry("a", "a/1", "x", "own"), entry("a", "a/2", "own", "x"), entry("b", "b/1", "x"), entry("b", "b/2", "y"), entry("c", "c/1", "Y")}
	got := Decide(all, Rules{{Hosts: []string{"y"}, Policy: Isolate}})
	if d := cmp.Diff(map[string]Policy{"x": Priority, "own": Priority, "y": Isolate}, got); d != "" {
		t.Errorf("(-want +got):\n%s", d)
	}
}

// Ports of a member follow those of the lead: by name, by number, or if both
// have one. What differs is noted.
func TestPorts(t *testing.T) {
	port := func(name string, number, target uint32, protocol string) encode.ServicePort {
		return encode.ServicePort{Name: name, Number: number, Target: target, Protocol: protocol}
	}
	for _, test := range []struct {
		name       string
		lead, own  []encode.ServicePort
		want       []Port
		notes, err string
	}{
		{"none", nil, []encode.ServicePort{port("http", 80, 8080, "HTTP")}, nil, "", ""},
		{"by name", []encode.ServicePort{port("http", 80, 1, "HTTP")}, []encode.ServicePort{port("x", 80, 2, "HTTP"), port("http", 81, 3, "http")}, []Port{{"http", "http", 3}}, "its port http is 81 and that of the other one 80, which holds; its port x (80) is not served, as the other one has none such", ""},
		{"by number", []encode.ServicePort{port("http", 80, 1, "HTTP")}, []encode.ServicePort{port("web", 80, 2, "TCP"), port("y", 2, 2, "TCP")}, []Port{{"http", "web", 2}}, "its port web is TCP and that of the other one HTTP, which holds; its port y (2) is not served, as the other one has none such", ""},
		{"the only one", []encode.ServicePort{port("http", 80, 1, "HTTP")}, []encode.ServicePort{port("web", 90, 4, "HTTP")}, []Port{{"http", "web", 4}}, "its port web is 90 and that of the other one 80, which holds", ""},
		{"missing", []encode.ServicePort{port("http", 80, 1, "HTTP"), port("grpc", 90, 1, "GRPC")}, []encode.ServicePort{port("http", 80, 1, "HTTP")}, nil, "", "it has no port grpc (90)"},
	} {
		ports, notes, err := mapPorts(test.lead, test.own)
		if err != nil != (test.err != "") || err != nil && err.Error() != test.err {
			t.Errorf("%s: error %v", test.name, err)
		}
		if d := cmp.Diff(test.want, ports); d != "" || strings.Join(notes, "; ") != test.notes {
			t.Errorf("%s: %q (-want +got):\n%s", test.name, notes, d)
		}
	}
}

// The shares of registries hold whatever the number of their endpoints, and one
// endpoint more does not change the weights of the others.
func TestWeights(t *testing.T) {
	for n := range uint64(3000) {
		if r := roundWeight(n); n <= 128 && r != max(n, 1) || r > n+n/125+1 || r < n-n/125 {
			t.Errorf("%d is rounded to %d", n, r)
		}
	}
	for _, n := range []uint64{1, 100, 10_000} {
		a, b := Role{Share: 90, Total: 100}, Role{Share: 10, Total: 100}
		sum := func(m *Role, n uint64) float64 { return float64(m.weightOf(1, roundWeight(n))) * float64(n) }
		if share := sum(&a, n) / (sum(&a, n) + sum(&b, 3)); share < 0.89 || share > 0.91 {
			t.Errorf("%d and 3 endpoints: the first registry has %.3f of the traffic", n, share)
		}
	}
	if m := (Role{Share: 1, Total: 1}); m.weightOf(1, roundWeight(10_000)) != m.weightOf(1, roundWeight(10_001)) {
		t.Error("an endpoint more changes the weights of 10,000 others")
	}
	if m := (Role{Share: 1, Total: 1 << 31}); m.weightOf(1, 1<<30) != 1 {
		t.Error("an endpoint has no weight")
	}
}

// Whatever the entries, no two that one namespace sees have a host or a name
// without a verdict, and the order of equal ones does not matter.
func TestRandom(t *testing.T) {
	policies := append(slices.Clone(Policies), "")
	for seed := range uint64(300) {
		r := rand.New(rand.NewPCG(seed, 3))
		var all []*Contender[string]
		for _, registry := range []string{"a", "b", "c"} {
			for n := range 4 {
				e := entry(registry, fmt.Sprintf("%c/%d", 'x'+r.IntN(2), n))
				for h := range 4 {
					if r.IntN(3) == 0 {
						e.Spec.Hosts = append(e.Spec.Hosts, fmt.Sprint("h", h))
					}
				}
				e.Spec.ExportTo = [][]string{nil, {"."}, {"x"}, {"*"}}[r.IntN(4)]
				e.Composed = r.IntN(4) > 0
				all = append(all, e)
			}
		}
		var rs Rules
		for h := range 4 {
			if p := policies[r.IntN(len(policies))]; p != "" {
				rs = append(rs, Rule{Hosts: []string{fmt.Sprint("h", h)}, Policy: p})
			}
		}
		Decide(all, rs)
		for i, e := range all {
			for _, o := range all[:i] {
				if e.Owner == o.Owner && !(e.Composed && o.Composed) || o.Verdict.IsAside() || e.Verdict != nil {
					continue
				}
				shared := slices.ContainsFunc(e.Spec.Hosts, func(h string) bool { return slices.Contains(o.Spec.Hosts, h) })
				if e.Name == o.Name || shared && o.visible.overlaps(&e.visible) {
					t.Fatalf("seed %d: %v and %v are served without a verdict:\n%s", seed, o.ID, e.ID, strings.Join(says(all), "\n"))
				}
			}
			for _, m := range e.Members {
				if i := slices.IndexFunc(all, func(o *Contender[string]) bool { return o.ID == m.ID }); e.Verdict.IsAside() || all[i].Verdict.By != e.ID || all[i].Verdict.Outcome != Merged {
					t.Fatalf("seed %d: %s is a member of %s", seed, m.ID, e.ID)
				}
			}
		}
	}
}

// Each problem says what to do.
func TestProblem(t *testing.T) {
	for want, v := range map[string]*Verdict[string]{
		"a resource of the same name":                                     {Outcome: Shadowed, Rule: -1},
		"merged, as conflicts[1] says merge; notes":                       {Outcome: Merged, Host: "h", Rule: 1, Policy: Merge, Notes: "notes"},
		"both are served, as notes":                                       {Outcome: Beside, Host: "h", Rule: 0, Notes: "notes"},
		"conflicts[1] says merge, but why; shadowed":                      {Outcome: Shadowed, Host: "h", Rule: 1, Policy: Merge, Why: "why"},
		"no rule of conflicts fits the host":                              {Outcome: Shadowed, Host: "h", Rule: -1},
		"with policy isolate and another namespace (translate.namespace)": {Outcome: Shadowed, Host: "h", Rule: -1, Own: true},
	} {
		if got := v.Problem("b/web", "a", "b/web"); !strings.Contains(got, want) || !strings.Contains(got, `"a"`) {
			t.Errorf("%q, want %q", got, want)
		}
	}
	for _, v := range []*Verdict[string]{{Outcome: Beside, Host: "h", Rule: 0}, {Outcome: Merged, Host: "h", Rule: 1, Policy: Merge}} {
		if got := v.Problem("b/web", "a", "a/web"); got != "" || v.IsDisputed() {
			t.Errorf("%q", got)
		}
	}
}
