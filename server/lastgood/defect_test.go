package lastgood

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/isthmus-mesh/isthmus/plugin/collection"
	pluginv1 "github.com/isthmus-mesh/isthmus/plugin/proto/isthmus/plugin/v1"
	"github.com/isthmus-mesh/isthmus/server/state"
)

// A panic while the last good state is restored does not end the bridge, which
// would meet it after each restart again: what was saved of that registry is
// left out, or of all if it is of none in particular, until they are listed.
func TestDefectWhileRestoring(t *testing.T) {
	for _, of := range []string{"dc2", ""} {
		t.Run("of "+of, func(t *testing.T) {
			armed := false
			options := state.Options{
				Conflicts: []state.ConflictRule{{Hosts: []string{"*"}, Policy: state.Merge}},
				Selector: func(name string) string {
					if armed && of != "" && name == of {
						panic("a defect")
					}
					return name
				},
				Applied: func(string, uint64) {
					if armed && of == "" {
						panic("a defect")
					}
				},
			}
			dir := t.TempDir()
			start := func() (*state.DB, *Store) {
				db := state.New([]string{"dc1", "dc2"}, options, discard, newRegistry())
				return db, open(t, db, dir, dc1, Registry{"dc2", "sim"})
			}
			listing := func(db *state.DB, registry string) {
				r, name := db.Registry(registry), registry+"/"+registry
				r.Begin([]string{collection.ServiceEntry, collection.WorkloadEntry})
				if err := r.Apply(&pluginv1.WatchResponse{
					Upserts: []*pluginv1.Upsert{sharedAs(name), instance(name, int(registry[2]), 0)}, Synced: true,
				}); err != nil {
					t.Fatal(err)
				}
			}
			db, s := start()
			listing(db, "dc1")
			alone := content(db)
			listing(db, "dc2")
			both := content(db)
			pass(t, s)
			closeStore(t, s)

			armed = true
			db, s = start()
			s.restoreAll()()
			want := alone
			if of == "" {
				want = content(state.New(nil, state.Options{}, discard, newRegistry()))
			}
			if d := cmp.Diff(want, content(db)); d != "" {
				t.Errorf("restored (-want +got):\n%s", d)
			}
			for name, restored := range map[string]bool{"dc1": of != "", "dc2": false} {
				if is := !db.Registry(name).Status().Restored.IsZero(); is != restored {
					t.Errorf("%s is restored: %t", name, is)
				}
			}
			if of == "" && !strings.Contains(s.Status().Reading, "a defect") {
				t.Errorf("status: %q", s.Status().Reading)
			}
			armed = false
			listing(db, "dc1")
			listing(db, "dc2")
			if d := cmp.Diff(both, content(db)); d != "" {
				t.Errorf("after their listings (-want +got):\n%s", d)
			}
			pass(t, s)
			closeStore(t, s)
			db, s = start()
			s.restoreAll()()
			if d := cmp.Diff(both, content(db)); d != "" {
				t.Errorf("after the next restart (-want +got):\n%s", d)
			}
			closeStore(t, s)
		})
	}
}
