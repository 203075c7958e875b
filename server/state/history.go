package state

import (
	"time"

	"github.com/isthmus-mesh/isthmus/server/encode"
)

// maxHistory is the number of events that [DB.History] retains.
const maxHistory = 1_000

// Event is one change as the admin pages show it.
type Event struct {
	Time       time.Time `json:"time,omitzero"`
	Registry   string    `json:"registry,omitempty"`
	Collection string    `json:"collection"`
	Name       string    `json:"name"`
	Op         string    `json:"op"` // upsert or remove
	Version    string    `json:"version,omitempty"`
	Revision   Revision  `json:"revision"` // after the batch of the change
}

// record adds the change of a name to the history. The caller holds apply.
func (d *DB) record(t *touch, by *Registry, revision Revision) {
	e := Event{Time: time.Now(), Collection: t.table.name, Name: t.name, Op: "remove", Registry: by.name, Revision: revision}
	if now := t.table.current(t.name); !now.isGone() {
		e.Op, e.Registry, e.Version = "upsert", now.kind.registry.name, now.Hash(encode.Inline).String()
	}
	d.metrics.changes.WithLabelValues(by.name, e.Collection, e.Op).Inc()
	if len(d.history) < maxHistory {
		d.history = append(d.history, e)
		d.next = len(d.history) % maxHistory
		return
	}
	d.history[d.next] = e
	d.next = (d.next + 1) % maxHistory
}

// History returns the newest changes, newest first, at most 1,000.
func (d *DB) History() []Event {
	d.apply.Lock()
	defer d.apply.Unlock()
	out := make([]Event, 0, len(d.history))
	for n := range len(d.history) {
		out = append(out, d.history[(d.next-1-n+2*len(d.history))%len(d.history)])
	}
	return out
}
