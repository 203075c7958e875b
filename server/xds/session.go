package xds

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"time"

	core "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	discovery "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	statuspb "google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	"github.com/isthmus-mesh/isthmus/plugin/collection"
	"github.com/isthmus-mesh/isthmus/server/encode"
	"github.com/isthmus-mesh/isthmus/server/stream"
	"github.com/isthmus-mesh/isthmus/server/view"
	"github.com/isthmus-mesh/isthmus/server/wire"
)

// Settle is the time without a new type after which the profile of a sink that
// requested MeshConfig is decided. istiod sends all its requests in one burst.
// 50 ms exceed the gaps of a burst and are short against the seconds of an
// istiod's start.
const Settle = 50 * time.Millisecond

// Limits of one stream. A stream that exceeds one ends with ResourceExhausted,
// as the server stores what is requested.
const (
	// MaxTypes limits the number of type URLs. istiod requests at most 20.
	MaxTypes = 1000
	// maxURL limits the length of a type URL, in bytes.
	maxURL = 1 << 10
	// MaxNames limits the number of resource names of all subscriptions,
	// initial_resource_versions included.
	MaxNames = 1_000_000
)

var (
	errTypes = fmt.Errorf("one stream may ask for at most %d types", MaxTypes)
	errURL   = fmt.Errorf("a type URL may have at most %d bytes", maxURL)
	errNames = fmt.Errorf("one stream may name at most %d resources", MaxNames)
)

// Keys of the node's metadata by which a client selects a form.
const (
	// shapeKey selects a shape.
	shapeKey = "ISTHMUS_SHAPE"
	// registryKey with the value "true" adds [encode.RegistryAnnotation].
	registryKey = "ISTHMUS_REGISTRY"
)

// subscription is one type URL on one stream.
type subscription struct {
	stream.Subscription
	collection string
	known      bool   // adapters can publish to the collection; other types do not need a profile
	nonce      string // of the newest response

	// SotW only
	names map[string]struct{} // requested names; nil for all. The subscription is paused when the sink has unsubscribed from all of them

	versions int // delta only: number of initial_resource_versions
}

// session implements [stream.Session].
type session struct {
	stream.Base[*subscription] // in the order of the first requests

	delta    bool
	protocol string // sotw or delta
	override *stream.Profile
	log      *slog.Logger
	metrics  *stream.Metrics

	address   string
	entry     *stream.Entry // nil in tests
	connected time.Time
	wake      stream.Waker
	interval  func(size int) time.Duration // between SotW responses

	// guarded by Mu
	identified bool              // the node is known
	node       string            // id
	metadata   map[string]string // of the node
	shape      *encode.Shape     // requested by the node
	registry   bool              // likewise
	asked      fingerprint
	settled    bool            // the profile is decided
	settleAt   time.Time       // when the profile will be decided if no type is added
	profile    *stream.Profile // nil until first decided
	warned     bool            // about a response that exceeds the sink's limit
	subs       map[string]*subscription
}

func newSession(v *view.View, delta bool, override *stream.Profile, m *stream.Metrics, log *slog.Logger) *session {
	s := &session{
		Base: stream.Base[*subscription]{View: v}, delta: delta, protocol: "sotw", override: override, metrics: m, log: log,
		wake: stream.NewWaker(), interval: view.Interval, subs: make(map[string]*subscription),
	}
	if delta {
		s.protocol = "delta"
	}
	return s
}

// Close implements [stream.Session].
func (s *session) Close(_ time.Time, err error) {
	s.Mu.Lock()
	defer s.Mu.Unlock()
	for _, sub := range s.Subs {
		sub.Close()
	}
	if s.profile != nil {
		s.metrics.Sinks.WithLabelValues(s.protocol, s.profile.Name).Dec()
	}
	stream.LogEnd(s.log, err)
}

// Selective implements [stream.Session].
func (s *session) Selective() bool {
	s.Mu.Lock()
	defer s.Mu.Unlock()
	return s.delta && len(s.Subs) > 0 && !slices.ContainsFunc(s.Subs, func(sub *subscription) bool { return !sub.Narrowed() })
}

