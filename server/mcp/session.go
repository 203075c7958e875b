package mcp

import (
	"cmp"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/isthmus-mesh/isthmus/internal/clip"
	mcpv1 "github.com/isthmus-mesh/isthmus/server/mcp/proto/isthmus/mcp/v1"
	"github.com/isthmus-mesh/isthmus/server/stream"
	"github.com/isthmus-mesh/isthmus/server/view"
	"github.com/isthmus-mesh/isthmus/server/wire"
)

// Timing of the protocol.
const (
	// Settle is the time without a new collection after which the set counts as
	// complete.
	Settle = 100 * time.Millisecond
	// SettleLimit bounds the wait for a complete set.
	SettleLimit = time.Second
	// RetryMin and RetryMax bound the time after which a refused collection is
	// sent again. It doubles with each consecutive NACK.
	RetryMin = time.Second
	RetryMax = time.Minute
)

// maxCollections limits the collections of one stream. Mixer requests the most,
// some 60.
const maxCollections = 1000

// maxKept bounds stored text of a sink, in bytes.
const maxKept = 500

// Values of Status.Waiting other than collections.
const (
	waitingProfile = "profile"
	// WaitingPenalty is that of a sink that disconnected over a response larger
	// than it receives.
	WaitingPenalty = "penalty"
)

// unimplemented is the gRPC code with which sinks refuse an unsupported
// collection.
const unimplemented = 12

// session implements [stream.Session].
type session struct {
	stream.Base // serviceentries first, then in the order of requests

	options   Config
	override  *stream.Profile
	metrics   *metrics
	reverse   bool
	penalties *penalties // nil for none

	// guarded by Mu
	node          string
	first, newest time.Time            // times of the first and the newest collection
	barrier       *stream.Subscription // paused until entries is acknowledged; nil if there is no barrier, or no longer
	entries       *stream.Subscription // serviceentries
	stale         uint64
}

func newSession(v *view.View, o Config, override *stream.Profile, m *metrics, log *slog.Logger) *session {
	s := &session{options: o, override: override, metrics: m, Base: stream.Base{
		Name: "mcp", Metrics: m.Metrics, Wake: stream.NewWaker(), Interval: view.Interval, Log: log,
		View: v, Of: make(map[string]*stream.Subscription), Limit: view.MaxMessage,
	}}
	s.Protocol = s
	return s
}

// Close implements [stream.Session].
func (s *session) Close(now time.Time, err error) {
	s.Mu.Lock()
	for _, u := range s.Subs {
		if s.penalties != nil && u.Size() > view.MaxMessage {
			// The sink disconnected while a response above the default limit
			// was in flight: the response is the likely cause.
			if u.State() == view.Sent {
				s.penalties.add(u.Penalty, now)
			} else {
				s.penalties.clear(u.Penalty)
			}
		}
	}
	s.Mu.Unlock()
	s.Base.Close(now, err)
}

// Take implements [stream.Session]. The error is that of exceeded limits.
func (s *session) Take(r *wire.Request, now time.Time) error {
	req := new(mcpv1.RequestResources)
	if err := r.Decode(req); err != nil {
		// The text of protobuf's error varies between runs and names no field.
		return &stream.Fault{Code: codes.InvalidArgument, Err: errMalformed}
	}
	return s.take(req, now)
}

func (s *session) take(req *mcpv1.RequestResources, now time.Time) error {
	s.Mu.Lock()
	defer s.Mu.Unlock()
	name, nonce := req.GetCollection(), req.GetResponseNonce()
	if name == TriggerCollection || name == "" {
		// The NACK of a trigger; that of Istio 1.1 has no collection. Requests
		// without a collection need no answer.
		return nil
	}
	if id := req.GetSinkNode().GetId(); id != "" && s.node == "" {
		s.node = clip.Text(id, maxKept)
	}
	u := s.Of[name]
	if u == nil || nonce == "" {
		return s.askLocked(u, req, now)
	}
	s.answerLocked(u, req, nonce, now)
	return nil
}

