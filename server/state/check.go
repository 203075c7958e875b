package state

import (
	"fmt"

	"github.com/isthmus-mesh/isthmus/internal/clip"
	"github.com/isthmus-mesh/isthmus/plugin/collection"
	pluginv1 "github.com/isthmus-mesh/isthmus/plugin/proto/isthmus/plugin/v1"
)

// maxNamed bounds a name in an error, in bytes.
const maxNamed = 200

// check returns how a message breaks the contract as such, so that no part of
// it is applied: it names a resource more than once, or both retains a service
// and ends its retention. It needs no lock.
//
// A resource without a legible collection or name is not compared; it is
// refused, or has no effect.
func (b *batch) check(m *pluginv1.WatchResponse) error {
	n := len(b.upserts) + len(m.GetRemovals()) + len(m.GetKept()) + len(m.GetRelisted())
	if n < 2 {
		return nil
	}
	type id struct{ collection, name string }
	type place struct {
		part string
		n    int
	}
	seen := make(map[id]place, n)
	again := func(coll, name string, at place) error {
		if coll == "" || name == "" {
			return nil
		}
		if was, there := seen[id{coll, name}]; there {
			return fmt.Errorf("%s[%d] and %s[%d] of one message are both %s %q; a message names a resource once: set, removed or kept",
				was.part, was.n, at.part, at.n, clip.Text(coll, maxNamed), clip.Text(name, maxNamed))
		}
		seen[id{coll, name}] = at
		return nil
	}
	for n, rm := range m.GetRemovals() {
		if err := again(rm.GetCollection(), rm.GetName(), place{"removals", n}); err != nil {
			return err
		}
	}
	for n, k := range m.GetKept() {
		if err := again(k.GetCollection(), k.GetName(), place{"kept", n}); err != nil {
			return err
		}
	}
	for n := range b.upserts {
		coll, name := b.upserts[n].id()
		if err := again(coll, name, place{"upserts", n}); err != nil {
			return err
		}
	}
	for n, name := range m.GetRelisted() {
		if at := seen[id{collection.ServiceEntry, name}]; at.part == "kept" {
			return fmt.Errorf("kept[%d] and relisted[%d] of one message are both %q; a service that is relisted is no longer kept", at.n, n, clip.Text(name, maxNamed))
		}
	}
	return nil
}
