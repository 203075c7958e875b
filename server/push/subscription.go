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

// MaxDelta is the size up to which an incremental response is filled, names of
// removed resources included, in bytes; the rest is left for the next one. It
// keeps below 4 MiB, the largest message that a gRPC client accepts by default,
// unless a single resource is larger.
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

	removedSize int // of Removed in a message, in bytes, or a little more
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

	// state of the world only
	again bool // the next response goes out even if nothing changed

	// incremental only
	cursor   store.Revision      // everything up to here was sent
	begun    bool                // cursor means something
	initial  store.Revision      // while a listing is being sent: its revision; 0 afterwards
	before   *position           // what the sink followed before a new listing began; nil if there is none to begin
	wildcard bool                // all names
	names    map[string]struct{} // the names asked for
	pending  map[string]struct{} // the names to answer although they may not have changed

	status Status
}

// position is a place in one of the store's collections.
type position struct {
	key    string
	cursor store.Revision
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

// Reform changes the form. If anything was sent in the old one, everything is sent again in the new one, and what the sink has of the old
// one only is removed.
func (s *Subscription) Reform(f resource.Form) {
	if f == s.options.Form {
		return
	}
	s.restart()
	s.options.Form, s.key = f, resource.Key(s.options.Collection, f.Shape)
	s.Close()
	s.again = true
	for name := range s.names {
		s.ask(name)
	}
}

// Again makes a subscription that is not incremental answer although nothing changed.
func (s *Subscription) Again() { s.again = true }

// restart makes the next response begin a listing.
func (s *Subscription) restart() {
	if s.begun && s.before == nil {
		s.before = &position{s.key, s.cursor}
	}
	s.begun = false
}

// Narrow makes an incremental subscription one to names that are added by [Subscription.Add].
func (s *Subscription) Narrow() { s.wildcard = false }

// Widen makes an incremental subscription one to all names. If it was narrow, everything is sent again.
func (s *Subscription) Widen() {
	if !s.wildcard {
		s.wildcard = true
		s.restart()
	}
}

// Add subscribes to names; each is answered, with the resource or as removed, even if it was subscribed to before (xDS
// protocol, "Subscribing to Resources").
func (s *Subscription) Add(names ...string) {
	if s.names == nil {
		s.names = make(map[string]struct{})
	}
	for _, n := range names {
		s.names[n] = struct{}{}
		s.ask(n)
	}
}

// Drop unsubscribes from names. In a subscription to all names a dropped one is answered once more, since the sink has
// forgotten it (xDS protocol, "Unsubscribing From Resources").
func (s *Subscription) Drop(names ...string) {
	for _, n := range names {
		_, had := s.names[n]
		delete(s.names, n)
		delete(s.pending, n)
		if had && s.wildcard {
			s.ask(n)
		}
	}
}

// Names returns the number of names that were added and not dropped.
func (s *Subscription) Names() int { return len(s.names) }

func (s *Subscription) ask(name string) {
	if s.pending == nil {
		s.pending = make(map[string]struct{})
	}
	s.pending[name] = struct{}{}
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
	if s.state != Held && !s.again && all.Version == s.version {
		return r, false
	}
	s.again = false
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
		if err := s.holdBefore(changes); err != nil {
			return r, false, err
		}
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
		have, held := s.options.Versions[c.Name]
		var done bool
		switch {
		case c.Removed:
			// During a listing the sink knows the name only if it said so, or
			// if an earlier part had it.
			done = s.initial != 0 && !held && c.Revision <= s.initial || r.remove(c.Name)
		default:
			enc := c.Value.Encode(s.options.Form)
			done = held && have == enc.Version || r.add(s.options.Framing, c.Name, enc)
		}
		if !done {
			s.cursor = changes[i-1].Revision
			break
		}
		delete(s.pending, c.Name)
		delete(s.options.Versions, c.Name)
	}
	if s.initial != 0 && s.cursor == now {
		// What the sink holds and nothing up to now had is gone.
		for name := range s.options.Versions {
			if !r.remove(name) {
				break
			}
			delete(s.pending, name)
			delete(s.options.Versions, name)
		}
		if len(s.options.Versions) == 0 {
			s.options.Versions, s.initial = nil, 0
		}
	}
	s.answer(&r)
	slices.Sort(r.Removed)
	r.Version, r.Revision = strconv.FormatUint(uint64(s.cursor), 10), s.cursor
	return r, first || r.Resources > 0 || len(r.Removed) > 0, nil
}

