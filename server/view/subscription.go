package view

import (
	"errors"
	"maps"
	"slices"
	"strconv"
	"time"

	"github.com/isthmus-mesh/isthmus/server/encode"
	"github.com/isthmus-mesh/isthmus/server/state"
)

// Sizes of responses, in bytes.
const (
	// MaxMessage is the largest message that a gRPC client accepts by default.
	MaxMessage = 4 << 20
	// MaxDelta is the size up to which changes go into one response, the names
	// of what is gone included. It keeps below [MaxMessage], unless a single
	// resource is larger.
	MaxDelta = 3 << 20
)

// Errors that end a stream.
var (
	// ErrFellBehind says that a sink was so slow that removals which it has not
	// seen are no longer known. It comes back with the versions that it holds
	// and gets exactly what it lacks.
	ErrFellBehind = errors.New("the sink fell so far behind that removals it missed are no longer known; it has to reconnect with initial_resource_versions")
	// ErrResume says that all of a collection has to be sent to a sink that
	// could do with parts if it asked anew, and would be more than [MaxMessage].
	ErrResume = errors.New("all of the collection is more than 4 MiB; the sink has to reconnect with the versions that it holds, to get the rest in parts")
)

// Interval returns the least time between the beginnings of two responses of
// everything of a size to one sink: 100 ms per MB, nothing below 100 kB. istiod
// needs about 30 ms of a core per MB, so that it spends at most a third of one
// on a registry that never rests.
func Interval(size int) time.Duration {
	if size < 100_000 {
		return 0
	}
	return time.Duration(size) * 100 * time.Millisecond / 1_000_000
}

// State says where a subscription stands.
type State uint8

const (
	// Held means that the collection's registries have not completed a first
	// listing; nothing was sent.
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
	Form encode.Form
	// Framing is the protocol.
	Framing Framing
	// Incremental says whether the first request of an MCP sink permits changes.
	Incremental bool
	// Versions is what the sink says that it holds, by resource name (xDS and
	// MCP initial_resource_versions). The subscription keeps and empties it.
	Versions map[string]string
	// ReplaceOnRemoval makes every response that would remove something all of
	// the collection instead, for MCP sinks that do not act on removals.
	ReplaceOnRemoval bool
	// Wake is called when a name that was asked for changed, if it is set. It
	// must not block.
	Wake func()
}

// Response is what to send next.
type Response struct {
	// Nonce names the response; the sink repeats it in its ACK or NACK.
	Nonce string
	// Version is a hash of what the sink then holds, if the response is
	// everything, and otherwise the state's revision.
	Version string
	// Full says that the response replaces what the sink has.
	Full bool
	// Segments are the encoded resources, framed, to be sent behind the header
	// that the protocol puts in front.
	Segments [][]byte
	// Removed are the names of resources that are gone.
	Removed []string
	// Resources is the number of resources in Segments.
	Resources int
	// Size is the length of Segments, in bytes.
	Size int
	// Revision is that of the state which the response reflects.
	Revision state.Revision

	removedSize int
}

// Status is a subscription as people want to see it.
type Status struct {
	Collection    string         `json:"collection"`
	State         string         `json:"state"`
	Sent          uint64         `json:"sent"`           // responses
	SentVersion   string         `json:"sent_version"`   // of the newest response
	SentRevision  state.Revision `json:"sent_revision"`  // the same
	AckedVersion  string         `json:"acked_version"`  // of the newest response that was ACKed
	AckedRevision state.Revision `json:"acked_revision"` // the same
	Nacks         uint64         `json:"nacks"`
	LastNack      string         `json:"last_nack,omitempty"` // what the sink said
	Resources     int            `json:"resources"`           // in the newest response
	Bytes         int            `json:"bytes"`               // of the newest response
}

// Subscription is one sink's interest in one collection. It belongs to one
// goroutine.
//
// What a response is depends on the framing. [XDS] is always everything, and
// [DeltaXDS] always changes. With [MCP] each answer of the sink permits changes
// or does not:
//
//   - The first response is everything, unless the sink said which versions it
//     holds and permits changes: then it is exactly what the sink lacks.
//   - What is larger than [MaxDelta] goes to a sink that permits changes in
//     several responses, the first of which replaces what the sink has.
//   - After a NACK, which carries no permission, and for a sink that fell
//     behind, a response is everything again.
type Subscription struct {
	view    *View
	options Options
	kind    state.Kind
	layout  *encode.Layout
	pages   *pages // set by the first response of everything

	state State
	nonce uint64
	full  string // version of the newest response, if it was everything; "" otherwise
	again bool   // the next response of everything goes out even if nothing changed

	permitted bool // MCP: the next response may be changes
	capable   bool // MCP: the sink permitted that once
	refused   bool // the newest answer was a NACK

	cursor  state.Cursor
	begun   bool // something was sent since the cursor was at the beginning
	listing bool // everything is being sent in parts
	before  *position

	narrow  bool                // only names that are asked for
	names   map[string]struct{} // the names asked for
	pending map[string]struct{} // the names to answer although they may not have changed
	marked  map[string]struct{} // the names asked for that changed; guarded by View.mu

	status Status
}

