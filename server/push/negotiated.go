package push

import (
	"errors"
	"slices"
	"strconv"

	"github.com/isthmus-mesh/isthmus/server/resource"
	"github.com/isthmus-mesh/isthmus/server/store"
)

// MaxMessage is the largest message that a gRPC client accepts by default, in bytes.
const MaxMessage = 4 << 20

// ErrResume says that all of a collection has to be sent to a sink that could do with parts if it asked anew, and would be more than
// [MaxMessage].
var ErrResume = errors.New("all of the collection is more than 4 MiB; the sink has to reconnect with the versions that it holds, to get the rest in parts")

// Negotiated is one sink's interest in all of one collection, where each answer of the sink says anew whether the next response may
// be incremental (MCP). Like [Subscription] it is a state machine without goroutine, lock or clock that belongs to one goroutine.
//
//   - The first response is all of the collection, unless the sink said which versions it holds and permits an incremental one: then it
//     is exactly what the sink lacks, removals included.
//   - What is larger than [MaxDelta] goes to a sink that permits incremental responses in several, the first of which replaces
//     what the sink has.
//   - After a NACK, which carries no permission, and for a sink that fell behind the store's memory of removals, a response is all of
//     the collection again.
type Negotiated struct {
	options Options
	key     string // the store's collection
	hub     *Hub
	pages   *pages // set by the first response that is all of the collection

	state     State
	nonce     uint64
	permitted bool // the next response may be incremental
	capable   bool // the sink permitted it once
	refused   bool // the newest answer was a NACK
	replace   bool // no response removes anything but by leaving it out
	again     bool // the next response is all of the collection, even if nothing changed

	cursor  store.Revision // everything up to here was sent
	begun   bool           // a response was sent
	initial store.Revision // while the first listing is being sent in parts: its revision; 0 otherwise
	full    string         // version of the newest response, if it was all of the collection; "" otherwise

	status Status
}

// NewNegotiated returns a subscription to which nothing was sent yet. Options.Incremental says whether the sink's first request
// permits incremental responses. Options.Versions is kept, and emptied.
func NewNegotiated(h *Hub, o Options) *Negotiated {
	n := &Negotiated{
		options: o, hub: h, key: resource.Key(o.Collection, o.Form.Shape),
		permitted: o.Incremental, capable: o.Incremental,
	}
	n.status.Collection = o.Collection
	return n
}

// Close releases what the subscription shares with others.
func (n *Negotiated) Close() {
	if n.pages != nil {
		n.hub.release(n.pages)
		n.pages = nil
	}
}

// Next returns what the sink lacks, if there is anything and no response is under way; full says that the response replaces what
// the sink has. The error is [ErrResume] or nil.
func (n *Negotiated) Next() (r Response, full, ok bool, err error) {
	if n.state == Sent || n.state == Held && !n.hub.ready(n.options.Collection) {
		return r, false, false, nil
	}
	if n.permitted && !n.again {
		var known bool
		if r, full, ok, known = n.changes(); known && !(n.replace && len(r.Removed) > 0) {
			if ok {
				n.sent(&r)
			}
			return r, full, ok, nil
		}
		n.again = true // changes has moved the cursor
	}
	if n.pages == nil {
		n.pages = n.hub.acquire(pagesKey{n.key, n.options.Form, n.options.Framing})
	}
	all := n.pages.current(n.hub.store)
	if n.begun && !n.again {
		unchanged := n.full == all.Version
		if n.full == "" { // the newest response was incremental
			changes, _, known := n.hub.store.Since(n.key, n.cursor)
			unchanged = known && len(changes) == 0
		}
		if unchanged {
			return r, false, false, nil
		}
	}
	if n.begun && n.capable && !n.replace && all.Size > MaxMessage {
		return r, false, false, ErrResume
	}
	n.options.Versions, n.initial = nil, 0
	n.begun, n.again, n.cursor, n.full = true, false, all.Revision, all.Version
	r = Response{Version: all.Version, Segments: all.Segments, Resources: all.Resources, Size: all.Size, Revision: all.Revision}
	n.sent(&r)
	return r, true, true, nil
}