// askLocked handles a collection's initial request, also when it is requested
// anew.
func (s *session) askLocked(u *stream.Subscription, req *mcpv1.RequestResources, now time.Time) error {
	o := view.Options{
		Collection: collectionOf(req.GetCollection(), s.Profile, s.options.SyntheticEntries), Framing: view.MCP,
		Incremental: req.GetIncremental() && !s.options.FullState, Versions: req.GetInitialResourceVersions(),
	}
	if u != nil {
		o.Prefix = strconv.Itoa(u.Asked+1) + "."
	} else if len(s.Subs) == maxCollections {
		return fmt.Errorf("the stream asks for more than %d collections", maxCollections)
	}
	name := strings.Clone(req.GetCollection())
	if len(name) > maxKept {
		return fmt.Errorf("the name of a collection may have at most %d bytes", maxKept)
	}
	label := name
	if collections[name] == "" && name != syntheticEntries {
		label = "other" // clients choose the name
	}
	if s.Profile != nil {
		o.Form = s.Profile.Form
	} else if len(s.Subs) == 0 {
		s.first = now
	}
	if u == nil {
		s.newest = now
	}
	u = s.Subscribe(name, label, true, o)
	if u.Penalty = fmt.Sprint(o.Incremental); s.Profile != nil {
		s.delayLocked(u)
	}
	if name == serviceEntries && s.entries == nil {
		s.entries = u
		last := len(s.Subs) - 1
		s.Subs = slices.Insert(s.Subs[:last], 0, u)
	}
	return nil
}

// Settle implements [stream.Protocol].
func (s *session) Settle(now time.Time) (due time.Time) {
	if s.Profile != nil || len(s.Subs) == 0 {
		return time.Time{}
	}
	p, final := classify(s.Of)
	if s.override != nil {
		p, final = s.override, !s.override.Barrier // a barrier needs the whole set
	}
	if !final {
		until := stream.Earlier(s.newest.Add(Settle), s.first.Add(SettleLimit))
		if now.Before(until) {
			return until
		}
	}
	s.Decide(p)
	s.Log = s.Log.With(slog.String("node", s.node))
	s.Log.Info("sink subscribed", slog.String("identity", s.Entry.Identity()), slog.String("profile", p.Name),
		slog.Int("collections", len(s.Subs)), slog.Bool("reverse", s.reverse))
	for _, u := range s.Subs {
		u.SetCollection(collectionOf(u.Name, p, s.options.SyntheticEntries))
		u.SetForm(p.Form)
		s.delayLocked(u)
	}
	if p.Barrier && s.entries != nil && len(s.Subs) > 1 {
		// Any other collection works; Pilots do little with the last one by
		// name. Only the ACK of the entries lifts it: every first response has
		// to be acknowledged before a collection is complete.
		s.barrier = slices.MaxFunc(s.Subs[1:], func(a, b *stream.Subscription) int { return strings.Compare(a.Name, b.Name) })
		s.barrier.Paused = true
	}
	return time.Time{}
}

// delayLocked delays the first response to a sink that disconnected over one.
// It identifies a sink across connections as well as possible: the port
// changes, most Pilots have no id, and all behind one proxy share an address.
// This includes sinks that receive parts: a single resource may exceed the
// limit.
func (s *session) delayLocked(u *stream.Subscription) {
	if s.penalties != nil {
		host := s.Entry.Address
		if h, _, err := net.SplitHostPort(host); err == nil {
			host = h
		}
		u.Penalty = fmt.Sprintf("%s %s %s %s %s", host, s.node, s.Profile.Name, u.Name, u.Penalty)
		u.NotBefore = s.penalties.until(u.Penalty)
	}
}

func (s *session) staleLocked() {
	s.stale++
	s.metrics.stale.Inc()
}