// position is what a sink followed before a new listing began.
type position struct {
	kind   state.Kind
	cursor state.Cursor
}

// NewSubscription returns a subscription to which nothing was sent yet. It is
// to all names until [Subscription.Narrow].
func NewSubscription(v *View, o Options) *Subscription {
	s := &Subscription{view: v, options: o, permitted: o.Incremental, capable: o.Incremental}
	s.setForm(o.Form)
	s.status.Collection = o.Collection
	return s
}

func (s *Subscription) setForm(f encode.Form) {
	s.options.Form, s.layout = f, encode.NewLayout(f)
	s.kind = state.Kind{Collection: s.options.Collection, Shape: f.Shape}
}

// Close releases what the subscription shares with others.
func (s *Subscription) Close() {
	if s.pages != nil {
		s.view.release(s.pages)
		s.pages = nil
	}
	if s.narrow {
		s.view.leave(s)
	}
}

// SetForm resends the collection; resources that exist only in the old form are
// removed.
func (s *Subscription) SetForm(f encode.Form) {
	if f == s.options.Form {
		return
	}
	s.restart()
	s.Close()
	s.setForm(f)
	s.again = true
	for name := range s.names {
		s.ask(name)
	}
	if s.narrow {
		s.follow()
	}
}

// Again makes the next response everything, although nothing may have changed.
func (s *Subscription) Again() { s.again = true }

// restart makes the next changes begin a listing.
func (s *Subscription) restart() {
	if s.begun && s.before == nil {
		s.before = &position{s.kind, s.cursor}
	}
	s.begun = false
}

// Narrow makes a subscription one to the names that are added.
func (s *Subscription) Narrow() {
	if !s.narrow {
		s.narrow = true
		s.follow()
		if s.begun {
			s.catchUp()
		}
	}
}

// catchUp asks for the names that changed since the newest response.
func (s *Subscription) catchUp() {
	at := s.cursor
	for c := range s.view.db.Changes(s.kind, &at) {
		if _, asked := s.names[c.Name]; asked {
			s.ask(c.Name)
		}
	}
	if at.Lost {
		for name := range s.names {
			s.ask(name)
		}
	}
}

// follow enters the names into the view.
func (s *Subscription) follow() { s.view.ask(s, slices.Collect(maps.Keys(s.names))...) }

// Widen makes a subscription one to all names. If it was narrow, everything is
// sent again.
func (s *Subscription) Widen() {
	if s.narrow {
		s.view.leave(s)
		s.narrow = false
		s.restart()
	}
}

// Add subscribes to names; each is answered, with the resource or as removed,
// even if it was subscribed to before (xDS protocol, "Subscribing to
// Resources").
func (s *Subscription) Add(names ...string) {
	if s.names == nil {
		s.names = make(map[string]struct{})
	}
	for _, n := range names {
		s.names[n] = struct{}{}
		s.ask(n)
	}
	if s.narrow {
		s.view.ask(s, names...)
	}
}

// Drop unsubscribes from names. In a subscription to all names a dropped one is
// answered once more, since the sink has forgotten it (xDS protocol,
// "Unsubscribing From Resources").
func (s *Subscription) Drop(names ...string) {
	if s.narrow {
		s.view.drop(s, names...)
	}
	for _, n := range names {
		_, had := s.names[n]
		delete(s.names, n)
		delete(s.pending, n)
		if had && !s.narrow {
			s.ask(n)
		}
	}
}

// Names returns the number of names that were added and not dropped.
func (s *Subscription) Names() int { return len(s.names) }

// Narrowed reports whether only changes of names that were added matter.
func (s *Subscription) Narrowed() bool { return s.narrow && s.state != Held }

func (s *Subscription) ask(name string) {
	if s.pending == nil {
		s.pending = make(map[string]struct{})
	}
	s.pending[name] = struct{}{}
}

