package state

import (
	"fmt"
	"maps"
	"runtime/debug"
	"slices"

	pluginv1 "github.com/isthmus-mesh/isthmus/plugin/proto/isthmus/plugin/v1"
	"github.com/isthmus-mesh/isthmus/server/encode"
	"github.com/isthmus-mesh/isthmus/server/state/address"
	"github.com/isthmus-mesh/isthmus/server/state/message"
	"github.com/isthmus-mesh/isthmus/server/state/protect"
	"github.com/isthmus-mesh/isthmus/server/state/record"
)

// read parses and checks a message, without a lock. A panic, which is a defect
// of the bridge, is the plugin's error.
func (r *Registry) read(m *pluginv1.WatchResponse) (out *message.Message, err error) {
	defer func() {
		if p := recover(); p != nil {
			err = r.defect(p, aMessage)
		}
	}()
	return r.db.reader.Read(m, *r.owns.Load())
}

// What the bridge does when it meets a defect of its own.
const (
	aMessage  = "apply a message of the plugin"
	aDecision = "carry out a paused removal"
	aReload   = "apply the configuration"
	aRestore  = "restore the last good state"
)

// source is where rebuild takes the claims from.
type source byte

const (
	theLogs  source = iota // as of the last batch that was committed
	theIndex               // with the batch that failed, which was complete
	nothing
)

// attempt calls f, which applies a batch. If f panics, which is a defect of
// this package, the state is made anew from the claims of all registries before
// the batch, or after it if only the logs lack it. The error of a message ends
// the plugin of its registry only. The caller holds apply.
func (d *DB) attempt(b *batch, doing string, f func()) (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = b.r.defect(p, doing)
			relisted, from := b.r, theLogs
			if doing != aMessage {
				relisted = nil
			}
			if b.written {
				from = theIndex
			}
			d.rebuild(relisted, from)
		}
	}()
	f()
	return nil
}

// reconfigure calls f, which serves the claims of some registries under another
// configuration. If f panics, the state is made anew from these claims. The
// caller holds apply.
func (d *DB) reconfigure(registries []*Registry, f func()) {
	defer func() {
		if p := recover(); p != nil {
			_ = d.defect(p, aReload, "")
			d.registries = registries
			d.book.ChangeAll(func() {
				for n, r := range registries {
					r.order = n
				}
			})
			d.rebuild(nil, theLogs)
		}
	}()
	f()
}

// defect logs a panic and returns it as an error.
func (r *Registry) defect(p any, doing string) error {
	return r.db.defect(p, doing, *r.shown.Load())
}

func (d *DB) defect(p any, doing, registry string) error {
	d.log.Error("the bridge has met a defect of its own and goes on",
		"registry", registry, "doing", doing, "err", fmt.Sprint(p), "stack", string(debug.Stack()))
	return fmt.Errorf("%s: a defect of the bridge: %v", doing, p)
}

// rebuild makes everything that is derived from the claims of the registries
// anew.
//
// Readers have to start over: they find every name, in the version that it had.
// The registry whose message failed, if it was one, is going to list
// everything, so that what its counters of the protection say is dropped; those
// of others stay.
func (d *DB) rebuild(failed *Registry, from source) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.writing = true
	defer func() { d.writing = false }()
	d.book.ChangeAll(func() { d.rebuildLocked(failed, from) })
	d.wakeLocked()
}

// rebuildLocked implements rebuild. The caller holds all locks.
func (d *DB) rebuildLocked(failed *Registry, from source) {
	l := loader{d: d, registries: slices.Clone(d.registries), whole: true}
	was := make(map[*Record]*Record) // the record before, by its successor
	var all Saved
	for _, name := range slices.Sorted(maps.Keys(d.tables)) {
		t := d.tables[name]
		for _, claims := range d.committedLocked(t, from) {
			claims = slices.DeleteFunc(slices.Clone(claims), func(c *Record) bool { return !slices.Contains(d.registries, c.kind.registry) })
			for n, old := range claims {
				it := savedItem{registry: slices.Index(d.registries, old.kind.registry), more: n > 0}
				c := old.copy()
				switch {
				case old.parts != nil:
					c.parts, it.host = &composition{}, c.addressed()
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
		t.names = newNames(d)
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
	d.book.Reset()
	d.addresses, d.hosts = address.In(d.addresses.Network()), newHosts(d, d.hosts.Rules)
	kept := make(map[*Registry]map[claimName]*protect.Item)
	for _, r := range d.registries {
		r.resources, r.entries, r.bytes, r.services, r.instances, r.shadowed, r.disputed, r.unaddressed = 0, 0, 0, 0, 0, 0, 0, 0
		for coll := range r.served {
			r.served[coll] = 0
		}
		g := &r.guard
		if r != failed {
			kept[r] = g.paused
		}
		g.Reset()
		g.paused, g.run, g.runs = nil, protect.Run[*lostService]{}, nil
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
			c.of.retained = old.of.retained
			c.of.counts.Inherit(&old.of.counts)
		}
	}
	for _, r := range d.registries {
		r.countRestored()
		for name, item := range kept[r] {
			if c := name.table.claim(name.name, r); c != nil {
				r.pauseAgain(name, item, c)
			}
		}
		d.metrics.setServed(r)
		d.metrics.setBytes(r)
		d.metrics.setPaused(r)
		r.countProblems()
	}
	d.remark()
	d.publish()
}

// pauseAgain retains a resource that its registry removed before a rebuild.
func (r *Registry) pauseAgain(name claimName, item *protect.Item, c *Record) {
	g := &r.guard
	r.setPaused(c, item)
	g.Count(item, 1)
	g.countPaused(c, 1)
}

// committedLocked returns the claims on each name of a collection, in order of
// precedence.
func (d *DB) committedLocked(t *table, from source) (all [][]*Record) {
	isClaim := func(r *Record) bool { return r != nil && !r.Is(record.Tombstone|record.Derived) }
	switch from {
	case theLogs:
	case nothing:
		return nil
	case theIndex:
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
