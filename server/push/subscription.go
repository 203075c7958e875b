package push

import (
	"errors"
	"maps"
	"slices"
	"strconv"
	"time"

	"github.com/isthmus-mesh/isthmus/server/resource"
	"github.com/isthmus-mesh/isthmus/server/store"
)

// MaxDelta is the size at which an incremental response is closed and the rest left for the next one, in bytes. It keeps below
// 4 MiB, the largest message that a gRPC client accepts by default, unless a single resource is larger.
const MaxDelta = 3 << 20

// ErrFellBehind says that a sink was so slow that the store no longer knows what was removed since. The stream has to end; the sink
// comes back with the versions that it holds and gets exactly what it lacks.
var ErrFellBehind = errors.New("the sink fell so far behind that removals it missed are no longer known; it has to reconnect with initial_resource_versions")

// Interval returns the least time between the beginnings of two state-of-the-world responses of a size to one sink: 100 ms per
// MB, nothing below 100 kB. istiod needs about 30 ms of a core per MB, so that it spends at most a third of one on a
// registry that never rests.
func Interval(size int) time.Duration {
	if size < 100_000 {
		return 0
	}
	return time.Duration(size) * 100 * time.Millisecond / 1_000_000
}

// State says where a subscription stands.
type State uint8

const (
	// Held means that the collection's registries have not completed a first listing; nothing was sent.
	Held State = iota
	// Current means that the sink has everything.
	Current
	// Sent means that a response is under way and neither ACK nor NACK has come.
	Sent
)

// String returns the state's name in lower case.
func (s State) String() string {
	switch s {
	case Held:
		return "held"
	case Sent:
		return "sent"
	default:
		return "current"
	}
}

// Options say what a subscription yields.
type Options struct {
	// Collection is the collection as in package collection; it need not exist.
	Collection string
	// Form is how the sink's profile wants resources.
	Form resource.Form
	// Framing is the protocol's.
	Framing Framing
	// Incremental yields changes and removals; otherwise each response is all of the collection.
	Incremental bool
	// Versions is what an incremental sink says that it holds, by resource name (xDS initial_resource_versions). The subscription
	// keeps and empties it.
	Versions map[string]string
}

// Response is what to send next.
type Response struct {
	// Nonce names the response; the sink repeats it in its ACK or NACK.
	Nonce string
	// Version is a hash of the state that the sink then holds; for an incremental response the store's revision.
	Version string
	// Segments are the encoded resources, framed, to be sent behind the header that the protocol puts in front.
	Segments [][]byte
	// Removed are the names of resources that are gone. Only incremental responses have any.
	Removed []string
	// Resources is the number of resources in Segments.
	Resources int
	// Size is the length of Segments, in bytes.
	Size int
	// Revision is that of the store which the response reflects.
	Revision store.Revision
}

// Status is a subscription as people want to see it.
type Status struct {
	Collection    string         `json:"collection"`
	State         string         `json:"state"`
	Sent          uint64         `json:"sent"`           // responses
	SentVersion   string         `json:"sent_version"`   // of the newest response
	SentRevision  store.Revision `json:"sent_revision"`  // the same
	AckedVersion  string         `json:"acked_version"`  // of the newest response that was ACKed
	AckedRevision store.Revision `json:"acked_revision"` // the same
	Nacks         uint64         `json:"nacks"`
	LastNack      string         `json:"last_nack,omitempty"` // what the sink said
	Resources     int            `json:"resources"`           // in the newest response
	Bytes         int            `json:"bytes"`               // of the newest response
}

// Subscription is one sink's interest in one collection. It belongs to one goroutine.
type Subscription struct {
	options Options
	key     string // the store's collection
	pages   *pages // state of the world only; set by the first Next
	hub     *Hub

	state   State
	nonce   uint64
	version string // of the newest response

	// incremental only
	cursor   store.Revision  // everything up to here was sent
	begun    bool            // cursor means something
	initial  store.Revision  // while the first listing is being sent: its revision; 0 afterwards
	wildcard bool            // all names
	names    map[string]bool // the names asked for; the value says that the name has not been looked at yet

	status Status
}

// NewSubscription returns a subscription to which nothing was sent yet. It is to all names until [Subscription.Narrow].
func NewSubscription(h *Hub, o Options) *Subscription {
	s := &Subscription{options: o, hub: h, key: resource.Key(o.Collection, o.Form.Shape), wildcard: true}
	s.status.Collection = o.Collection
	return s
}

// Close releases what the subscription shares with others.
func (s *Subscription) Close() {
	if s.pages != nil {
		s.hub.release(s.pages)
		s.pages = nil
	}
}

// Narrow makes an incremental subscription one to names that are added by [Subscription.Add].
func (s *Subscription) Narrow() { s.wildcard = false }

// Widen makes an incremental subscription one to all names. If it was narrow, everything is sent again.
func (s *Subscription) Widen() {
	if !s.wildcard {
		s.wildcard, s.begun, s.names = true, false, nil
	}
}

// Add subscribes to names; each is answered, with the resource or as removed, even if it was subscribed to before (xDS
// protocol, "Subscribing to Resources").
func (s *Subscription) Add(names ...string) {
	if s.names == nil {
		s.names = make(map[string]bool)
	}
	for _, n := range names {
		s.names[n] = true
	}
}

// Drop unsubscribes from names.
func (s *Subscription) Drop(names ...string) {
	for _, n := range names {
		delete(s.names, n)
	}
}

