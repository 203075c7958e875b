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
	stream.Base[*subscription] // serviceentries first, then in the order of requests

	options   Config
	override  *stream.Profile
	metrics   *metrics
	log       *slog.Logger
	address   string
	entry     *stream.Entry // nil in tests
	reverse   bool
	connected time.Time
	wake      stream.Waker
	penalties *penalties // nil for none

	// guarded by Mu
	node    string
	profile *stream.Profile // nil until decided
	first   time.Time
	newest  time.Time // time of the newest subscription
	asked   map[string]bool
	of      map[string]*subscription
	barrier *subscription // held until entries is acknowledged; nil if there is no barrier, or no longer
	entries *subscription // serviceentries
	stale   uint64
}

// subscription is one collection of a session. The embedded value has no
// subscription of package view until the profile is known.
type subscription struct {
	stream.Subscription
	incremental bool              // of the initial request, until the profile is known
	versions    map[string]string // likewise
	asked       int               // number of initial requests; part of the nonce
	notBefore   time.Time         // of the first response; zero afterwards
	penalty     string            // key, see penaltyKeyLocked
	retry       time.Time         // time of the retry after a NACK; zero for none
	retryAfter  time.Duration
}

// prefix begins the nonces after the collection was requested anew.
func (u *subscription) prefix() string {
	if u.asked == 1 {
		return ""
	}
	return strconv.Itoa(u.asked) + "."
}

func newSession(v *view.View, o Config, override *stream.Profile, m *metrics, log *slog.Logger, now time.Time) *session {
	return &session{
		Base: stream.Base[*subscription]{View: v, Limit: view.MaxMessage}, options: o, override: override, metrics: m, log: log, connected: now, wake: stream.NewWaker(),
		asked: make(map[string]bool), of: make(map[string]*subscription),
	}
}

// Close implements [stream.Session].
func (s *session) Close(now time.Time, err error) {
	s.Mu.Lock()
	defer s.Mu.Unlock()
	for _, u := range s.Subs {
		if !u.Open() {
			continue
		}
		if s.penalties != nil && u.Size() > view.MaxMessage {
			// The sink disconnected while a response above the default limit
			// was in flight: the response is the likely cause.
			if u.State() == view.Sent {
				s.penalties.add(u.penalty, now)
			} else {
				s.penalties.clear(u.penalty)
			}
		}
		u.Close()
	}
	if s.profile != nil {
		s.metrics.Sinks.WithLabelValues(s.profile.Name).Dec()
	}
	stream.LogEnd(s.log, err)
}

// Room returns that of the first response before the subscription is open.
func (u *subscription) Room() (size int, shared bool) {
	switch {
	case u.Open():
		return u.Subscription.Room()
	case u.incremental:
		return view.MaxDelta, false
	}
	return 1, true
}

// Selective implements [stream.Session].
func (s *session) Selective() bool { return false }

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
	u := s.of[name]
	switch {
	case u == nil || nonce == "":
		return s.askLocked(u, req, now)
	case !u.Open() || !strings.HasPrefix(nonce, u.prefix()):
		s.staleLocked()
	default:
		s.answerLocked(u, req, strings.TrimPrefix(nonce, u.prefix()), now)
	}
	return nil
}

// askLocked handles a collection's initial request, also when it is requested
// anew.
func (s *session) askLocked(u *subscription, req *mcpv1.RequestResources, now time.Time) error {
	if u == nil {
		if len(s.Subs) == maxCollections {
			return fmt.Errorf("the stream asks for more than %d collections", maxCollections)
		}
		if len(req.GetCollection()) > maxKept {
			return fmt.Errorf("the name of a collection may have at most %d bytes", maxKept)
		}
		u = &subscription{Subscription: stream.Subscription{Name: strings.Clone(req.GetCollection())}}
		s.of[u.Name] = u
		if u.Name == serviceEntries {
			s.Subs = slices.Insert(s.Subs, 0, u)
			s.entries = u
		} else {
			s.Subs = append(s.Subs, u)
		}
	}
	u.Reset()
	u.asked++
	u.retry, u.retryAfter = time.Time{}, 0
	u.incremental, u.versions = req.GetIncremental(), req.GetInitialResourceVersions()
	u.Words = view.SizeOfVersions(u.versions)
	if s.profile == nil {
		if len(s.asked) == 0 {
			s.first = now
		}
		if !s.asked[u.Name] {
			s.asked[u.Name], s.newest = true, now
		}
		return nil
	}
	s.openLocked(u)
	return nil
}

