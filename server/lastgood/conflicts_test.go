package lastgood

import (
	"fmt"
	"maps"
	"os"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	networking "istio.io/api/networking/v1alpha3"

	"github.com/isthmus-mesh/isthmus/plugin/collection"
	pluginv1 "github.com/isthmus-mesh/isthmus/plugin/proto/isthmus/plugin/v1"
	"github.com/isthmus-mesh/isthmus/server/encode"
	"github.com/isthmus-mesh/isthmus/server/state"
	"github.com/isthmus-mesh/isthmus/server/state/status"
)

// shared is the service of a host that dc1 and dc2 both have.
func shared(namespace string) *pluginv1.Upsert { return sharedAs(namespace + "/web") }

func sharedAs(name string) *pluginv1.Upsert {
	return resource(name, name, &networking.ServiceEntry{
		Hosts: []string{"web.example.org"}, Resolution: networking.ServiceEntry_STATIC,
		Ports: []*networking.ServicePort{{Number: 80, Name: "http", Protocol: "HTTP"}},
	})
}

// A host that two registries share is served after a restart as it was before,
// shown as it was, and still has the claims of both: the first listing of one
// takes nothing of the other. That holds for what a generation begins with, and
// for changes of claims that nothing is served of.
func TestConflictsAreKept(t *testing.T) {
	dc2 := Registry{"dc2", "sim"}
	for name, rule := range map[string]state.ConflictRule{
		"priority": {Hosts: []string{"*"}, Policy: state.Priority},
		"merge":    {Hosts: []string{"*"}, Policy: state.Merge},
		"weights":  {Hosts: []string{"*"}, Policy: state.Merge, Weights: map[string]uint32{"dc1": 90, "dc2": 10}},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			open2 := func(dir string) (*state.DB, *Store) {
				db := state.New([]string{"dc1", "dc2"}, state.Options{Conflicts: []state.ConflictRule{rule}}, discard, newRegistry())
				return db, open(t, db, dir, dc1, dc2)
			}
			db, s := open2(dir)
			// listing is a complete listing of a registry.
			listing := func(db *state.DB, registry string, instances ...int) {
				r := db.Registry(registry)
				r.Begin([]string{collection.ServiceEntry, collection.WorkloadEntry})
				m := &pluginv1.WatchResponse{Upserts: []*pluginv1.Upsert{shared(registry)}, Synced: true}
				for _, n := range instances {
					m.Upserts = append(m.Upserts, instance(registry+"/web", n, 0))
				}
				r.Apply(m)
			}
			services := func(db *state.DB) []status.Service { return slices.Collect(db.Services()) }
			restarted := func() *state.DB {
				t.Helper()
				pass(t, s)
				other := t.TempDir()
				if err := os.CopyFS(other, os.DirFS(dir)); err != nil {
					t.Fatal(err)
				}
				again, store := open2(other)
				store.restoreAll()()
				closeStore(t, store)
				if d := cmp.Diff(content(db), content(again)); d != "" {
					t.Errorf("what is served (-before +after):\n%s", d)
				}
				if d := cmp.Diff(db.Conflicts(), again.Conflicts()); d != "" || len(again.Conflicts()) == 0 {
					t.Errorf("conflicts (-before +after):\n%s", d)
				}
				if d := cmp.Diff(services(db), services(again)); d != "" {
					t.Errorf("services (-before +after):\n%s", d)
				}
				return again
			}
			listing(db, "dc1", 1, 2)
			listing(db, "dc2", 3, 4)
			again := restarted()
			want := content(db)
			listing(again, "dc1", 1, 2)
			if d := cmp.Diff(want, content(again)); d != "" {
				t.Errorf("the listing of the first registry changes what is served (-before +after):\n%s", d)
			}

			// Only a claim changes.
			dc2 := db.Registry("dc2")
			dc2.Apply(&pluginv1.WatchResponse{Upserts: []*pluginv1.Upsert{instance("dc2/web", 5, 0)}, Removals: []*pluginv1.Removal{{Collection: collection.WorkloadEntry, Name: "dc2/web-3"}}})
			again = restarted()
			for _, db := range []*state.DB{db, again} {
				db.Registry("dc1").Apply(&pluginv1.WatchResponse{Removals: []*pluginv1.Removal{{Collection: collection.ServiceEntry, Name: "dc1/web"}}})
			}
			if d := cmp.Diff(content(db), content(again)); d != "" {
				t.Errorf("the first registry lost the host (-before +after):\n%s", d)
			}
			key := fmt.Sprintf("%v %s dc2/web-5", encode.Workload, collection.WorkloadEntry)
			if content(again)[key] == "" {
				t.Errorf("%s is not served, but %q", key, slices.Sorted(maps.Keys(content(again))))
			}
			pass(t, s)
			closeStore(t, s)
			db, s = open2(dir)
			s.restoreAll()()
			if got := content(db); !maps.Equal(got, content(again)) {
				t.Errorf("after it was written: %q", slices.Sorted(maps.Keys(got)))
			}
			closeStore(t, s)
		})
	}
}
