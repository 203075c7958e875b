package view

import (
	"errors"
	"maps"
	"runtime"
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
	// MaxDelta is the size above which changes are split into several
	// responses, removed names included. A response stays below [MaxMessage]
	// unless a single resource is larger.
	MaxDelta = 3 << 20
	// answerAtOnce is the number of unchanged names that one response answers.
	// A sink may request a million.
	answerAtOnce = 100_000
)

// Errors that end a stream.
var (
	// ErrFellBehind means that the state no longer remembers removals which the
	// sink has not seen. The sink has to reconnect with the versions that it
	// holds, and receives exactly what it lacks.
	ErrFellBehind = errors.New("the sink fell so far behind that removals it missed are no longer known; it has to reconnect with initial_resource_versions")
	// ErrResume means that a full response above [MaxMessage] is due to a sink
	// that could receive parts if it requested the collection anew.
	ErrResume = errors.New("all of the collection is more than 4 MiB; the sink has to reconnect with the versions that it holds, to get the rest in parts")
)

// Interval returns the time for which a full response of a size occupies a
// sink, 100 ms per MB, none below 100 kB; package stream paces responses by it.
// istiod needs about 30 ms of CPU per MB.
func Interval(size int) time.Duration {
	if size < 100_000 {
		return 0
	}
	return time.Duration(size) * 100 * time.Millisecond / 1_000_000
}

// State is the state of a subscription.
type State uint8

const (
	// Waiting means that registries of the collection have not completed a
	// first listing; nothing was sent.
	Waiting State = iota
	// Current means that the sink has everything.
	Current
	// Sent means that a response is in flight: neither ACK nor NACK has
	// arrived.
	Sent
)

// String returns the state's name in lower case.
func (s State) String() string {
	switch s {
	case Waiting:
		return "waiting"
	case Sent:
		return "sent"
	default:
		return "current"
	}
}

// Options are the options of a subscription.
type Options struct {
	// Collection is a collection as in package collection. It need not exist.
	Collection string
	// Form is the encoding of resources for the sink's profile.
	Form encode.Form
	// Framing is the framing of the protocol.
	Framing Framing
	// Incremental is set if the first request of an MCP sink permits
	// incremental responses.
	Incremental bool
	// Versions holds the versions that the sink holds, by resource name (xDS
	// and MCP initial_resource_versions). The subscription owns and empties the
	// map.
	Versions map[string]string
	// Prefix begins every nonce.
	Prefix string
	// Wake, if set, is called when a requested name has changed. It must not
	// block.
	Wake func()
}

// Response is the next response to a sink.
type Response struct {
	// Nonce identifies the response; the sink repeats it in its ACK or NACK.
	Nonce string
	// Version is a hash of all names and versions in a full response, and the
	// revision of the state in any other.
	Version string
	// Full is set if the response replaces what the sink holds.
	Full bool
	// Segments are the encoded, framed resources. The protocol adds a header.
	Segments [][]byte
	// Removed are the names of removed resources.
	Removed []string
	// Resources is the number of resources in Segments.
	Resources int
	// Size is the length of Segments, in bytes.
	Size int
	// Revision is the revision of the state that the response reflects.
	Revision state.Revision

	removedSize int
	open        bool // the last segment has room that is its own
}

// Status is the status of a subscription for pages and the API.
type Status struct {
	Collection    string         `json:"collection"`
	State         string         `json:"state"`
	Sent          uint64         `json:"sent"`           // number of responses
	SentVersion   string         `json:"sent_version"`   // of the newest response
	SentRevision  state.Revision `json:"sent_revision"`  // the same
	AckedVersion  string         `json:"acked_version"`  // of the newest acknowledged response
	AckedRevision state.Revision `json:"acked_revision"` // the same
	Nacks         uint64         `json:"nacks"`
	LastNack      string         `json:"last_nack,omitempty"` // the sink's reason
	Resources     int            `json:"resources"`           // in the newest response
	Bytes         int            `json:"bytes"`               // of the newest response
	// Held is the number of resources that the sink has acknowledged and holds.
	// It is 0 for a sink that asks for resources by name.
	Held int `json:"held"`
	// Names is the number of names that the sink asks for, 0 if it asks for
	// everything.
	Names int `json:"names,omitempty"`
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
	pages   *pages // set by the first full response

	state State
	nonce string // of the newest response; "" before the first
	full  string // version of the newest response, if it was everything; "" otherwise
	again bool   // send a full response even without changes

	permitted bool // MCP: the next response may be incremental
	capable   bool // MCP: the sink permitted an incremental response before
	refused   bool // the newest answer was a NACK

	cursor  state.Cursor
	begun   bool // something was sent since the cursor was reset
	listing bool // a full listing is being sent in parts
	before  *position

	narrow  bool                // only requested names
	names   map[string]struct{} // requested names
	pending map[string]struct{} // names to answer although they may not have changed
	marked  map[string]struct{} // requested names that changed; guarded by View.mu

	nameBytes, versionBytes int // what names, pending and marked take, and Options.Versions

	status Status
	held   int // Status.Held once the newest response is acknowledged
}

