// Package history retains the newest changes of the state.
//
// A [History] has no lock and no clock: its owner calls it under a lock of its
// own. It is bounded, in changes and in samples of the size.
package history

import (
	"iter"
	"slices"
	"strings"
	"sync"
	"time"
	"unique"

	"github.com/isthmus-mesh/isthmus/server/changelog"
	"github.com/isthmus-mesh/isthmus/server/encode"
)

// Max is the number of changes that are retained, of some 150 bytes each.
const Max = 100_000

// Event is one change as the admin pages show it.
type Event struct {
	Time       time.Time          `json:"time,omitzero"`
	Registry   string             `json:"registry,omitempty"`
	Collection string             `json:"collection"`
	Name       string             `json:"name"`
	Op         string             `json:"op"` // upsert or remove
	Version    string             `json:"version,omitempty"`
	Revision   changelog.Revision `json:"revision"` // after the batch of the change
	// Old and New are what a WorkloadEntry was and is; nil for none, and for
	// other kinds.
	Old *Endpoint `json:"old,omitempty"`
	New *Endpoint `json:"new,omitempty"`
	// Health of an endpoint that the registry has still, and that takes no
	// traffic any more: critical, warning or disabled. Empty for one that is
	// gone, or that is served.
	Health string `json:"health,omitempty"`
	// Reason says why it takes none.
	Reason string `json:"reason,omitempty"`
	// Number counts the events of this process from 1.
	Number uint64 `json:"-"`
}

// Endpoint is an endpoint before or after a change.
type Endpoint struct {
	Address string `json:"address"`
	Weight  uint32 `json:"weight"` // 0: no endpoint
}

// Idle says why an instance takes no traffic. Few differ.
type Idle struct{ Health, Reason string }

// Change is a change to add. Its strings are copied, except those of the
// registry and the collection.
type Change struct {
	At                         time.Time
	Registry, Collection, Name string
	Revision                   changelog.Revision
	Hash                       encode.Hash
	Old, New                   Endpoint // the zero Endpoint for none
	Removed                    bool
	Idle                       Idle // of a removed one; the zero Idle for none
}

// past is an event as it is retained.
type past struct {
	at                   int64 // Unix nanoseconds
	revision             changelog.Revision
	hash                 encode.Hash
	registry, collection string
	// text is the name, the old address and the new one.
	text                 string
	nameLen, oldLen      uint16
	oldWeight, newWeight uint32 // 0: no endpoint
	removed              bool
	idle                 unique.Handle[Idle] // the zero handle for none
}

// History is what happened. The zero History is empty.
type History struct {
	events   []past // a ring buffer
	recorded uint64
	samples  []Sample // oldest first
}

// Recorded returns the number of changes so far.
func (h *History) Recorded() uint64 { return h.recorded }

// Add adds a change.
func (h *History) Add(c *Change) {
	e := past{
		at: c.At.UnixNano(), revision: c.Revision, hash: c.Hash, registry: c.Registry, collection: c.Collection, removed: c.Removed,
		oldWeight: c.Old.Weight, newWeight: c.New.Weight,
	}
	if c.Removed && c.Idle != (Idle{}) {
		e.idle = unique.Make(c.Idle)
	}
	var text strings.Builder
	text.Grow(len(c.Name) + len(c.Old.Address) + len(c.New.Address)) // does not retain the caller's buffers
	text.WriteString(c.Name)
	text.WriteString(c.Old.Address)
	text.WriteString(c.New.Address)
	e.text, e.nameLen, e.oldLen = text.String(), uint16(len(c.Name)), uint16(len(c.Old.Address)) //nolint:gosec // bounded by the record
	h.recorded++
	if len(h.events) < Max {
		h.events = append(h.events, e)
		return
	}
	h.events[(h.recorded-1)%Max] = e
}

// event returns an event with its number.
func (e *past) event(number uint64) Event {
	old := e.nameLen + e.oldLen
	out := Event{
		Time: time.Unix(0, e.at), Registry: e.registry, Collection: e.collection, Name: e.text[:e.nameLen], Op: "remove",
		Revision: e.revision, Number: number,
	}
	if !e.removed {
		out.Op, out.Version = "upsert", e.hash.String()
	}
	if e.oldWeight > 0 {
		out.Old = &Endpoint{e.text[e.nameLen:old], e.oldWeight}
	}
	if e.newWeight > 0 {
		out.New = &Endpoint{e.text[old:], e.newWeight}
	}
	if e.idle != (unique.Handle[Idle]{}) {
		why := e.idle.Value()
		out.Health, out.Reason = why.Health, why.Reason
	}
	return out
}

// Read appends events to buf until it is full, newest first, from the one of a
// number on, or from the newest one if there is none yet. It returns the number
// of the next one, for the next call; what is evicted meanwhile is left out.
func (h *History) Read(from uint64, buf []Event) (events []Event, next uint64) {
	next = min(from, h.recorded)
	for ; next > 0 && next+Max > h.recorded && len(buf) < cap(buf); next-- {
		buf = append(buf, h.events[(next-1)%Max].event(next))
	}
	return buf, next
}

// All yields all events, newest first. It holds the lock, which guards the
// history, only while it reads some of them; what is evicted meanwhile is left
// out.
func (h *History) All(lock sync.Locker) iter.Seq[Event] {
	return func(yield func(Event) bool) {
		buf := make([]Event, 0, 256)
		for next := ^uint64(0); ; {
			lock.Lock()
			buf, next = h.Read(next, buf[:0])
			lock.Unlock()
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

// Sample is the size of what is served at a time.
type Sample struct {
	Time      time.Time
	Services  int
	Endpoints int
	// Changes is the number of changes since the start.
	Changes uint64
}

// AddSample adds a sample, in place of the oldest one if there are most.
func (h *History) AddSample(s Sample, most int) {
	if len(h.samples) >= most {
		h.samples = slices.Delete(h.samples, 0, 1)
	}
	h.samples = append(h.samples, s)
}

// Samples returns the samples, oldest first, and one more.
func (h *History) Samples(now Sample) []Sample { return append(slices.Clone(h.samples), now) }