// Next returns what the sink lacks, if there is anything and no response is under way. The error is [ErrFellBehind] or nil.
func (s *Subscription) Next() (r Response, ok bool, err error) {
	if s.state == Sent {
		return r, false, nil
	}
	if s.state == Held {
		if !s.hub.ready(s.options.Collection) {
			return r, false, nil
		}
	}
	if s.options.Incremental {
		r, ok, err = s.nextDelta()
	} else {
		r, ok = s.nextAll()
	}
	if !ok || err != nil {
		return r, false, err
	}
	s.nonce++
	r.Nonce = strconv.FormatUint(s.nonce, 10)
	s.state, s.version = Sent, r.Version
	s.status.Sent++
	s.status.SentVersion, s.status.SentRevision = r.Version, r.Revision
	s.status.Resources, s.status.Bytes = r.Resources, r.Size
	return r, true, nil
}

func (s *Subscription) nextAll() (r Response, ok bool) {
	if s.pages == nil {
		s.pages = s.hub.acquire(pagesKey{s.key, s.options.Form, s.options.Framing})
	}
	all := s.pages.current(s.hub.store)
	if s.state != Held && all.Version == s.version {
		return r, false
	}
	return Response{Version: all.Version, Segments: all.Segments, Resources: all.Resources, Size: all.Size, Revision: all.Revision}, true
}

func (s *Subscription) nextDelta() (r Response, ok bool, err error) {
	first := s.state == Held
	st := s.hub.store
	if !s.wildcard {
		return s.nextNamed(first)
	}
	var changes []store.Change[*resource.Resource]
	var now store.Revision
	if !s.begun {
		all, at := st.All(s.key)
		changes, now = slices.Collect(all), at
		s.begun, s.initial = true, max(at, 1)
	} else {
		var complete bool
		if changes, now, complete = st.Since(s.key, s.cursor); !complete {
			return r, false, ErrFellBehind
		}
	}
	s.cursor = now
	for i := range changes {
		c := &changes[i]
		have, known := s.options.Versions[c.Name]
		switch {
		case c.Removed && s.initial != 0:
			// The sink knows the name only if it said so, or if an earlier part of the first listing had it.
			if known || c.Revision > s.initial {
				delete(s.options.Versions, c.Name)
				r.Removed = append(r.Removed, c.Name)
			}
		case c.Removed:
			r.Removed = append(r.Removed, c.Name)
		default:
			delete(s.options.Versions, c.Name)
			enc := c.Value.Encode(s.options.Form)
			if known && have == enc.Version {
				break
			}
			r.add(s.options.Framing, c.Name, enc)
		}
		if r.Size >= MaxDelta && i < len(changes)-1 {
			s.cursor = c.Revision
			break
		}
	}
	if s.initial != 0 && s.cursor >= s.initial || len(changes) == 0 {
		// What the sink said that it holds and the listing did not have is gone.
		for name := range s.options.Versions {
			r.Removed = append(r.Removed, name)
		}
		slices.Sort(r.Removed)
		s.options.Versions, s.initial = nil, 0
	}
	r.Version, r.Revision = strconv.FormatUint(uint64(s.cursor), 10), s.cursor
	return r, first || r.Resources > 0 || len(r.Removed) > 0, nil
}

// nextNamed is nextDelta for a subscription to some names.
func (s *Subscription) nextNamed(first bool) (r Response, ok bool, err error) {
	st := s.hub.store
	changes, now, complete := st.Since(s.key, s.cursor)
	for i := range changes {
		if _, asked := s.names[changes[i].Name]; asked {
			s.names[changes[i].Name] = true
		}
	}
	for _, name := range slices.Sorted(maps.Keys(s.names)) {
		if complete && !s.names[name] {
			continue
		}
		s.names[name] = false
		have, known := s.options.Versions[name]
		delete(s.options.Versions, name)
		res, there := st.Get(s.key, name)
		if !there {
			r.Removed = append(r.Removed, name)
			continue
		}
		if enc := res.Encode(s.options.Form); !known || have != enc.Version {
			r.add(s.options.Framing, name, enc)
		}
	}
	s.cursor, s.begun = now, true
	r.Version, r.Revision = strconv.FormatUint(uint64(now), 10), now
	return r, first || r.Resources > 0 || len(r.Removed) > 0, nil
}

func (r *Response) add(f Framing, name string, enc *resource.Encoding) {
	frame := f.appendFrame(make([]byte, 0, maxFrame+len(name)), name, enc)
	r.Segments = append(r.Segments, frame)
	r.Segments = append(r.Segments, enc.Segments...)
	r.Size += len(frame) + enc.Size
	r.Resources++
}

// Ack says that the sink took the response of that nonce. It reports whether that response was under way; a stale nonce
// changes nothing.
func (s *Subscription) Ack(nonce string) bool {
	if !s.settle(nonce) {
		return false
	}
	s.status.AckedVersion, s.status.AckedRevision = s.status.SentVersion, s.status.SentRevision
	return true
}

// Nack says that the sink refused the response of that nonce, and why. It is not sent again: the next one goes out when
// something changes.
func (s *Subscription) Nack(nonce, detail string) bool {
	if !s.settle(nonce) {
		return false
	}
	s.status.Nacks++
	s.status.LastNack = detail
	return true
}

func (s *Subscription) settle(nonce string) bool {
	if s.state != Sent || nonce != strconv.FormatUint(s.nonce, 10) {
		return false
	}
	s.state = Current
	return true
}

// State returns where the subscription stands.
func (s *Subscription) State() State { return s.state }

// Status returns the subscription as people want to see it.
func (s *Subscription) Status() Status {
	st := s.status
	st.State = s.state.String()
	return st
}