// What a name costs besides its length, in bytes: one that is requested, with
// its place among those that are followed, one that is to be answered, and one
// with a version.
const requestedCost, pendingCost, versionCost = 150, 50, 100

// Retained returns how many bytes are kept of what the sink has sent.
func (s *Subscription) Retained() int { return s.nameBytes + s.versionBytes }

// Room returns about how large the next response may be, in bytes, 0 if there
// is none, and whether it is of pages that sinks share.
func (s *Subscription) Room() (size int, shared bool) {
	const change = 512 // most instances
	switch {
	case s.state == Sent:
		return 0, false
	case s.options.Framing == XDS, s.options.Framing == MCP && !s.Incremental():
		return 1, true
	case s.narrow:
		return min(MaxDelta, change*(1+len(s.pending))), false
	case !s.begun || s.listing:
		return MaxDelta, false
	}
	return min(MaxDelta, change*(1+len(s.pending)+int(min(s.view.data.Revision()-s.cursor.Revision, MaxDelta)))), false
}

// position is what a sink followed before its listing was restarted.
type position struct {
	data   data
	kind   state.Kind
	cursor state.Cursor
	// layout is that of everything before the cursor, nil if the sink may lack
	// some of it. A response that is in flight may still be refused.
	layout *encode.Layout
}

// NewSubscription returns a subscription to all names to which nothing was sent
// yet. [Subscription.Narrow] restricts it.
func NewSubscription(v *View, o Options) *Subscription {
	s := &Subscription{view: v, options: o, permitted: o.Incremental, capable: o.Incremental}
	for name, version := range o.Versions {
		s.versionBytes += versionCost + len(name) + len(version)
	}
	s.setForm(o.Form)
	s.status.Collection = o.Collection
	return s
}

// SetCollection changes the collection, before the first response.
func (s *Subscription) SetCollection(collection string) {
	s.options.Collection, s.status.Collection = collection, collection
	s.setForm(s.options.Form)
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
	s.again = s.again || s.begun
	s.restart()
	s.Close()
	s.setForm(f)
	for name := range s.names {
		s.ask(name)
	}
	if s.narrow {
		s.follow()
	}
}

// SetView continues the subscription with another view. The collection is
// resent; what the new view does not have is removed.
func (s *Subscription) SetView(v *View) {
	if v == s.view {
		return
	}
	known := s.before == nil && !s.narrow && !s.listing && !s.refused
	s.again = s.again || s.begun
	s.restart()
	if known && s.before != nil {
		s.before.layout = s.layout
	}
	s.Close()
	s.view = v
	s.status.SentRevision, s.status.AckedRevision = 0, 0 // revisions of the new view are others
	for name := range s.names {
		s.ask(name)
	}
	if s.narrow {
		s.follow()
	}
}

// Partial reports whether the view is a part of the state, which has revisions
// of its own.
func (s *Subscription) Partial() bool { return s.view.part != nil }

// concerns reports whether a change is one for the sink: that a name is another
// registry's concerns those only that are told the registry.
func (s *Subscription) concerns(c *state.Change) bool { return !c.Handed || s.layout.Registry }

// Again makes the next response a full one, even without changes.
func (s *Subscription) Again() { s.again = true }

// restart restarts the listing with the next response.
func (s *Subscription) restart() {
	if s.begun && s.before == nil {
		s.before = &position{data: s.view.data, kind: s.kind, cursor: s.cursor}
	}
	s.begun = false
}

// Narrow restricts the subscription to names that are added.
func (s *Subscription) Narrow() {
	if !s.narrow {
		s.narrow = true
		s.follow()
		if s.begun {
			s.catchUp()
		}
	}
}

