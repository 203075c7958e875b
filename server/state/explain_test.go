package state

import (
	"fmt"
	"testing"

	pluginv1 "github.com/isthmus-mesh/isthmus/plugin/proto/isthmus/plugin/v1"
)

// Each claim on a host says what became of it, with the rule and the revision
// of its newest change.
func TestExplain(t *testing.T) {
	e := twoOfOneHost(t)
	claims := e.Explain("web.example.org")
	if len(claims) != 2 {
		t.Fatalf("claims %+v", claims)
	}
	a, b := claims[0], claims[1]
	if a.Registry != "a" || a.Outcome != "served" || a.Rule != "" || a.Endpoints != 1 {
		t.Errorf("the first: %+v", a)
	}
	if b.Registry != "b" || b.Outcome != "shadowed" || b.Rule != "conflicts" || b.Owner != "a" || b.OwnerName != "a/web" || b.Reason == "" {
		t.Errorf("the second: %+v", b)
	}
	e.Registry("a").Apply(upserts(instance("a/web", "a/web-1", "10.1.0.9")))
	if now := e.Explain("web.example.org")[0]; now.Inline <= a.Inline || now.Workload <= a.Workload {
		t.Errorf("revisions %d and %d, before the change %d and %d", now.Inline, now.Workload, a.Inline, a.Workload)
	}
	if byName := e.Explain("b/web"); len(byName) != 1 || byName[0].Registry != "b" {
		t.Errorf("by name: %+v", byName)
	}
	if none := e.Explain("other.example.org"); len(none) != 0 {
		t.Errorf("a host that nobody has: %+v", none)
	}

	merged := twoOfOneHost(t, rule(Merge, nil)).Explain("web.example.org")
	if merged[0].Endpoints != 3 || merged[1].Outcome != "merged" || merged[1].Rule != "conflicts[0]" {
		t.Errorf("merged: %+v", merged)
	}
}

// What is held back of a removal is part of the claim.
func TestExplainKept(t *testing.T) {
	e := newEnv(t, protected(), "dc1")
	list(e.Registry("dc1"), 10)
	for n := range 10 {
		e.Registry("dc1").Apply(&pluginv1.WatchResponse{Removals: []*pluginv1.Removal{dropService(n)}})
	}
	kept := 0
	for n := range 10 {
		for _, c := range e.Explain(fmt.Sprintf("s%02d.example.org", n)) {
			kept += c.RemovalCount
			if c.RemovalCount != len(c.Removals) || c.RemovalCount > 0 && c.Removals[0].Until.IsZero() {
				t.Errorf("%+v", c)
			}
		}
	}
	if kept == 0 {
		t.Error("nothing of what is held back is explained")
	}
}