// identifyLocked records the node of the first request that has one. It ignores
// later ones: istiod repeats the node on every ACK, and it never changes within
// a stream.
func (s *session) identifyLocked(node *core.Node) {
	if s.identified || node == nil {
		return
	}
	s.identified = true
	s.node = stream.Clip(node.GetId())
	s.metadata = make(map[string]string)
	for k, v := range node.GetMetadata().GetFields() {
		if text := v.GetStringValue(); text != "" && len(s.metadata) < 32 {
			s.metadata[stream.Clip(k)] = stream.Clip(text)
		}
	}
	s.log = s.log.With("node", s.node)
	s.log.Info("sink connected", "identity", s.entry.Identity(), "protocol", s.protocol, "version", s.metadata["ISTIO_VERSION"])
	s.registry = node.GetMetadata().GetFields()[registryKey].GetStringValue() == "true"
	if want := node.GetMetadata().GetFields()[shapeKey].GetStringValue(); want != "" {
		shape, err := encode.ParseShape(want)
		if err != nil {
			s.log.Warn("node metadata ISTHMUS_SHAPE ignored", "err", err)
		} else {
			s.shape = &shape
		}
	}
	if s.settled {
		s.reformLocked()
	}
}

// subscribeLocked returns the subscription to a type URL and whether it is new.
func (s *session) subscribeLocked(url string, options view.Options, now time.Time) (sub *subscription, first bool, err error) {
	if sub := s.subs[url]; sub != nil {
		return sub, false, nil
	}
	if len(s.subs) >= MaxTypes {
		return nil, false, errTypes
	}
	if len(url) > maxURL {
		return nil, false, errURL
	}
	coll := collection.OfTypeURL(url)
	sub = &subscription{Subscription: stream.Subscription{Name: url}, collection: coll, known: known(coll)}
	options.Collection = coll
	if !sub.known && coll != meshConfig {
		// Prefix unknown collections so that no client-chosen name matches a
		// collection of the state.
		options.Collection = "?" + coll
	}
	if s.delta {
		options.Framing, options.Wake = view.DeltaXDS, s.wake.Wake
	}
	if sub.known && s.settled {
		options.Form = s.formLocked()
	}
	sub.Subscription.Subscription = view.NewSubscription(s.View, options)
	profile := "undecided"
	if s.profile != nil {
		profile = s.profile.Name
	}
	count(s.metrics, sub, s.protocol, profile)
	s.subs[url] = sub
	s.Subs = append(s.Subs, sub)
	s.asked.add(url, coll)
	if s.settled && s.override == nil && s.asked.profile() != s.profile {
		s.settled = false
	}
	if !s.settled {
		s.settleAt = now.Add(Settle)
	}
	if s.log.Enabled(context.Background(), slog.LevelDebug) {
		s.log.Debug("subscribed", "collection", stream.Clip(coll), "type_url", stream.Clip(url))
	}
	return sub, true, nil
}

// answeredLocked handles the nonce of a request. It reports false for a stale
// nonce; such a request is ignored (xDS protocol, "ACK and resource type
// instance version").
func (s *session) answeredLocked(sub *subscription, nonce string, refusal *statuspb.Status, now time.Time) bool {
	if nonce == "" || nonce != sub.nonce {
		return false
	}
	if sub.State() != view.Sent {
		return true // already answered; a sink repeats the nonce to change its names
	}
	var r *stream.Refusal
	if refusal != nil {
		r = &stream.Refusal{Code: refusal.GetCode(), Reason: refusal.GetMessage()}
	}
	if sub.Answer(nonce, r, false, now, s.log) && r != nil {
		stream.LogRefusal(s.log, sub.collection, nonce, r)
	}
	return true
}

// nameCost is what a name of a SotW sink takes besides its length, in bytes.
const nameCost = 50