// catchUp fetches the names that changed since the newest response.
func (s *Subscription) catchUp() {
	at := s.cursor
	for c := range s.view.data.Changes(s.kind, &at) {
		if _, asked := s.names[c.Name]; asked && s.concerns(&c) {
			s.ask(c.Name)
		}
	}
	if at.Lost {
		for name := range s.names {
			s.ask(name)
		}
	}
}

// follow registers the names with the view.
func (s *Subscription) follow() { s.view.ask(s, slices.Collect(maps.Keys(s.names))) }

// Widen extends the subscription to all names. A narrow one is resent as a
// whole.
func (s *Subscription) Widen() {
	if s.narrow {
		s.view.leave(s)
		s.narrow = false
		s.restart()
	}
}

// Add subscribes to names. Each is answered, with the resource or as removed,
// even if it was subscribed to before (xDS protocol, "Subscribing to
// Resources").
func (s *Subscription) Add(names ...string) {
	if s.names == nil {
		s.names = make(map[string]struct{})
	}
	for i, n := range names {
		if i%askAtOnce == askAtOnce-1 {
			runtime.Gosched() // others wait for the processor no longer than for View.mu
		}
		if _, had := s.names[n]; !had {
			s.names[n] = struct{}{}
			s.nameBytes += requestedCost + len(n)
		}
		s.ask(n)
	}
	if s.narrow {
		s.view.ask(s, names)
	}
}

// Drop unsubscribes from names. In a subscription to all names a dropped name
// is answered once more, as the sink has discarded it (xDS protocol,
// "Unsubscribing From Resources").
func (s *Subscription) Drop(names ...string) {
	if s.narrow {
		s.view.drop(s, names)
	}
	for _, n := range names {
		_, had := s.names[n]
		if had {
			delete(s.names, n)
			s.nameBytes -= requestedCost + len(n)
		}
		s.unask(n)
		if had && !s.narrow {
			s.ask(n)
		}
	}
}

// Names returns the number of requested names.
func (s *Subscription) Names() int { return len(s.names) }

// Narrowed reports whether only changes of requested names matter.
func (s *Subscription) Narrowed() bool { return s.narrow && s.state != Waiting }

func (s *Subscription) ask(name string) {
	if s.pending == nil {
		s.pending = make(map[string]struct{})
	}
	if _, asked := s.pending[name]; !asked {
		s.pending[name] = struct{}{}
		s.nameBytes += pendingCost + len(name)
	}
}

func (s *Subscription) unask(name string) {
	if _, asked := s.pending[name]; asked {
		delete(s.pending, name)
		s.nameBytes -= pendingCost + len(name)
	}
}

// Next returns the next response, if the sink lacks anything and no response is
// in flight. The error is [ErrFellBehind], [ErrResume] or nil.
func (s *Subscription) Next() (r Response, ok bool, err error) {
	if s.state == Sent || s.state == Waiting && !s.view.data.Initialized(s.options.Collection) {
		return r, false, nil
	}
	if r, ok, err = s.next(); !ok || err != nil {
		return r, false, err
	}
	s.status.Sent++
	s.nonce = s.options.Prefix + strconv.FormatUint(s.status.Sent, 10)
	r.Nonce, s.state = s.nonce, Sent
	s.status.SentVersion, s.status.SentRevision = r.Version, r.Revision
	s.status.Resources, s.status.Bytes = r.Resources, r.Size
	switch {
	case s.narrow:
		s.held = 0
	case r.Full && !s.listing:
		s.held = r.Resources
	case s.listing:
		s.held += r.Resources
	default:
		s.held = s.view.data.Len(s.kind)
	}
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
	if s.options.Framing == DeltaXDS || err == nil && (len(r.Removed) == 0 || !s.options.Form.Synthetic) {
		return r, ok, err
	}
	// The sinks of synthetic entries ignore removals.
	s.again = true // changes has moved the cursor
	return s.everything()
}

