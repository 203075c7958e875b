package state

import (
	"iter"
	"time"

	"github.com/isthmus-mesh/isthmus/plugin/collection"
	"github.com/isthmus-mesh/isthmus/server/encode"
	"github.com/isthmus-mesh/isthmus/server/state/history"
	"github.com/isthmus-mesh/isthmus/server/state/shapes"
	"github.com/isthmus-mesh/isthmus/server/state/status"
)

// Bounds of the texts of a [history.Idle], in bytes.
const (
	maxHealth = 20
	maxIdle   = 200
)

// record adds the changes of the batch to the history, as sinks of the shape
// workload receive them: the ServiceEntry of endpoints that changed is another
// one in the shape inline only, and no change of its own.
func (b *batch) record(changed []shapes.Set, revision Revision) {
	told := make(map[string]bool) // services with an endpoint that changed
	for n, t := range b.touched {
		for _, r := range []*Record{t.before, t.table.Listed(t.name)} {
			if changed[n] == 0 || r == nil || !r.IsInstance() {
				continue
			}
			told[r.of.name] = true
			if m := r.of.merger; m != nil {
				told[m.Lead.name] = true
			}
		}
	}
	for n := range b.touched {
		t := &b.touched[n]
		if changed[n] == 0 || changed[n] == shapes.Of(encode.Inline) && t.table.name == collection.ServiceEntry && told[t.name] {
			continue
		}
		b.db.record(t, b.r, revision, b.idle[t.name])
	}
}

// record adds the change of a name to the history. The caller holds apply.
func (d *DB) record(t *touch, by *Registry, revision Revision, why history.Idle) {
	c := history.Change{At: time.Now(), Registry: by.name, Collection: t.table.name, Name: t.name, Revision: revision, Removed: true, Idle: why}
	op, now := "remove", t.table.Listed(t.name)
	if !now.isGone() {
		c.Removed, op = false, "upsert"
		c.Registry, c.Hash = now.kind.registry.name, now.Version()
	}
	if c.Collection == collection.WorkloadEntry {
		c.Old, c.New = t.before.endpoint(), now.endpoint()
	}
	by.count(status.Change{Collection: c.Collection, Op: op})
	d.history.Add(&c)
}

// endpoint returns a WorkloadEntry as the history has it.
func (r *Record) endpoint() history.Endpoint {
	if r.isGone() {
		return history.Endpoint{}
	}
	return history.Endpoint{Address: r.Address(), Weight: encode.Weight(r.Spec())}
}

// History yields the newest 100,000 changes, newest first. It holds no lock
// while it yields; what is evicted meanwhile is left out.
func (d *DB) History() iter.Seq[history.Event] { return d.history.All(&d.apply) }

// sizeNow returns the size of what is served. The caller holds apply.
func (d *DB) sizeNow() history.Sample {
	s := history.Sample{Time: time.Now(), Changes: d.history.Recorded()}
	for _, r := range d.registries {
		s.Services += r.served[collection.ServiceEntry]
		s.Endpoints += r.served[collection.WorkloadEntry]
	}
	return s
}

// Samples returns the size of the state every five seconds of the last hour,
// oldest first, and now.
func (d *DB) Samples() []history.Sample {
	d.apply.Lock()
	defer d.apply.Unlock()
	return d.history.Samples(d.sizeNow())
}
