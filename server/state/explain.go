package state

import (
	"cmp"
	"slices"
	"strings"

	"github.com/isthmus-mesh/isthmus/plugin/collection"
	"github.com/isthmus-mesh/isthmus/server/encode"
	"github.com/isthmus-mesh/isthmus/server/state/problems"
	"github.com/isthmus-mesh/isthmus/server/state/status"
)

// Explain returns the claims on a host of all registries, in the order of
// precedence. The host may also be the name of a ServiceEntry. It does not wait
// for a batch in progress.
func (d *DB) Explain(host string) []status.Claim {
	d.book.RLock()
	defer d.book.RUnlock()
	t := d.tables[collection.ServiceEntry]
	var records []*Record
	for id := range d.hosts.OfShared(host) {
		if r := t.claimShared(id.name, id.registry); r != nil && !slices.Contains(records, r) {
			records = append(records, r)
		}
	}
	if len(records) == 0 {
		records = t.claimsShared(host)
	}
	slices.SortFunc(records, func(a, b *Record) int {
		return cmp.Or(cmp.Compare(a.kind.registry.order, b.kind.registry.order), strings.Compare(a.Name(), b.Name()))
	})
	out := make([]status.Claim, 0, len(records))
	for _, r := range records {
		out = append(out, d.explainLocked(r))
	}
	return out
}

// explainLocked describes one claim. The caller holds the book for reading.
func (d *DB) explainLocked(r *Record) status.Claim {
	of := r.kind.registry
	c := status.Claim{
		Registry: r.Registry(), Name: r.Name(), Hosts: r.Hosts(), Endpoints: r.Endpoints(), Version: r.Version().String(), Outcome: "served",
		Inline: r.place.At(encode.Inline), Workload: r.place.At(encode.Workload),
		Rejected: of.rejected[problems.ResourceID(collection.ServiceEntry, r.Name())].Reason,
	}
	for i := range r.Instances() {
		c.Workload = max(c.Workload, i.place.At(encode.Workload))
	}
	id := entryID{of, r.Name()}
	if v := d.hosts.VerdictShared(id); v != nil {
		c.Outcome, c.Owner, c.OwnerName = v.Outcome.String(), *v.By.registry.shown.Load(), v.By.name
		c.SetConflict(v.Says(), id.problem(v))
	} else if min(c.Inline, c.Workload) == 0 {
		// Another record of it is being entered: only a sink without a lag has
		// everything.
		c.Inline, c.Workload = ^Revision(0), ^Revision(0)
	}
	c.SetRemovals(of.removals(func(k claimName) bool {
		return r.of != nil && k.of == r.of || k.table == r.kind.collection && k.name == r.Name()
	}))
	return c
}

// Hosts returns the hosts of all ServiceEntries, in no order. It does not wait
// for a batch in progress.
func (d *DB) Hosts() []string {
	d.book.RLock()
	defer d.book.RUnlock()
	return d.hosts.Shared()
}
