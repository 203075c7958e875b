package state

import (
	"iter"
	"slices"
	"strings"
	"time"
	"unique"

	"github.com/isthmus-mesh/isthmus/plugin/collection"
	"github.com/isthmus-mesh/isthmus/server/encode"
)

// maxHistory is the number of events that [DB.History] retains, of some 150
// bytes each.
const maxHistory = 100_000

// Event is one change as the admin pages show it.
type Event struct {
	Time       time.Time `json:"time,omitzero"`
	Registry   string    `json:"registry,omitempty"`
	Collection string    `json:"collection"`
	Name       string    `json:"name"`
	Op         string    `json:"op"` // upsert or remove
	Version    string    `json:"version,omitempty"`
	Revision   Revision  `json:"revision"` // after the batch of the change
	// Old and New are what a WorkloadEntry was and is; nil for none, and for
	// other kinds.
	Old *EventEndpoint `json:"old,omitempty"`
	New *EventEndpoint `json:"new,omitempty"`
	// Health of an endpoint that the registry has still, and that takes no
	// traffic any more: critical, warning or disabled. Empty for one that is
	// gone, or that is served.
	Health string `json:"health,omitempty"`
	// Reason says why it takes none.
	Reason string `json:"reason,omitempty"`
	// Number counts the events of this process from 1.
	Number uint64 `json:"-"`
}

// EventEndpoint is an endpoint before or after a change.
type EventEndpoint struct {
	Address string `json:"address"`
	Weight  uint32 `json:"weight"`
}

// idle says why an instance takes no traffic. Few differ.
type idle struct{ health, reason string }

// Bounds of an idle's texts, in bytes.
const (
	maxHealth = 20
	maxIdle   = 200
)

// pastEvent is an event as it is retained.
type pastEvent struct {
	at         int64 // Unix nanoseconds
	revision   Revision
	hash       encode.Hash
	registry   string // shared with the registry
	collection string // shared with the table
	// text is the name, the old address and the new one.
	text                 string
	nameLen, oldLen      uint16
	oldWeight, newWeight uint32 // 0: no endpoint
	removed              bool
	idle                 unique.Handle[idle] // the zero handle for none
}

// record adds the change of a name to the history. The caller holds apply.
func (d *DB) record(t *touch, by *Registry, revision Revision, why idle) {
	e := pastEvent{at: time.Now().UnixNano(), collection: t.table.name, registry: by.name, revision: revision, removed: true}
	op, from, to := "remove", "", ""
	now := t.table.current(t.name)
	if !now.isGone() {
		e.removed, op = false, "upsert"
		e.registry, e.hash = now.kind.registry.name, now.Hash(encode.Inline)
	}
	if e.collection == collection.WorkloadEntry {
		if !t.before.isGone() {
			from, e.oldWeight = t.before.address(), encode.Weight(t.before.Spec())
		}
		if !e.removed {
			to, e.newWeight = now.address(), encode.Weight(now.Spec())
		}
	}
	if e.removed && why != (idle{}) {
		e.idle = unique.Make(why)
	}
	var text strings.Builder
	text.Grow(len(t.name) + len(from) + len(to)) // does not retain a record's buffer
	text.WriteString(t.name)
	text.WriteString(from)
	text.WriteString(to)
	e.text, e.nameLen, e.oldLen = text.String(), uint16(len(t.name)), uint16(len(from)) //nolint:gosec // bounded by the record
	d.metrics.changes.WithLabelValues(by.name, e.collection, op).Inc()
	d.recorded++
	if len(d.history) < maxHistory {
		d.history = append(d.history, e)
		return
	}
	d.history[(d.recorded-1)%maxHistory] = e
}

// event returns an event with its number.
func (e *pastEvent) event(number uint64) Event {
	old := e.nameLen + e.oldLen
	out := Event{
		Time: time.Unix(0, e.at), Registry: e.registry, Collection: e.collection, Name: e.text[:e.nameLen], Op: "remove",
		Revision: e.revision, Number: number,
	}
	if !e.removed {
		out.Op, out.Version = "upsert", e.hash.String()
	}
	if e.oldWeight > 0 {
		out.Old = &EventEndpoint{e.text[e.nameLen:old], e.oldWeight}
	}
	if e.newWeight > 0 {
		out.New = &EventEndpoint{e.text[old:], e.newWeight}
	}
	if e.idle != (unique.Handle[idle]{}) {
		why := e.idle.Value()
		out.Health, out.Reason = why.health, why.reason
	}
	return out
}

// History yields the newest 100,000 changes, newest first. It holds no lock
// while it yields; what is evicted meanwhile is left out.
func (d *DB) History() iter.Seq[Event] {
	return func(yield func(Event) bool) {
		next := ^uint64(0)           // number of the next one
		buf := make([]Event, 0, 256) // read under one lock
		for {
			buf = buf[:0]
			d.apply.Lock()
			next = min(next, d.recorded)
			for ; next > 0 && next+maxHistory > d.recorded && len(buf) < cap(buf); next-- {
				buf = append(buf, d.history[(next-1)%maxHistory].event(next))
			}
			d.apply.Unlock()
			for _, e := range buf {
				if !yield(e) {
					return
				}
			}
			if len(buf) < cap(buf) {
				return
			}
		}
	}
}

// Sample is the size of the state at a time.
type Sample struct {
	Time      time.Time
	Services  int
	Endpoints int
	// Changes is the number of changes since the start.
	Changes uint64
}

// maxSamples is the number of samples that are retained: an hour of them.
const maxSamples = int(time.Hour / tickEvery)

// sizeNow returns the size of the state. The caller holds apply.
func (d *DB) sizeNow() Sample {
	s := Sample{Time: time.Now(), Changes: d.recorded}
	for _, r := range d.registries {
		s.Services += r.services
		s.Endpoints += r.instances
	}
	return s
}

// sample records the size of the state. The caller holds apply.
func (d *DB) sample() {
	if len(d.samples) == maxSamples {
		d.samples = slices.Delete(d.samples, 0, 1)
	}
	d.samples = append(d.samples, d.sizeNow())
}

// Samples returns the size of the state every five seconds of the last hour,
// oldest first, and now.
func (d *DB) Samples() []Sample {
	d.apply.Lock()
	defer d.apply.Unlock()
	return append(slices.Clone(d.samples), d.sizeNow())
}
