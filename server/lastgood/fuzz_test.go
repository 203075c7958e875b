package lastgood

import (
	"testing"
	"time"

	"github.com/isthmus-mesh/isthmus/plugin/collection"
	"github.com/isthmus-mesh/isthmus/server/encode"
	"github.com/isthmus-mesh/isthmus/server/state"
	"github.com/isthmus-mesh/isthmus/server/state/saved"
)

// Whatever is on disk with a checksum that fits, nothing panics: not reading
// it, not serving it, and not the listing that replaces it.
func FuzzItems(f *testing.F) {
	db := newDB(f, "dc1")
	fill(f, db.Registry("dc1"), 2)
	var items []byte
	for _, coll := range []string{collection.WorkloadEntry, collection.ServiceEntry} {
		for c := range db.Claims(coll, new(state.ClaimsCursor)) {
			items = c.AppendSaved(items, coll, func(*state.Record) int { return 0 })
		}
	}
	f.Add(items)
	f.Add(state.Claims{Name: "dc1/service-000000-1"}.AppendSaved(items[:len(items):len(items)], collection.WorkloadEntry, nil))
	f.Fuzz(func(t *testing.T, items []byte) {
		db := newDB(t, "dc1")
		run, err := db.ParseSaved(items)
		if err != nil {
			return
		}
		if _, err := db.Restore([]state.Saved{run}, []saved.Registry{{Name: "dc1", AsOf: time.Unix(1, 0)}}); err != nil {
			return
		}
		content(db)
		for _, legacy := range []encode.Form{{Legacy: encode.LegacyEndpoints, Synthetic: true}, {EndpointsHash: true, PortSets: true}} {
			l := encode.NewLayout(legacy)
			for c := range db.Changes(state.Kind{Collection: collection.ServiceEntry}, new(state.Cursor)) {
				e := c.Record.Encode(l)
				e.Append(nil)
			}
		}
		fill(t, db.Registry("dc1"), 2)
		if n := db.Len(state.Kind{Collection: collection.ServiceEntry}); n != 2 {
			t.Errorf("after a listing of 2 services there are %d", n)
		}
	})
}

// No bytes make scan panic, and what it accepts ends with a commit.
func FuzzScan(f *testing.F) {
	f.Add(write(f, 2).file)
	f.Fuzz(func(t *testing.T, file []byte) {
		c, err := scan(file)
		if err == nil && (c.size == 0 || c.size > int64(len(file))) {
			t.Errorf("of %d bytes %d are intact", len(file), c.size)
		}
	})
}
