package state

import (
	"fmt"
	"iter"
	"maps"
	"runtime/debug"
	"slices"

	pluginv1 "github.com/isthmus-mesh/isthmus/plugin/proto/isthmus/plugin/v1"
	"github.com/isthmus-mesh/isthmus/server/encode"
	"github.com/isthmus-mesh/isthmus/server/state/message"
	"github.com/isthmus-mesh/isthmus/server/state/protect"
)

// read parses and checks a message, without a lock. A panic, which is a defect
// of the bridge, is the plugin's error.
func (r *Registry) read(m *pluginv1.WatchResponse) (upserts []message.Upsert, err error) {
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

// attempt calls f, which applies a batch. If f panics, which is a defect of
// this package, the state is made anew from the claims of all registries before
// the batch, or after it if only the logs lack it. The error of a message ends
// the plugin of its registry only. The caller holds apply.
func (d *DB) attempt(b *batch, doing string, f func()) (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = b.r.defect(p, doing)
			var failed *Registry
			if doing == aMessage {
				failed = b.r
			}
			d.rebuild(failed, b.written)
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
			d.rebuild(nil, false)
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
// anew: from those of the last batch that was committed or, if the one that
// failed was complete, from the index.
//
// Readers have to start over: they find every name, in the version that it had.
// The registry whose message failed, if it was one, is going to list
// everything, so that what its counters of the protection say is dropped; those
// of others stay.
func (d *DB) rebuild(failed *Registry, complete bool) {
	l := loader{d: d, registries: d.registries, whole: true}
	var all Saved
	before := make(map[*Record]*Record)
	for _, name := range slices.Sorted(maps.Keys(d.tables)) {
		for claims := range d.tables[name].claims(complete) {
			more := false
			for _, old := range claims {
				it := item{record: old.copy(), registry: slices.Index(d.registries, old.kind.registry), more: more}
				switch {
				case it.registry < 0:
					continue
				case old.parts != nil:
					it.record.parts = &composition{}
				case old.of != nil:
					it.service = old.of.name
				}
				all.items, before[it.record], more = append(all.items, it), old, true
			}
		}
	}
	l.items = []Saved{all}
	d.replace(func() {
		d.reset()
		paused := make(map[*Registry]map[claimName]*protect.Item)
		for _, r := range d.registries {
			paused[r] = r.guard.Take()
			r.guard.run, r.guard.runs = protect.Run[*lostService]{}, nil
		}
		delete(paused, failed)
		if err := l.load(); err != nil {
			panic(fmt.Sprintf("BUG: state: %v", err))
		}
		for c, old := range before {
			if c.of != nil && c.parts != nil && c.of.registry != failed {
				c.of.retained = old.of.retained
				c.of.counts.Inherit(&old.of.counts)
			}
		}
		for _, r := range d.registries {
			r.status.Revision = d.revision
			r.countRestored()
			for name, item := range paused[r] {
				if c := name.table.claim(name.name, r); c != nil {
					r.pause(c, item)
				}
			}
		}
		d.remark()
		d.publish()
	})
}

// claims yields the claims on each name, in order of precedence: those that are
// committed, or those of the index.
func (t *table) claims(index bool) iter.Seq[[]*Record] {
	return func(yield func([]*Record) bool) {
		if index {
			for _, name := range t.Sorted() {
				if !yield(slices.DeleteFunc(t.Of(name), func(r *Record) bool { return !r.isClaim() })) {
					return
				}
			}
			return
		}
		for _, r := range t.logs.In(encode.Workload).All() { // this shape has every name
			if _, _, aside := t.asides.Find(r.Name()); r.isClaim() && !aside && !yield([]*Record{r}) {
				return
			}
		}
		for _, name := range slices.Sorted(t.asides.Names()) {
			if claims, _, _ := t.asides.Find(name); !yield(claims.Records) {
				return
			}
		}
	}
}
