package state

import (
	"fmt"
	"slices"
	"testing"

	"github.com/isthmus-mesh/isthmus/plugin/collection"
	pluginv1 "github.com/isthmus-mesh/isthmus/plugin/proto/isthmus/plugin/v1"
	"github.com/isthmus-mesh/isthmus/server/encode"
)

// A selection that has missed removals reads everything again, and has as
// changed only what is.
func TestSelectionReadsAgain(t *testing.T) {
	e := newEnv(t, Options{Tombstones: 2}, "dc1")
	apply := e.Registry("dc1").Apply
	apply(upserts(entry("ns/web", "web.example.org"), instance("ns/web", "ns/web-1", "10.0.0.1"), entry("ns/api", "api.example.org")))
	for i := range 5 {
		apply(upserts(entry(fmt.Sprintf("ns/gone-%d", i), fmt.Sprintf("gone-%d.example.org", i))))
	}
	entries := Kind{collection.ServiceEntry, encode.Workload}
	s := e.Select(Filter{Namespaces: []string{"ns"}})
	names := func(c *Cursor) (names []string) {
		for change := range s.Changes(entries, c) {
			names = append(names, fmt.Sprint(change.Name, " ", change.Removed))
		}
		slices.Sort(names)
		return names
	}
	var c Cursor
	if got := names(&c); len(got) != 7 {
		t.Fatalf("%q", got)
	}
	// The entry of web is another record, and the same to sinks that have its
	// instances apart.
	apply(upserts(instance("ns/web", "ns/web-1", "10.0.0.2")))
	apply(upserts(entry("ns/api", "api2.example.org")))
	for i := range 5 {
		apply(&pluginv1.WatchResponse{Removals: []*pluginv1.Removal{gone(collection.ServiceEntry, fmt.Sprintf("ns/gone-%d", i))}})
	}
	before := s.Revision()
	s.follow()
	if n := s.Revision() - before; n != 6 {
		t.Errorf("%d changes, want five removals and one of ns/api", n)
	}
	if r, ok := s.Get(entries, "ns/web"); !ok {
		t.Error("ns/web is gone")
	} else if now, _ := e.Get(entries, "ns/web"); now != r {
		t.Error("the selection has an older record of ns/web")
	}
}