// decideLocked decides the profile when it is due. Otherwise it returns the
// time left.
func (s *session) decideLocked(now time.Time) (wait time.Duration) {
	if len(s.asked) == 0 {
		return 0
	}
	p, final := classify(s.asked)
	if s.override != nil {
		p, final = s.override, !s.override.Barrier // a barrier needs the whole set
	}
	if !final {
		until := stream.Earlier(s.newest.Add(Settle), s.first.Add(SettleLimit))
		if now.Before(until) {
			return until.Sub(now)
		}
	}
	s.profile = p
	s.metrics.Sinks.WithLabelValues(p.Name).Inc()
	s.log = s.log.With(slog.String("node", s.node))
	s.log.Info("sink subscribed", slog.String("identity", s.entry.Identity()), slog.String("profile", p.Name),
		slog.Int("collections", len(s.asked)), slog.Bool("reverse", s.reverse))
	for _, u := range s.Subs {
		s.openLocked(u)
	}
	if p.Barrier && s.entries != nil && len(s.Subs) > 1 {
		// Any other collection works; Pilots do little with the last one by
		// name.
		s.barrier = slices.MaxFunc(s.Subs[1:], func(a, b *subscription) int { return strings.Compare(a.Name, b.Name) })
		s.barrier.Paused = true
	}
	return 0
}

// openLocked opens the subscription once the profile is known.
func (s *session) openLocked(u *subscription) {
	coll := collectionOf(u.Name, s.profile, s.options.SyntheticEntries)
	incremental := u.incremental && !s.options.FullState
	u.Subscription.Subscription = view.NewSubscription(s.View, view.Options{
		Collection: coll, Form: s.profile.Form, Framing: view.MCP, Incremental: incremental, Versions: u.versions,
		ReplaceOnRemoval: s.profile.Form.Synthetic,
	})
	u.versions, u.Words = nil, 0
	s.metrics.count(u, s.profile.Name)
	// This includes sinks that receive parts: a single resource may exceed the
	// limit.
	u.penalty = s.penaltyKeyLocked(u, incremental)
	if s.penalties != nil {
		u.notBefore = s.penalties.until(u.penalty)
	}
}

func (s *session) staleLocked() {
	s.stale++
	s.metrics.stale.Inc()
}

// penaltyKeyLocked identifies a sink across connections as well as possible:
// the port changes, most Pilots have no id, and all behind one proxy share an
// address.
func (s *session) penaltyKeyLocked(u *subscription, incremental bool) string {
	host, _, err := net.SplitHostPort(s.address)
	if err != nil {
		host = s.address
	}
	return fmt.Sprintf("%s %s %s %s %v", host, s.node, s.profile.Name, u.Name, incremental)
}

// answerLocked handles an ACK or a NACK.
func (s *session) answerLocked(u *subscription, req *mcpv1.RequestResources, nonce string, now time.Time) {
	refusal := req.GetErrorDetail()
	var r *stream.Refusal
	if refusal != nil {
		r = &stream.Refusal{Code: refusal.GetCode(), Reason: clip.Text(fmt.Sprintf("code %d: %s", refusal.GetCode(), refusal.GetMessage()), maxKept)}
	}
	if !u.Answer(nonce, r, req.GetIncremental() && !s.options.FullState, now, s.log) {
		s.staleLocked()
		return
	}
	u.retry = time.Time{}
	switch {
	case refusal == nil:
		u.retryAfter = 0
		if s.barrier != nil && u == s.entries && u.Complete() {
			s.barrier.Paused, s.barrier = false, nil
		}
		return
	case refusal.GetCode() == unimplemented:
		u.retryAfter = 0
	default:
		u.retryAfter = min(max(2*u.retryAfter, RetryMin), RetryMax)
		u.retry = now.Add(u.retryAfter)
	}
	r.Reason = clip.Text(refusal.GetMessage(), maxKept)
	stream.LogRefusal(s.log, u.Name, req.GetResponseNonce(), r, slog.Duration("retry_after", u.retryAfter))
}