// sotw handles a SotW request. An error ends the stream.
func (s *session) sotw(req *discovery.DiscoveryRequest, now time.Time) error {
	s.Mu.Lock()
	defer s.Mu.Unlock()
	s.identifyLocked(req.GetNode())
	if req.GetTypeUrl() == "" {
		s.log.Warn("request without a type URL ignored")
		return nil
	}
	sub, first, err := s.subscribeLocked(req.GetTypeUrl(), view.Options{}, now)
	if err != nil {
		return err
	}
	// Names may change with the nonce of the newest response, or without one
	// before the first response.
	if !first && !s.answeredLocked(sub, req.GetResponseNonce(), req.GetErrorDetail(), now) && sub.nonce != "" {
		return nil
	}
	sub.name(req.GetResourceNames())
	return s.checkNamesLocked()
}

// name sets the names that a SotW sink requests.
func (sub *subscription) name(names []string) {
	sub.Words = 0
	if len(names) == 0 {
		// An empty list after names unsubscribes; without earlier names it
		// subscribes to everything (xDS protocol, "Unsubscribing From
		// Resources").
		if sub.names != nil {
			sub.names, sub.Paused = map[string]struct{}{}, true
		}
		return
	}
	wanted := make(map[string]struct{}, len(names))
	more := sub.Paused
	for _, n := range names {
		if _, had := sub.names[n]; !had && sub.names != nil {
			more = true
		}
		wanted[n] = struct{}{}
		sub.Words += nameCost + len(n)
	}
	if more {
		sub.Again()
	}
	sub.names, sub.Paused = wanted, false
}

// incremental handles a delta request. An error ends the stream.
func (s *session) incremental(req *discovery.DeltaDiscoveryRequest, now time.Time) error {
	s.Mu.Lock()
	defer s.Mu.Unlock()
	s.identifyLocked(req.GetNode())
	if req.GetTypeUrl() == "" {
		s.log.Warn("request without a type URL ignored")
		return nil
	}
	sub, first, err := s.subscribeLocked(req.GetTypeUrl(), view.Options{Versions: req.GetInitialResourceVersions()}, now)
	if err != nil {
		return err
	}
	add, drop := req.GetResourceNamesSubscribe(), req.GetResourceNamesUnsubscribe()
	if first {
		sub.versions = len(req.GetInitialResourceVersions())
		if len(add) > 0 && !slices.Contains(add, "*") {
			sub.Narrow()
		}
	} else {
		s.answeredLocked(sub, req.GetResponseNonce(), req.GetErrorDetail(), now)
	}
	// Names may change at any time and with any nonce. The nonce only
	// identifies the response that is acknowledged.
	eachRun(drop, sub.Narrow, sub.Drop)
	eachRun(add, sub.Widen, sub.Add)
	return s.checkNamesLocked()
}

// eachRun calls some with the names between wildcards, and all for each
// wildcard, in the order of the names.
func eachRun(names []string, all func(), some func(names ...string)) {
	for len(names) > 0 {
		n := slices.Index(names, "*")
		if n < 0 {
			n = len(names)
		}
		if n > 0 {
			some(names[:n]...)
			names = names[n:]
			continue
		}
		all()
		names = names[1:]
	}
}

func (s *session) checkNamesLocked() error {
	total := 0
	for _, sub := range s.Subs {
		total += len(sub.names) + sub.Names() + sub.versions
	}
	if total > MaxNames {
		return errNames
	}
	return nil
}

// formLocked returns the form of the decided profile.
func (s *session) formLocked() encode.Form {
	f := s.profile.Form
	if s.delta {
		f.Shape = encode.Workload
	}
	if s.shape != nil {
		f.Shape = *s.shape
	}
	f.Registry = s.registry
	return f
}

func (s *session) reformLocked() {
	f := s.formLocked()
	for _, sub := range s.Subs {
		if sub.known {
			sub.SetForm(f)
		}
	}
}

// settleLocked decides the profile when it is due.
func (s *session) settleLocked(now time.Time) {
	if s.settled || len(s.Subs) == 0 {
		return
	}
	if s.override == nil && !s.asked.complete() && now.Before(s.settleAt) {
		return
	}
	was := s.profile
	s.settled, s.profile = true, s.override
	if s.override == nil {
		s.profile = s.asked.profile()
	}
	s.Limit = s.profile.Limit
	if was != s.profile {
		if was != nil {
			s.metrics.Sinks.WithLabelValues(s.protocol, was.Name).Dec()
		}
		s.metrics.Sinks.WithLabelValues(s.protocol, s.profile.Name).Inc()
		for _, sub := range s.Subs {
			count(s.metrics, sub, s.protocol, s.profile.Name)
		}
		s.log.Info("profile decided", "profile", s.profile.Name, "form", s.formLocked().String(), "types", len(s.Subs))
	}
	s.reformLocked()
}