// answerLocked handles an ACK or a NACK.
func (s *session) answerLocked(u *stream.Subscription, req *mcpv1.RequestResources, nonce string, now time.Time) {
	refusal := req.GetErrorDetail()
	var r *stream.Refusal
	if refusal != nil {
		r = &stream.Refusal{Code: refusal.GetCode(), Reason: clip.Text(fmt.Sprintf("code %d: %s", refusal.GetCode(), refusal.GetMessage()), maxKept)}
	}
	if !u.Answer(nonce, r, req.GetIncremental() && !s.options.FullState, now, s.Log) {
		s.staleLocked()
		return
	}
	switch {
	case refusal == nil:
		u.RetryAfter = 0
		if s.barrier != nil && u == s.entries && u.Complete() {
			s.barrier.Paused, s.barrier = false, nil
		}
		return
	case refusal.GetCode() == unimplemented:
		u.RetryAfter = 0
	default:
		u.RetryAfter = min(max(2*u.RetryAfter, RetryMin), RetryMax)
		u.Retry = now.Add(u.RetryAfter)
	}
	r.Reason = clip.Text(refusal.GetMessage(), maxKept)
	stream.LogRefusal(s.Log, u.Name, nonce, r, slog.Duration("retry_after", u.RetryAfter))
}

// Header implements [stream.Protocol].
func (s *session) Header(u *stream.Subscription, r view.Response) []byte {
	return header(r.Version, u.Name, r.Nonce, r.Removed, !r.Full)
}

// Large implements [stream.Protocol].
func (s *session) Large(u *stream.Subscription, first bool) {
	s.metrics.Oversize.WithLabelValues().Inc()
	if first {
		s.Log.Warn("response is larger than a Pilot accepts by default: raise its --mcpMaxMsgSize, let it take incremental responses "+
			"(PILOT_ENABLE_INCREMENTAL_MCP=true from 1.6 on), or give it several config sources with a shard of the registries each",
			slog.String("collection", u.Name), slog.Int("bytes", u.Size()), slog.Int("limit", view.MaxMessage))
	}
}

// Status implements [stream.Session].
func (s *session) Status(st *stream.Status) {
	s.Base.Status(st)
	s.Mu.Lock()
	defer s.Mu.Unlock()
	st.Node, st.StaleNonces = s.node, s.stale
	if s.reverse {
		st.Protocol = "mcp reverse"
	}
	for i := range st.Subscriptions {
		sub := &st.Subscriptions[i]
		u := s.Of[sub.TypeURL]
		sub.Incremental = u.Changes()
		switch {
		case s.Profile == nil:
			sub.Waiting = waitingProfile
		case u.Paused:
			sub.Waiting = serviceEntries
		case u.State() == view.Waiting && time.Now().Before(u.NotBefore):
			sub.Waiting = WaitingPenalty
		}
	}
}

// penalties records sinks that disconnected over a response above the default
// limit, so that they do not reconnect in a hot loop.
type penalties struct {
	mu sync.Mutex
	of map[string]penalty // guarded by mu
}

type penalty struct {
	until time.Time
	after time.Duration
}

// Bounds of a penalty and the number of records.
const (
	penaltyMin  = time.Second
	penaltyMax  = time.Minute
	penaltiesOf = 10_000
)

// until returns the earliest time of the first response.
func (p *penalties) until(key string) time.Time {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.of[key].until
}

// add records a response that made a sink disconnect.
func (p *penalties) add(key string, now time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.of == nil {
		p.of = make(map[string]penalty)
	}
	if len(p.of) >= penaltiesOf {
		maps.DeleteFunc(p.of, func(_ string, q penalty) bool { return q.until.Before(now) })
	}
	after := min(cmp.Or(2*p.of[key].after, penaltyMin), penaltyMax)
	p.of[key] = penalty{until: now.Add(after), after: after}
}

// clear removes the record of a sink that acknowledged such a response.
func (p *penalties) clear(key string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.of, key)
}
