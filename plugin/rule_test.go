package plugin

import (
	"maps"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/isthmus-mesh/isthmus/plugin/collection"
	"github.com/isthmus-mesh/isthmus/plugin/registry"
	"github.com/isthmus-mesh/isthmus/translate"
)

// The DestinationRule of a service comes, changes and goes with it, and is sent
// as a resource of its own.
func TestCatalogDestinationRule(t *testing.T) {
	tr, err := translate.New("r", translate.Options{Subsets: translate.SubsetOptions{Key: "version", DestinationRule: true}})
	if err != nil {
		t.Fatal(err)
	}
	c := newCatalog(tr, []string{collection.ServiceEntry, collection.WorkloadEntry, collection.DestinationRule}, limits{})
	sent := map[string]bool{} // names of DestinationRules at the other end
	stream := c.read()
	defer stream.close()
	set := func(name string, versions ...string) {
		var instances []registry.Instance
		for _, v := range versions {
			instances = append(instances, registry.Instance{ID: v, Address: "10.0.0.1", Ports: []registry.Port{{Number: 80}}, Meta: map[string]string{"version": v}})
		}
		c.Set(registry.Service{Key: registry.Key{Name: name}}, instances)
	}
	var last []byte
	// sync returns the rules that the other end has, and whether the last one
	// sent has the bytes of the one before.
	sync := func() (has []string, same bool) {
		t.Helper()
		before := last
		for {
			resp, err := stream.next()
			if err != nil {
				t.Fatal(err)
			}
			if resp == nil {
				return slices.Sorted(maps.Keys(sent)), string(before) == string(last)
			}
			for _, r := range resp.GetRemovals() {
				if r.GetCollection() == collection.DestinationRule {
					delete(sent, r.GetName())
				}
			}
			for _, u := range resp.GetUpserts() {
				for _, s := range c.services {
					if r := s.result.Rule; r != nil && string(r.Resource) == string(u.GetResource()) {
						if u.GetService() != "" {
							t.Errorf("the rule %s is sent as a part of %s", r.Name, u.GetService())
						}
						sent[r.Name], last = true, r.Resource
					}
				}
			}
		}
	}
	for _, step := range []struct {
		name string
		do   func()
		want []string
		same bool
	}{
		{"a service with versions", func() { set("web", "v1", "v2") }, []string{"r/web"}, false},
		{"another version", func() { set("web", "v1", "v3") }, []string{"r/web"}, false},
		{"one instance less, of a version that is still there", func() { set("web", "v1", "v3", "v3") }, []string{"r/web"}, true},
		{"a service that wants the name", func() { set("Web", "v9") }, []string{"r/web"}, true},
		{"it gets the name", func() { c.Remove(registry.Key{Name: "web"}) }, []string{"r/web"}, false},
		{"no versions", func() { set("Web") }, nil, true},
		{"versions again", func() { set("Web", "v1") }, []string{"r/web"}, false},
		{"gone", func() { c.Remove(registry.Key{Name: "Web"}) }, nil, true},
	} {
		step.do()
		got, same := sync()
		if diff := cmp.Diff(step.want, got); diff != "" || same != step.same {
			t.Errorf("%s: rules (-want +got):\n%s the last one is the same: %v, want %v", step.name, diff, same, step.same)
		}
	}
	if used := c.used; used != (usage{}) {
		t.Errorf("an empty catalog counts %+v", used)
	}
}