// Next returns what the sink lacks, if there is anything and no response is
// under way. The error is [ErrFellBehind], [ErrResume] or nil.
func (s *Subscription) Next() (r Response, ok bool, err error) {
	if s.state == Sent || s.state == Held && !s.view.db.Initialized(s.options.Collection) {
		return r, false, nil
	}
	if r, ok, err = s.next(); !ok || err != nil {
		return r, false, err
	}
	s.nonce++
	r.Nonce = strconv.FormatUint(s.nonce, 10)
	s.state = Sent
	s.status.Sent++
	s.status.SentVersion, s.status.SentRevision = r.Version, r.Revision
	s.status.Resources, s.status.Bytes = r.Resources, r.Size
	return r, true, nil
}

func (s *Subscription) next() (r Response, ok bool, err error) {
	switch {
	case s.options.Framing == XDS, s.options.Framing == MCP && !s.Incremental():
		return s.everything()
	case s.narrow:
		return s.named()
	}
	r, ok, err = s.changes()
	if s.options.Framing == DeltaXDS || err == nil && (len(r.Removed) == 0 || !s.options.ReplaceOnRemoval) {
		return r, ok, err
	}
	s.again = true // changes has moved the cursor
	return s.everything()
}

// everything returns a response of everything, if there is news.
func (s *Subscription) everything() (r Response, ok bool, err error) {
	if s.pages == nil {
		s.pages = s.view.acquire(pagesKey{s.options.Collection, s.options.Form, s.options.Framing})
	}
	all := s.pages.current(s.view.db)
	if s.state != Held && !s.again {
		unchanged := s.full == all.Version
		if s.full == "" { // the newest response was changes
			at, n := s.cursor, 0
			for range s.view.db.Changes(s.kind, &at) {
				n++
				break
			}
			unchanged = n == 0 && !at.Lost
		}
		if unchanged {
			return r, false, nil
		}
	}
	if s.options.Framing == MCP && s.state != Held && s.capable && !s.options.ReplaceOnRemoval && all.Size > MaxMessage {
		return r, false, ErrResume
	}
	s.options.Versions, s.listing = nil, false
	s.begun, s.again, s.full = true, false, all.Version
	s.cursor = state.At(all.Revision)
	return Response{Version: all.Version, Full: true, Segments: all.Segments, Resources: all.Resources, Size: all.Size, Revision: all.Revision}, true, nil
}

// changes returns what changed since the cursor, or the next part of a listing.
func (s *Subscription) changes() (r Response, ok bool, err error) {
	first := s.state == Held
	if !s.begun {
		if err := s.holdBefore(); err != nil {
			return r, false, err
		}
		s.cursor, s.begun, s.listing = state.Cursor{}, true, true
		r.Full = s.options.Framing == MCP && len(s.options.Versions) == 0
	}
	whole, last := true, s.cursor.Revision
	for c := range s.view.db.Changes(s.kind, &s.cursor) {
		if !s.change(&r, &c) {
			s.cursor.Revision, whole = last, false
			break
		}
		last = c.Revision
		delete(s.pending, c.Name)
	}
	if s.cursor.Lost {
		return r, false, ErrFellBehind
	}
	if s.listing && whole && s.forget(&r) {
		s.listing = false
	}
	slices.Sort(r.Removed)
	r.Removed = slices.Compact(r.Removed)
	s.answer(&r)
	r.Version, r.Revision = strconv.FormatUint(uint64(s.cursor.Revision), 10), s.cursor.Revision
	if ok = first || r.Resources > 0 || len(r.Removed) > 0; ok {
		s.full = ""
	}
	return r, ok, nil
}

// change adds a change to a response. It reports false if there is no room.
func (s *Subscription) change(r *Response, c *state.Change) bool {
	var e state.Encoding
	if !c.Removed {
		e = c.Record.Encode(s.layout)
	}
	have, held := s.options.Versions[c.Name]
	if c.Removed || e.Absent {
		// During a listing the sink knows the name only if it said so, or if
		// an earlier part had it.
		if s.listing && !held && c.Revision <= s.cursor.Begun {
			return true
		}
		if !r.remove(c.Name) {
			return false
		}
	} else if !held || !e.Version.Is(have) {
		if !r.add(s.options.Framing, c.Name, &e) {
			return false
		}
	}
	delete(s.options.Versions, c.Name)
	return true
}

// forget removes what the sink said that it holds and a listing did not have.
// It reports whether there was room for all of it.
func (s *Subscription) forget(r *Response) bool {
	for _, name := range slices.Sorted(maps.Keys(s.options.Versions)) {
		if !r.remove(name) {
			return false
		}
		delete(s.options.Versions, name)
	}
	s.options.Versions = nil
	return true
}

