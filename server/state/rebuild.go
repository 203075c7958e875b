package state

import (
	"fmt"
	"maps"
	"runtime/debug"
	"slices"

	pluginv1 "github.com/isthmus-mesh/isthmus/plugin/proto/isthmus/plugin/v1"
	"github.com/isthmus-mesh/isthmus/server/encode"
	"github.com/isthmus-mesh/isthmus/server/state/protect"
)

// read parses and checks a message, without a lock. A panic, which is a defect
// of the bridge, is the plugin's error.
func (b *batch) read(m *pluginv1.WatchResponse) (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = b.r.defect(p, aMessage)
		}
	}()
	b.parse(m.GetUpserts())
	return b.check(m)
}

// What the bridge does when it meets a defect of its own.
const (
	aMessage  = "apply a message of the plugin"
	aDecision = "remove what is held back"
)

// attempt calls f, which applies a batch. If f panics, which is a defect of
// this package, the state is made anew from the claims of all registries before
// the batch, or after it if only the logs lack it. The error of a message ends
// the plugin of its registry only. The caller holds apply.
func (d *DB) attempt(b *batch, doing string, f func()) (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = b.r.defect(p, doing)
			relisted := b.r
			if doing != aMessage {
				relisted = nil
			}
			d.rebuild(relisted, b.written)
		}
	}()
	f()
	return nil
}

// defect logs a panic and returns it as an error.
func (r *Registry) defect(p any, doing string) error {
	r.db.log.Error("the bridge has met a defect of its own and goes on",
		"registry", *r.shown.Load(), "doing", doing, "err", fmt.Sprint(p), "stack", string(debug.Stack()))
	return fmt.Errorf("%s: a defect of the bridge: %v", doing, p)
}

// rebuild makes everything that is derived from the claims of the registries
// anew. The logs have the claims as of the last batch that was committed, and
// the index those of the batch that failed, if it was complete (written).
//
// Readers have to start over: they find every name, in the version that it had.
// The registry whose message failed, if it was one, is going to list
// everything, so that what its counters of the protection say is dropped; those
// of others stay.
func (d *DB) rebuild(failed *Registry, written bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.writing = true
	defer func() { d.writing = false }()
	d.book.changeAll(func() { d.rebuildLocked(failed, written) })
	d.wakeLocked()
}

// rebuildLocked implements rebuild. The caller holds all locks.
func (d *DB) rebuildLocked(failed *Registry, written bool) {
	l := loader{d: d, registries: slices.Clone(d.registries), whole: true}
	was := make(map[*Record]*Record) // the record before, by its successor
	var all Saved
	for _, name := range slices.Sorted(maps.Keys(d.tables)) {
		t := d.tables[name]
		for _, claims := range d.committedLocked(t, written) {
			for n, old := range claims {
				it := savedItem{registry: slices.Index(d.registries, old.kind.registry), more: n > 0}
				c := old.copy()
				switch {
				case old.parts != nil:
					c.parts = &composition{}
					if hosts := encode.Hosts(c.Spec()); !c.is(ownAddress) && len(hosts) > 0 {
						it.host = hosts[0]
					}
				case old.of != nil:
					it.service = old.of.name
				}
				it.record, was[c] = c, old
				all.items = append(all.items, it)
			}
		}
	}
	l.items = []Saved{all}

	for _, t := range d.tables {
		t.index, t.before = make(map[string]*Record), nil
		for _, s := range shapesOf(t) {
			t.logs[s].Reset(d.revision + 1)
		}
		a := &t.asides
		a.revision++
		a.log.Reset(a.revision)
		clear(a.places)
		a.count.Store(0)
	}
	d.revision++
	clear(d.hosts)
	clear(d.claims.now)
	clear(d.verdicts.now)
	d.claims.before, d.verdicts.before, d.book.begun = nil, nil, nil
	clear(d.contested)
	clear(d.contestedBy)
	kept := make(map[*Registry]map[keptName]*protect.Item)
	for _, r := range d.registries {
		r.resources, r.entries, r.bytes, r.services, r.instances, r.shadowed, r.disputed, r.unaddressed = 0, 0, 0, 0, 0, 0, 0, 0
		for coll := range r.served {
			r.served[coll] = 0
		}
		g := &r.guard
		if r != failed {
			kept[r] = g.kept
		}
		g.kept, g.services, g.endpoints, g.resources, g.putBack, g.pending, g.mass = nil, 0, 0, 0, 0, 0, 0
		g.run, g.runs, g.missing = protect.Run[*lostService]{}, nil, 0
	}

	if err := l.merge(); err != nil {
		panic(fmt.Sprintf("BUG: state: %v", err))
	}
	l.link()
	l.compose()
	l.contest()
	l.enter()
	l.decide()
	for c, old := range was {
		if c.of != nil && c.parts != nil && c.of.registry != failed {
			c.of.kept, c.of.peaks, c.of.emptied = old.of.kept, old.of.peaks, old.of.emptied
		}
	}
	for _, r := range d.registries {
		r.countRestored()
		for name, item := range kept[r] {
			if c := name.table.claim(name.name, r); c != nil {
				r.keepAgain(name, item, c)
			}
		}
		d.metrics.setServed(r)
		d.metrics.setBytes(r)
		d.metrics.setProtected(r)
		r.countProblems()
	}
	d.remark()
	d.publish()
}

// keepAgain retains a resource that its registry removed before a rebuild.
func (r *Registry) keepAgain(name keptName, item *protect.Item, c *Record) {
	g := &r.guard
	r.setKept(c, item)
	if !item.Refused {
		g.pending++
		if !item.Service {
			g.mass++
		}
	}
	if item.Back {
		g.putBack++
	}
	g.countKept(c, 1)
}

// committedLocked returns the claims on each name of a collection, in order of
// precedence: those of the logs, or those of the index.
func (d *DB) committedLocked(t *table, index bool) (all [][]*Record) {
	isClaim := func(r *Record) bool { return r != nil && !r.is(isTombstone) && !r.is(isDerived) }
	if index {
		for _, name := range slices.Sorted(maps.Keys(t.index)) {
			if claims := slices.DeleteFunc(claimsOn(t.index[name]), func(r *Record) bool { return !isClaim(r) }); len(claims) > 0 {
				all = append(all, claims)
			}
		}
		return all
	}
	for _, r := range t.logs[encode.Workload].All() { // this shape has every name
		if _, aside := t.asides.places[r.Name()]; isClaim(r) && !aside {
			all = append(all, []*Record{r})
		}
	}
	for _, name := range slices.Sorted(maps.Keys(t.asides.places)) {
		if claims, _ := t.asides.log.Get(t.asides.places[name]); len(claims.Records) > 0 {
			all = append(all, claims.Records)
		}
	}
	return all
}