// Next implements [stream.Session]. The error is [view.ErrResume].
func (s *session) Next(now time.Time) (m *stream.Message, wait time.Duration, err error) {
	s.Mu.Lock()
	defer s.Mu.Unlock()
	if s.profile == nil {
		if wait = s.decideLocked(now); s.profile == nil {
			return nil, wait, nil
		}
	}
	later := func(t time.Time) {
		if d := t.Sub(now); wait == 0 || d < wait {
			wait = d
		}
	}
	for _, u := range s.Subs {
		if !now.Before(u.notBefore) {
			u.notBefore = time.Time{}
		}
		switch {
		case u.Paused:
			// Only the ACK of the entries lifts the barrier: every first
			// response has to be acknowledged before a collection is complete.
			continue
		case !u.notBefore.IsZero():
			later(u.notBefore)
			continue
		case u.State() == view.Sent:
			continue
		case u.Refused() && !u.retry.IsZero():
			if !now.Before(u.retry) {
				u.Again()
			} else {
				later(u.retry)
			}
		}
		if due := u.Due(now); !due.IsZero() {
			later(due)
			continue
		}
		r, ok, err := u.Subscription.Next()
		if err != nil {
			return nil, 0, fmt.Errorf("collection %s: %w", u.Name, err)
		}
		if !ok {
			continue
		}
		u.retry = time.Time{}
		return s.messageLocked(u, &r, now), 0, nil
	}
	return nil, wait, nil
}

func (s *session) messageLocked(u *subscription, r *view.Response, now time.Time) *stream.Message {
	m := u.Respond(r, header(r.Version, u.Name, u.prefix()+r.Nonce, r.Removed, !r.Full), view.Interval, now, s.log)
	if !u.Oversize(s.Limit) {
		return m
	}
	s.metrics.Oversize.WithLabelValues().Inc()
	if u.Warn() {
		s.log.Warn("response is larger than a Pilot accepts by default: raise its --mcpMaxMsgSize, let it take incremental responses "+
			"(PILOT_ENABLE_INCREMENTAL_MCP=true from 1.6 on), or give it several config sources with a shard of the registries each",
			slog.String("collection", u.Name), slog.Int("bytes", u.Size()), slog.Int("limit", view.MaxMessage))
	}
	return m
}

// Status implements [stream.Session].
func (s *session) Status() stream.Status {
	s.Mu.Lock()
	defer s.Mu.Unlock()
	st := stream.Status{
		Address: s.address, Identity: s.entry.Identity(), Node: s.node, Protocol: "mcp", Connected: s.connected, StaleNonces: s.stale, Shows: s.View.Shows(),
		Subscriptions: []stream.SubscriptionStatus{},
	}
	if s.reverse {
		st.Protocol = "mcp reverse"
	}
	if s.profile != nil {
		st.Profile, st.Shape = s.profile.Name, s.profile.Form.Shape.String()
	}
	now := uint64(s.View.Revision())
	for _, u := range s.Subs {
		sub := stream.SubscriptionStatus{TypeURL: u.Name, Waiting: waitingProfile, Status: view.Status{
			Collection: cmp.Or(collections[u.Name], u.Name), State: view.Waiting.String(),
		}}
		if u.Open() {
			sub.Status, sub.Waiting = u.Status(), ""
			sub.SentAt, sub.AckedAt = u.Times()
			sub.Incremental = u.Changes()
			sub.Oversize = u.Oversize(s.Limit)
			if sub.Status.State != view.Current.String() {
				sub.Lag = now - min(now, uint64(sub.AckedRevision)) // of another view
			}
			switch {
			case u.Paused:
				sub.Waiting = serviceEntries
			case !u.notBefore.IsZero():
				sub.Waiting = WaitingPenalty
			}
		}
		st.Subscriptions = append(st.Subscriptions, sub)
	}
	return st
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