// Next implements [stream.Session].
func (s *session) Next(now time.Time) (m *stream.Message, wait time.Duration, err error) {
	s.Mu.Lock()
	defer s.Mu.Unlock()
	s.settleLocked(now)
	later := func(t time.Time) {
		if d := t.Sub(now); wait == 0 || d < wait {
			wait = max(d, 1)
		}
	}
	for _, sub := range s.Subs {
		switch due := sub.Due(now); {
		case sub.Paused || sub.State() == view.Sent:
			continue
		case sub.known && !s.settled:
			later(s.settleAt)
			continue
		case !due.IsZero():
			later(due)
			continue
		}
		revision := uint64(s.View.Revision())
		r, ok, err := sub.Next()
		if err != nil {
			return nil, 0, err
		}
		if !ok {
			sub.Idle(revision)
			continue
		}
		sub.versions = 0
		return s.sendLocked(sub, &r, now), 0, nil
	}
	return nil, wait, nil
}

func (s *session) sendLocked(sub *subscription, r *view.Response, now time.Time) *stream.Message {
	sub.nonce = r.Nonce
	m := sub.Respond(r, header(s.delta, r.Version, sub.Name, r.Nonce, r.Removed), s.interval, now, s.log)
	if s.profile == nil {
		return m
	}
	if sub.Oversize(s.Limit) {
		s.metrics.Oversize.WithLabelValues(s.profile.Name).Inc()
		if !s.warned {
			s.warned = true
			s.log.Warn("response is larger than this istiod accepts: it will end the stream and ask for the same again, over and over; "+
				"give it several config sources, each a bridge with some of the registries, or upgrade it to 1.12 or later",
				"profile", s.profile.Name, "collection", stream.Clip(sub.collection), "bytes", sub.Size(), "limit", s.profile.Limit)
		}
	}
	return m
}

// Take implements [stream.Session].
func (s *session) Take(req *wire.Request, now time.Time) error {
	var m proto.Message = new(discovery.DiscoveryRequest)
	if s.delta {
		m = new(discovery.DeltaDiscoveryRequest)
	}
	if err := req.Decode(m); err != nil {
		return &stream.Fault{Code: codes.Internal, Err: err}
	}
	return s.take(m, now)
}

func (s *session) take(m proto.Message, now time.Time) error {
	switch m := m.(type) {
	case *discovery.DiscoveryRequest:
		return s.sotw(m, now)
	case *discovery.DeltaDiscoveryRequest:
		return s.incremental(m, now)
	}
	panic(fmt.Sprintf("BUG: a request of type %T", m))
}

// Status implements [stream.Session].
func (s *session) Status() stream.Status {
	s.Mu.Lock()
	defer s.Mu.Unlock()
	revision := uint64(s.View.Revision())
	st := stream.Status{
		Address: s.address, Identity: s.entry.Identity(), Node: s.node, Metadata: maps.Clone(s.metadata), Version: s.metadata["ISTIO_VERSION"],
		Protocol: s.protocol, Connected: s.connected, Shows: s.View.Shows(), Subscriptions: make([]stream.SubscriptionStatus, 0, len(s.Subs)),
	}
	if s.profile != nil {
		st.Profile, st.Shape = s.profile.Name, s.formLocked().Shape.String()
	}
	for _, sub := range s.Subs {
		p := sub.Status()
		p.Collection = sub.collection
		sent, acked := sub.Times()
		st.Subscriptions = append(st.Subscriptions, stream.SubscriptionStatus{TypeURL: sub.Name, Status: p, SentAt: sent, AckedAt: acked, Lag: sub.Lag(revision), Oversize: sub.Oversize(s.Limit)})
	}
	return st
}