// holdBefore adds the names that the sink may hold from what it followed
// before, and that a new listing does not have, to those that it said it holds.
func (s *Subscription) holdBefore(listing []store.Change[*resource.Resource]) error {
	if s.before == nil {
		return nil
	}
	st := s.hub.store
	changes, _, complete := st.Since(s.before.key, s.before.cursor)
	if !complete {
		return ErrFellBehind
	}
	names := make(map[string]struct{})
	for i := range changes {
		if changes[i].Removed {
			names[changes[i].Name] = struct{}{}
		}
	}
	if s.before.key != s.key {
		all, _ := st.All(s.before.key)
		for c := range all {
			names[c.Name] = struct{}{}
		}
	}
	for i := range listing {
		delete(names, listing[i].Name)
	}
	if s.options.Versions == nil && len(names) > 0 {
		s.options.Versions = make(map[string]string, len(names))
	}
	for name := range names {
		s.options.Versions[name] = "" // no version of anything
	}
	s.before = nil
	return nil
}

// nextNamed is nextDelta for a subscription to some names.
func (s *Subscription) nextNamed(first bool) (r Response, ok bool, err error) {
	changes, now, complete := s.hub.store.Since(s.key, s.cursor)
	for i := range changes {
		if _, asked := s.names[changes[i].Name]; asked {
			s.ask(changes[i].Name)
		}
	}
	if !complete {
		for name := range s.names {
			s.ask(name)
		}
	}
	s.cursor, s.begun, s.initial, s.before = now, true, 0, nil
	s.answer(&r)
	r.Version, r.Revision = strconv.FormatUint(uint64(now), 10), now
	return r, first || r.Resources > 0 || len(r.Removed) > 0, nil
}

// answer adds what is pending to a response, as far as there is room.
func (s *Subscription) answer(r *Response) {
	if len(s.pending) == 0 {
		return
	}
	for _, name := range slices.Sorted(maps.Keys(s.pending)) {
		have, held := s.options.Versions[name]
		var done bool
		if res, there := s.hub.store.Get(s.key, name); there {
			enc := res.Encode(s.options.Form)
			done = held && have == enc.Version || r.add(s.options.Framing, name, enc)
		} else {
			done = r.remove(name)
		}
		if !done {
			return
		}
		delete(s.pending, name)
		delete(s.options.Versions, name)
	}
}

// add adds a resource if there is room. There is room for anything in an empty
// response.
func (r *Response) add(f Framing, name string, enc *resource.Encoding) bool {
	frame := f.appendFrame(make([]byte, 0, maxFrame+len(name)), name, enc)
	if !r.fits(len(frame) + enc.Size) {
		return false
	}
	r.Segments = append(r.Segments, frame)
	r.Segments = append(r.Segments, enc.Segments...)
	r.Size += len(frame) + enc.Size
	r.Resources++
	return true
}

// remove adds the name of a removed resource if there is room.
func (r *Response) remove(name string) bool {
	size := len(name) + 4
	if !r.fits(size) {
		return false
	}
	r.Removed = append(r.Removed, name)
	r.removedSize += size
	return true
}

func (r *Response) fits(size int) bool {
	return r.Resources == 0 && len(r.Removed) == 0 || r.Size+r.removedSize+size <= MaxDelta
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