// everything returns a full response if anything changed.
func (s *Subscription) everything() (r Response, ok bool, err error) {
	if s.pages == nil {
		s.pages = s.view.acquire(pagesKey{s.options.Collection, s.options.Form, s.options.Framing})
	}
	all := s.pages.current(s.view.data)
	if s.state != Waiting && !s.again {
		unchanged := s.full == all.Version
		if s.full == "" { // the newest response was incremental
			at, n := s.cursor, 0
			for c := range s.view.data.Changes(s.kind, &at) {
				if s.concerns(&c) {
					n++
					break
				}
			}
			unchanged = n == 0 && !at.Lost
		}
		if unchanged {
			return r, false, nil
		}
	}
	if s.options.Framing == MCP && s.state != Waiting && s.capable && !s.options.Form.Synthetic && all.Size > MaxMessage {
		return r, false, ErrResume
	}
	s.options.Versions, s.versionBytes, s.listing = nil, 0, false
	s.begun, s.again, s.full = true, false, all.Version
	s.cursor = state.At(all.Revision)
	return Response{Version: all.Version, Full: true, Segments: all.Segments, Resources: all.Resources, Size: all.Size, Revision: all.Revision}, true, nil
}

// changes returns the changes since the cursor, or the next part of a listing.
func (s *Subscription) changes() (r Response, ok bool, err error) {
	waiting := s.state == Waiting
	if !s.begun {
		if err := s.holdBefore(); err != nil {
			return r, false, err
		}
		s.cursor, s.begun, s.listing, s.held = state.Cursor{}, true, true, 0
		r.Full = s.options.Framing == MCP && len(s.options.Versions) == 0
	}
	whole, last := true, s.cursor.Revision
	for c := range s.view.data.Changes(s.kind, &s.cursor) {
		// What changed since the response was begun may be in it already. It is
		// left to the next one: a client may refuse a response that has a name
		// twice.
		if c.Revision > s.cursor.Now && r.Resources+len(r.Removed) > 0 || !s.change(&r, &c) {
			s.cursor.Revision, whole = last, false
			break
		}
		last = c.Revision
		s.unask(c.Name)
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
	if ok = waiting || r.Resources > 0 || len(r.Removed) > 0; ok {
		s.full = ""
	}
	return r, ok, nil
}

// change adds a change to a response. It reports false if the response is full.
func (s *Subscription) change(r *Response, c *state.Change) bool {
	if !s.concerns(c) {
		return true
	}
	var e state.Encoding
	if !c.Removed {
		e = c.Record.Encode(s.layout)
	}
	have, held := s.options.Versions[c.Name]
	if c.Removed || e.Absent {
		// During a listing the sink holds the name only if it reported it or an
		// earlier part contained it.
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

// forget removes the reported names that the listing did not contain. It
// reports whether all of them fit.
func (s *Subscription) forget(r *Response) bool {
	for _, name := range slices.Sorted(maps.Keys(s.options.Versions)) {
		if !r.remove(name) {
			return false
		}
		delete(s.options.Versions, name)
	}
	s.options.Versions, s.versionBytes = nil, 0
	return true
}

// holdBefore adds the names of the previous listing to those that the sink
// holds, with a version that matches nothing unless it is known.
func (s *Subscription) holdBefore() error {
	if s.before == nil {
		return nil
	}
	if s.options.Versions == nil {
		s.options.Versions = make(map[string]string)
	}
	known := s.before.layout == s.layout && !s.refused
	for c := range s.before.data.Changes(s.before.kind, new(state.Cursor)) {
		version := ""
		if known && !c.Removed {
			version = c.Record.Encode(s.layout).Version.String()
		}
		s.options.Versions[c.Name] = version
		s.versionBytes += versionCost // the name is the state's
	}
	// Read last: what changed while the names were read is unknown, too.
	for c := range s.before.data.Changes(s.before.kind, &s.before.cursor) {
		if s.concerns(&c) {
			s.options.Versions[c.Name] = ""
		}
	}
	if s.before.cursor.Lost {
		return ErrFellBehind
	}
	s.before = nil
	return nil
}

// named returns the changes of a subscription to names.
func (s *Subscription) named() (r Response, ok bool, err error) {
	waiting := s.state == Waiting
	marked, at := s.view.changes(s)
	for name := range marked {
		if _, asked := s.names[name]; asked {
			s.ask(name)
		}
	}
	s.cursor, s.begun, s.listing, s.before = state.At(at), true, false, nil
	s.answer(&r)
	r.Version, r.Revision = strconv.FormatUint(uint64(at), 10), at
	return r, waiting || r.Resources > 0 || len(r.Removed) > 0, nil
}

// answer adds pending names to a response while they fit.
func (s *Subscription) answer(r *Response) {
	if len(s.pending) == 0 {
		return
	}
	removed := r.Removed // sorted
	for _, name := range first(s.pending, answerAtOnce) {
		have, held := s.options.Versions[name]
		if record, there := s.view.data.Get(s.kind, name); !there {
			if _, done := slices.BinarySearch(removed, name); !done && !r.remove(name) {
				return
			}
		} else if e := record.Encode(s.layout); !held || !e.Version.Is(have) {
			if !r.add(s.options.Framing, name, &e) {
				return
			}
		}
		delete(s.options.Versions, name)
		s.unask(name)
	}
	if len(s.pending) == 0 {
		s.pending = nil // a map keeps the memory of what was in it
	}
}

// first returns at most so many names of a set, sorted. Which ones is
// unspecified.
func first(set map[string]struct{}, most int) []string {
	names := make([]string, 0, min(len(set), most))
	for name := range set {
		if len(names) == most {
			break
		}
		names = append(names, name)
	}
	slices.Sort(names)
	return names
}

// fits reports whether so many more bytes fit into the response. A single
// resource always fits.
func (r *Response) fits(size int) bool {
	return r.Resources+len(r.Removed) == 0 || r.Size+r.removedSize+size <= MaxDelta
}

func (r *Response) add(f Framing, name string, e *state.Encoding) bool {
	if !r.fits(maxFrame + len(name) + e.Size) {
		return false
	}
	frame := maxFrame + len(name)
	if e.Size <= PageSize {
		last := r.page(frame + e.Size)
		before := len(*last)
		*last = e.Append(f.append(*last, name, e))
		r.Size += len(*last) - before
	} else {
		segments := e.Segments(f.append(make([]byte, 0, frame+e.HeadSize()), name, e))
		for _, b := range segments {
			r.Size += len(b)
		}
		r.Segments, r.open = append(r.Segments, segments...), false
	}
	r.Resources++
	return true
}

// page returns the last segment, with room for so many more bytes. Segments
// grow from one resource to [PageSize]: most responses have one resource, and
// thousands of small segments would take half as much again.
func (r *Response) page(size int) *[]byte {
	next := size
	if n := len(r.Segments) - 1; r.open {
		if last := &r.Segments[n]; cap(*last)-len(*last) >= size {
			return last
		}
		next = max(size, min(2*cap(r.Segments[n]), PageSize))
	}
	r.Segments, r.open = append(r.Segments, make([]byte, 0, next)), true
	return &r.Segments[len(r.Segments)-1]
}

func (r *Response) remove(name string) bool {
	if !r.fits(sizeRemoved(name)) {
		return false
	}
	r.Removed = append(r.Removed, name)
	r.removedSize += sizeRemoved(name)
	return true
}

// Ack handles the ACK of the response with that nonce, and whether the next
// response to an MCP sink may be incremental. It reports whether that response
// was in flight; a stale nonce has no effect.
func (s *Subscription) Ack(nonce string, incremental bool) bool {
	if !s.answered(nonce) {
		return false
	}
	s.permitted, s.refused = incremental, false
	s.capable = s.capable || incremental
	s.status.AckedVersion, s.status.AckedRevision = s.status.SentVersion, s.status.SentRevision
	s.status.Held = s.held
	return true
}

// Nack handles the NACK of the response with that nonce. The response is not
// repeated: the next one is sent when something changes, or after
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
	if s.state != Sent || nonce != s.nonce {
		return false
	}
	s.state = Current
	return true
}

// Nonce returns the nonce of the newest response, "" before the first.
func (s *Subscription) Nonce() string { return s.nonce }

// State returns the state of the subscription.
func (s *Subscription) State() State { return s.state }

// Complete reports whether the sink has acknowledged everything that existed
// when the newest response was made.
func (s *Subscription) Complete() bool { return s.state == Current && !s.listing && !s.refused }

// Incremental reports whether the next response may be incremental.
func (s *Subscription) Incremental() bool {
	return s.options.Framing == DeltaXDS || s.permitted && !s.again
}

// Refused reports whether the sink's newest answer was a NACK.
func (s *Subscription) Refused() bool { return s.refused }

// Status returns the status of the subscription.
func (s *Subscription) Status() Status {
	st := s.status
	st.State = s.state.String()
	if s.narrow {
		st.Names = len(s.names)
	}
	return st
}