// holdBefore adds to what the sink holds, in a version that is never the right
// one, what it may have from what it followed before.
func (s *Subscription) holdBefore() error {
	if s.before == nil {
		return nil
	}
	if s.options.Versions == nil {
		s.options.Versions = make(map[string]string)
	}
	for c := range s.view.db.Changes(s.before.kind, &s.before.cursor) {
		s.options.Versions[c.Name] = ""
	}
	if s.before.cursor.Lost {
		return ErrFellBehind
	}
	for c := range s.view.db.Changes(s.before.kind, new(state.Cursor)) {
		s.options.Versions[c.Name] = ""
	}
	s.before = nil
	return nil
}

// named is changes for a subscription to some names.
func (s *Subscription) named() (r Response, ok bool, err error) {
	first := s.state == Held
	marked, at := s.view.changes(s)
	for name := range marked {
		if _, asked := s.names[name]; asked {
			s.ask(name)
		}
	}
	s.cursor, s.begun, s.listing, s.before = state.At(at), true, false, nil
	s.answer(&r)
	r.Version, r.Revision = strconv.FormatUint(uint64(at), 10), at
	return r, first || r.Resources > 0 || len(r.Removed) > 0, nil
}

// answer adds what is pending to a response, as far as there is room.
func (s *Subscription) answer(r *Response) {
	if len(s.pending) == 0 {
		return
	}
	removed := r.Removed // sorted
	for _, name := range slices.Sorted(maps.Keys(s.pending)) {
		have, held := s.options.Versions[name]
		if record, there := s.view.db.Get(s.kind, name); !there {
			if _, done := slices.BinarySearch(removed, name); !done && !r.remove(name) {
				return
			}
		} else if e := record.Encode(s.layout); !held || !e.Version.Is(have) {
			if !r.add(s.options.Framing, name, &e) {
				return
			}
		}
		delete(s.options.Versions, name)
		delete(s.pending, name)
	}
}

// fits reports whether so many bytes more may go into the response. One
// resource may, however large.
func (r *Response) fits(size int) bool {
	return r.Resources+len(r.Removed) == 0 || r.Size+r.removedSize+size <= MaxDelta
}

func (r *Response) add(f Framing, name string, e *state.Encoding) bool {
	if !r.fits(maxFrame + len(name) + e.Size) {
		return false
	}
	if e.Size <= PageSize {
		b := e.Append(f.append(make([]byte, 0, maxFrame+len(name)+e.Size), name, e))
		r.Segments = append(r.Segments, b)
		r.Size += len(b)
	} else {
		segments := e.Segments(f.append(make([]byte, 0, maxFrame+len(name)+e.HeadSize()), name, e))
		for _, b := range segments {
			r.Size += len(b)
		}
		r.Segments = append(r.Segments, segments...)
	}
	r.Resources++
	return true
}

func (r *Response) remove(name string) bool {
	if !r.fits(sizeRemoved(name)) {
		return false
	}
	r.Removed = append(r.Removed, name)
	r.removedSize += sizeRemoved(name)
	return true
}

// Ack says that the sink took the response of that nonce, and whether the next
// one of an MCP sink may be changes. It reports whether that response was under
// way; a stale nonce changes nothing.
func (s *Subscription) Ack(nonce string, incremental bool) bool {
	if !s.answered(nonce) {
		return false
	}
	s.permitted, s.refused = incremental, false
	s.capable = s.capable || incremental
	s.status.AckedVersion, s.status.AckedRevision = s.status.SentVersion, s.status.SentRevision
	return true
}

// Nack says that the sink refused the response of that nonce, and why. It is
// not sent again: the next one goes out when something changes, or after
// [Subscription.Again].
func (s *Subscription) Nack(nonce, detail string) bool {
	if !s.answered(nonce) {
		return false
	}
	s.permitted, s.refused = false, true
	s.status.Nacks++
	s.status.LastNack = detail
	return true
}

func (s *Subscription) answered(nonce string) bool {
	if s.state != Sent || nonce != strconv.FormatUint(s.nonce, 10) {
		return false
	}
	s.state = Current
	return true
}

// State returns where the subscription stands.
func (s *Subscription) State() State { return s.state }

// Complete reports whether the sink has acknowledged all that there was when
// the newest response was made.
func (s *Subscription) Complete() bool { return s.state == Current && !s.listing && !s.refused }

// Incremental reports whether the next response may be changes.
func (s *Subscription) Incremental() bool {
	return s.options.Framing == DeltaXDS || s.permitted && !s.again
}

// Refused reports whether the sink's newest answer was a NACK.
func (s *Subscription) Refused() bool { return s.refused }

// Status returns the subscription as people want to see it.
func (s *Subscription) Status() Status {
	st := s.status
	st.State = s.state.String()
	return st
}
