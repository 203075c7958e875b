package state

import (
	"cmp"
	"net/netip"
	"slices"

	"github.com/isthmus-mesh/isthmus/plugin/collection"
	"github.com/isthmus-mesh/isthmus/server/state/address"
	"github.com/isthmus-mesh/isthmus/server/state/problems"
)

// SetRegistries replaces the set of registries. The order of names decides
// conflicts; names are unique. The map renamed has the old name by the new one.
//
// A registry that is not in names is removed with all its resources; its plugin
// must have ended. A new registry is empty and does not hold collections that
// are already open. A renamed registry retains its resources until its next
// complete listing.
//
// Readers see only the resulting changes, such as an upsert where the
// precedence of registries on a name has changed.
func (d *DB) SetRegistries(names []string, renamed map[string]string) {
	d.apply.Lock()
	defer d.unlock()
	d.setRegistries(names, renamed)
}

// Configure combines [DB.SetRegistries] and [DB.SetConflicts]; rules refer to
// the new names. It also replaces the network of [Options.Addresses]: with
// another one each host has another address.
func (d *DB) Configure(names []string, renamed map[string]string, rules []ConflictRule, addresses netip.Prefix) {
	d.apply.Lock()
	defer d.unlock()
	d.setRules(rules)
	d.setRegistries(names, renamed)
	d.reconfigure(d.registries, func() { d.setNetwork(addresses) })
}

func (d *DB) setRegistries(names []string, renamed map[string]string) {
	before := make(map[string]*Registry, len(d.registries))
	for _, r := range d.registries {
		before[r.name] = r
	}
	waiting := d.waitingNow()
	next := make([]*Registry, 0, len(names))
	taken := make(map[string]bool, len(names)) // old names
	for _, name := range names {
		taken[cmp.Or(renamed[name], name)] = true
	}
	gone := make([]*Registry, 0, len(d.registries))
	for _, r := range d.registries {
		if !taken[r.name] {
			gone = append(gone, r)
		}
	}
	for n, name := range names {
		was := cmp.Or(renamed[name], name)
		r := before[was]
		switch {
		case r == nil:
			r = newRegistry(d, name, n)
			r.exempt = make(map[string]bool)
			for coll := range d.tables {
				r.exempt[coll] = len(waiting[coll]) == 0
			}
			r.status.Late = len(waiting) == 0
		case was != name:
			r.rename(name)
		}
		next = append(next, r)
	}
	d.reconfigure(next, func() {
		d.registries = append(slices.Clone(next), gone...)
		d.reorder()
		for _, r := range gone {
			r.empty()
		}
		d.registries = next
		d.decideAnew() // weights and endpoint names contain registry names
		for _, r := range d.registries {
			if was := renamed[r.name]; was != "" && was != r.name && before[was] == r {
				d.republish(r)
			}
		}
	})
	for _, r := range gone {
		if !r.status.Restored.IsZero() {
			d.restored.Add(-1)
		}
	}
	d.remark()
	d.wake()
}

// SetOptions replaces the options of the registries, by name. They also apply
// to removals already paused. Open collections stay open and no resource
// changes.
func (d *DB) SetOptions(options map[string]RegistryOptions) {
	d.apply.Lock()
	defer d.unlock()
	for _, r := range d.registries {
		r.setOptions(options[r.name])
		r.release()
	}
}

func (r *Registry) setOptions(o RegistryOptions) {
	o.SyncTimeout = cmp.Or(o.SyncTimeout, DefaultSyncTimeout)
	same := o
	same.Owns = r.options.Owns // without effect on the first listing
	r.overdue = r.overdue && same == r.options
	r.options = o
	r.db.book.Change(func() { r.guard.Config = o.Protect })
	r.owns.Store(&o.Owns)
}

// reorder assigns each registry its position and sorts the claims on each name
// by it.
func (d *DB) reorder() {
	moved := false
	for n, r := range d.registries {
		moved = moved || r.order != n
		d.book.Change(func() { r.order = n })
	}
	if !moved {
		return
	}
	b := &batch{r: d.registries[0], db: d}
	d.hosts.MarkAll()
	for _, t := range d.tables {
		for name, head := range t.Heads() {
			if head.next != nil {
				t.Sort(name, func() { b.touch(t, name) })
			}
		}
	}
	b.commit()
}

func (r *Registry) rename(name string) {
	d := r.db
	d.mu.Lock()
	r.name = name
	d.mu.Unlock()
	r.shown.Store(&name)
	r.log = d.log.With("registry", name)
	r.status.Registry = name
}

// republish moves each name of a renamed registry to the end of the logs, for
// readers who select by registry, or print it.
func (d *DB) republish(r *Registry) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, t := range d.tables {
		t.logs.Republish(&d.revision, func(c *Record) bool { return c.kind.registry == r })
	}
	d.renamed = d.revision
}

// setNetwork replaces the network of the addresses of hosts, and gives each
// host one of the new network. The same network changes nothing.
func (d *DB) setNetwork(network netip.Prefix) {
	if network == d.addresses.Network() {
		return
	}
	d.addresses = address.In(network)
	if len(d.registries) == 0 {
		return
	}
	b := &batch{r: d.registries[0], db: d}
	for c := range d.tables[collection.ServiceEntry].services() {
		d.addresses.Count(c.of.host, 1)
		if c.of.host != "" {
			b.change(c.of)
		}
	}
	d.commit(b)
}

// empty removes all resources of the registry.
func (r *Registry) empty() {
	d := r.db
	b := &batch{r: r, db: d}
	var all []*Record
	r.claims(func(_ *table, c *Record) { all = append(all, c) })
	for _, c := range all {
		// Removing an entry also removes its instances.
		if c.kind.collection.claim(c.Name(), r) == c {
			b.removeRecord(c)
		}
	}
	b.commit()
	r.reported, r.skipped = problems.NewList(), problems.NewList()
	d.book.Change(func() { r.rejected = nil })
	r.log.Info("the registry is no longer in the configuration; what it had is removed", "resources", len(all))
}