// changes returns what changed since the cursor, or the first listing. It is not known if the store has forgotten removals.
func (n *Negotiated) changes() (r Response, full, ok, known bool) {
	st := n.hub.store
	var changes []store.Change[*resource.Resource]
	var now store.Revision
	first := !n.begun
	if first {
		all, at := st.All(n.key)
		changes, now = slices.Collect(all), at
		n.initial = max(at, 1)
		full = len(n.options.Versions) == 0
	} else {
		var complete bool
		if changes, now, complete = st.Since(n.key, n.cursor); !complete {
			return r, false, false, false
		}
	}
	cursor := now
	for i := range changes {
		c := &changes[i]
		var enc *resource.Encoding
		if !c.Removed {
			enc = c.Value.Encode(n.options.Form)
		}
		have, held := n.options.Versions[c.Name]
		var done bool
		switch {
		case enc == nil || enc.Absent:
			// During the first listing the sink knows the name only if it said
			// so, or if an earlier part had it.
			done = n.initial != 0 && !held && c.Revision <= n.initial || r.remove(c.Name)
		default:
			done = held && have == enc.Version || r.add(n.options.Framing, c.Name, enc)
		}
		if !done {
			cursor = changes[i-1].Revision
			break
		}
		delete(n.options.Versions, c.Name)
	}
	n.cursor, n.begun = cursor, true
	if n.initial != 0 && cursor == now {
		// What the sink said that it holds and nothing up to now had is gone.
		for name := range n.options.Versions {
			if !r.remove(name) {
				break
			}
			delete(n.options.Versions, name)
		}
		if len(n.options.Versions) == 0 {
			n.initial = 0
		}
	}
	slices.Sort(r.Removed)
	r.Version, r.Revision = strconv.FormatUint(uint64(cursor), 10), cursor
	ok = first || r.Resources > 0 || len(r.Removed) > 0
	if ok {
		n.full = ""
	}
	return r, full, ok, true
}

func (n *Negotiated) sent(r *Response) {
	n.nonce++
	r.Nonce = strconv.FormatUint(n.nonce, 10)
	n.state = Sent
	n.status.Sent++
	n.status.SentVersion, n.status.SentRevision = r.Version, r.Revision
	n.status.Resources, n.status.Bytes = r.Resources, r.Size
}

// Ack says that the sink took the response of that nonce, and whether the next one may be incremental. It reports whether that
// response was under way; a stale nonce changes nothing.
func (n *Negotiated) Ack(nonce string, incremental bool) bool {
	if !n.settle(nonce) {
		return false
	}
	n.permitted, n.refused = incremental, false
	n.capable = n.capable || incremental
	n.status.AckedVersion, n.status.AckedRevision = n.status.SentVersion, n.status.SentRevision
	return true
}

// Nack says that the sink refused the response of that nonce, and why. The next response is all of the collection; it goes out
// when something changes, or after [Negotiated.Again].
func (n *Negotiated) Nack(nonce, detail string) bool {
	if !n.settle(nonce) {
		return false
	}
	n.permitted, n.refused = false, true
	n.status.Nacks++
	n.status.LastNack = detail
	return true
}

// Again makes the next response all of the collection, although nothing may have changed.
func (n *Negotiated) Again() { n.again = true }

func (n *Negotiated) settle(nonce string) bool {
	if n.state != Sent || nonce != strconv.FormatUint(n.nonce, 10) {
		return false
	}
	n.state = Current
	return true
}

// State returns where the subscription stands.
func (n *Negotiated) State() State { return n.state }

// Complete says whether the sink has acknowledged all that there was when the newest response was made.
func (n *Negotiated) Complete() bool { return n.state == Current && n.initial == 0 && !n.refused }

// Incremental says whether the next response may be incremental.
func (n *Negotiated) Incremental() bool { return n.permitted && !n.again }

// Refused says whether the sink's newest answer was a NACK.
func (n *Negotiated) Refused() bool { return n.refused }

// Status returns the subscription as people want to see it.
func (n *Negotiated) Status() Status {
	st := n.status
	st.State = n.state.String()
	return st
}

// ReplaceOnRemoval makes every response that would remove something all of the collection instead, for sinks that do not act on
// removals.
func (n *Negotiated) ReplaceOnRemoval() { n.replace = true }
