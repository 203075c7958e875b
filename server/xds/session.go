package xds

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	core "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	discovery "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	statuspb "google.golang.org/genproto/googleapis/rpc/status"

	"github.com/isthmus-mesh/isthmus/plugin/collection"
	"github.com/isthmus-mesh/isthmus/server/push"
	"github.com/isthmus-mesh/isthmus/server/resource"
)

// Settle is how long a sink that asked for MeshConfig has to ask for nothing new before its profile is decided. istiod sends all its
// requests at once; 50 ms are far more than a burst has gaps, and unnoticed beside the seconds that its start takes.
const Settle = 50 * time.Millisecond

// Limits of one stream. Whoever goes beyond one of them is sent away with ResourceExhausted, for what is asked for is kept.
const (
	// MaxTypes is the number of type URLs. istiod asks for at most 20.
	MaxTypes = 1000
	// MaxNames is the number of resource names in all subscriptions together, those in initial_resource_versions included.
	MaxNames = 1_000_000
)

var (
	errTypes = fmt.Errorf("one stream may ask for at most %d types", MaxTypes)
	errNames = fmt.Errorf("one stream may name at most %d resources", MaxNames)
)

// shapeKey is the key in the node's metadata by which a sink of ours says which shape it wants.
const shapeKey = "ISTHMUS_SHAPE"

// subscription is one type URL on one stream.
type subscription struct {
	url        string
	collection string
	known      bool // adapters may publish to the collection; only then does the profile matter
	push       *push.Subscription
	counters   *counters

	nonce     string    // of the newest response
	sentAt    time.Time // of the newest response
	notBefore time.Time // of the next response
	refused   bool      // the newest response was refused
	upTo      uint64    // the store's revision at which the sink had everything

	// state of the world only
	names  map[string]struct{} // the names asked for; nil if everything is
	paused bool                // the sink asked for names and then for none

	versions int // delta only: the number of initial_resource_versions
}

// session is one stream as a state machine: requests go in, responses come out, and time is an argument. It starts no goroutine. Its owner
// is the goroutine that serves the stream; mu is there for those who want to see its state.
type session struct {
	hub      *push.Hub
	delta    bool
	protocol string // sotw or delta
	override *Profile
	log      *slog.Logger
	metrics  *metrics

	address   string
	connected time.Time
	interval  func(size int) time.Duration // between state-of-the-world responses

	mu         sync.Mutex
	identified bool              // the rest is guarded by mu; the node is known
	node       string            // id
	metadata   map[string]string // of the node
	shape      *resource.Shape   // what the node asked for
	asked      fingerprint
	settled    bool      // the profile is decided
	settleAt   time.Time // when it will be if nothing new is asked for
	profile    *Profile  // nil until it was decided once
	warned     bool      // of a response that is larger than the sink receives
	subs       map[string]*subscription
	order      []*subscription // in the order in which they were asked for
}

func newSession(hub *push.Hub, delta bool, override *Profile, m *metrics, log *slog.Logger) *session {
	s := &session{hub: hub, delta: delta, protocol: "sotw", override: override, metrics: m, log: log, interval: push.Interval, subs: make(map[string]*subscription)}
	if delta {
		s.protocol = "delta"
	}
	return s
}

// close gives back what the session shares with others.
func (s *session) close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, sub := range s.order {
		sub.push.Close()
	}
	if s.profile != nil {
		s.metrics.sinks.WithLabelValues(s.protocol, s.profile.Name).Dec()
	}
}

// identifyLocked takes the node of the first request that has one. Later ones are ignored: istiod repeats it on every ACK, and a node never changes
// within a stream.
func (s *session) identifyLocked(node *core.Node) {
	if s.identified || node == nil {
		return
	}
	s.identified = true
	s.node = clip(node.GetId())
	s.metadata = make(map[string]string)
	for k, v := range node.GetMetadata().GetFields() {
		if text := v.GetStringValue(); text != "" && len(s.metadata) < 32 {
			s.metadata[clip(k)] = clip(text)
		}
	}
	s.log = s.log.With("node", s.node)
	s.log.Info("sink connected", "address", s.address, "protocol", s.protocol, "version", s.metadata["ISTIO_VERSION"])
	if want := node.GetMetadata().GetFields()[shapeKey].GetStringValue(); want != "" {
		shape, err := resource.ParseShape(want)
		if err != nil {
			s.log.Warn("node metadata ISTHMUS_SHAPE ignored", "err", err)
			return
		}
		s.shape = &shape
		if s.settled {
			s.reformLocked()
		}
	}
}

// clip keeps what a sink says about itself from filling logs and pages.
func clip(s string) string {
	if len(s) > 256 {
		return s[:256]
	}
	return s
}

// subscribeLocked returns the subscription to a type URL, and whether it is new.
func (s *session) subscribeLocked(url string, options push.Options, now time.Time) (sub *subscription, first bool, err error) {
	if sub := s.subs[url]; sub != nil {
		return sub, false, nil
	}
	if len(s.subs) >= MaxTypes {
		return nil, false, errTypes
	}
	coll := collection.OfTypeURL(url)
	sub = &subscription{url: url, collection: coll, known: known(coll)}
	options.Collection = coll
	if !sub.known && coll != meshConfig {
		// No name that a sink can choose may be one under which the store keeps something.
		options.Collection = "?" + coll
	}
	if s.delta {
		options.Framing, options.Incremental = push.DeltaXDS, true
	}
	if sub.known && s.settled {
		options.Form = s.formLocked()
	}
	sub.push = push.NewSubscription(s.hub, options)
	profile := "undecided"
	if s.profile != nil {
		profile = s.profile.Name
	}
	sub.counters = s.metrics.counters(s.protocol, profile, coll)
	s.subs[url] = sub
	s.order = append(s.order, sub)
	s.asked.add(url, coll)
	if s.settled && s.override == nil && s.asked.profile() != s.profile {
		s.settled = false
	}
	if !s.settled {
		s.settleAt = now.Add(Settle)
	}
	if s.log.Enabled(context.Background(), slog.LevelDebug) {
		s.log.Debug("subscribed", "collection", clip(coll), "type_url", clip(url))
	}
	return sub, true, nil
}

// answeredLocked takes the nonce of a request into account. It reports whether it is that of the newest response; if not, the
// request answers to nothing that is of interest (xDS protocol, "ACK and resource type instance version").
func (s *session) answeredLocked(sub *subscription, nonce string, refusal *statuspb.Status, now time.Time) bool {
	if nonce == "" || nonce != sub.nonce {
		return false
	}
	if sub.push.State() != push.Sent {
		return true // has been answered to before; a sink repeats the nonce to change its names
	}
	sub.counters.duration.Observe(now.Sub(sub.sentAt).Seconds())
	if refusal != nil {
		detail := refusal.GetMessage()
		if len(detail) > 4096 {
			detail = detail[:4096]
		}
		sub.push.Nack(nonce, detail)
		sub.refused = true
		sub.counters.nacks.Inc()
		s.log.Warn("sink refused a response", "collection", clip(sub.collection), "nonce", nonce, "err", detail)
		return true
	}
	sub.push.Ack(nonce)
	sub.refused = false
	sub.counters.acks.Inc()
	if s.log.Enabled(context.Background(), slog.LevelDebug) {
		s.log.Debug("acknowledged", "collection", clip(sub.collection), "nonce", nonce, "took", now.Sub(sub.sentAt))
	}
	return true
}

// sotw takes a request of the state-of-the-world variant. Any error ends the stream.
func (s *session) sotw(req *discovery.DiscoveryRequest, now time.Time) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.identifyLocked(req.GetNode())
	if req.GetTypeUrl() == "" {
		s.log.Warn("request without a type URL ignored")
		return nil
	}
	sub, first, err := s.subscribeLocked(req.GetTypeUrl(), push.Options{}, now)
	if err != nil {
		return err
	}
	// Names may change with the nonce of the newest response, or with none before there is one.
	if !first && !s.answeredLocked(sub, req.GetResponseNonce(), req.GetErrorDetail(), now) && sub.nonce != "" {
		return nil
	}
	sub.name(req.GetResourceNames())
	return s.checkNamesLocked()
}

// name sets the names that a state-of-the-world sink asks for.
func (sub *subscription) name(names []string) {
	if len(names) == 0 {
		// After names none is an end of interest; without any before, it is an interest in everything (xDS protocol,
		// "Unsubscribing From Resources").
		if sub.names != nil {
			sub.names, sub.paused = map[string]struct{}{}, true
		}
		return
	}
	wanted := make(map[string]struct{}, len(names))
	more := sub.paused
	for _, n := range names {
		if _, had := sub.names[n]; !had && sub.names != nil {
			more = true
		}
		wanted[n] = struct{}{}
	}
	if more {
		sub.push.Again()
	}
	sub.names, sub.paused = wanted, false
}

// incremental takes a request of the delta variant. Any error ends the stream.
func (s *session) incremental(req *discovery.DeltaDiscoveryRequest, now time.Time) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.identifyLocked(req.GetNode())
	if req.GetTypeUrl() == "" {
		s.log.Warn("request without a type URL ignored")
		return nil
	}
	sub, first, err := s.subscribeLocked(req.GetTypeUrl(), push.Options{Versions: req.GetInitialResourceVersions()}, now)
	if err != nil {
		return err
	}
	add, drop := req.GetResourceNamesSubscribe(), req.GetResourceNamesUnsubscribe()
	if first {
		sub.versions = len(req.GetInitialResourceVersions())
		if len(add) > 0 && !slices.Contains(add, "*") {
			sub.push.Narrow()
		}
	} else {
		s.answeredLocked(sub, req.GetResponseNonce(), req.GetErrorDetail(), now)
	}
	// Interest may change at any time, whatever the nonce; the nonce only says what is answered to.
	for _, n := range drop {
		if n == "*" {
			sub.push.Narrow()
		} else {
			sub.push.Drop(n)
		}
	}
	for _, n := range add {
		if n == "*" {
			sub.push.Widen()
		} else {
			sub.push.Add(n)
		}
	}
	return s.checkNamesLocked()
}

func (s *session) checkNamesLocked() error {
	total := 0
	for _, sub := range s.order {
		total += len(sub.names) + sub.push.Names() + sub.versions
	}
	if total > MaxNames {
		return errNames
	}
	return nil
}

// formLocked returns the form of the decided profile.
func (s *session) formLocked() resource.Form {
	f := s.profile.Form
	if s.delta {
		f.Shape = resource.Workload
	}
	if s.shape != nil {
		f.Shape = *s.shape
	}
	return f
}

func (s *session) reformLocked() {
	f := s.formLocked()
	for _, sub := range s.order {
		if sub.known {
			sub.push.Reform(f)
		}
	}
}

// settleLocked decides the profile if it is time.
func (s *session) settleLocked(now time.Time) {
	if s.settled || len(s.order) == 0 {
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
	if was != s.profile {
		if was != nil {
			s.metrics.sinks.WithLabelValues(s.protocol, was.Name).Dec()
		}
		s.metrics.sinks.WithLabelValues(s.protocol, s.profile.Name).Inc()
		for _, sub := range s.order {
			sub.counters = s.metrics.counters(s.protocol, s.profile.Name, sub.collection)
		}
		s.log.Info("profile decided", "profile", s.profile.Name, "form", s.formLocked().String(), "types", len(s.order))
	}
	s.reformLocked()
}

// next returns the next response to send. If there is none it returns nil and how long to wait before asking again although nothing
// happened, 0 for ever. Any error ends the stream.
func (s *session) next(now time.Time) (m *message, wait time.Duration, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.settleLocked(now)
	later := func(t time.Time) {
		if d := t.Sub(now); wait == 0 || d < wait {
			wait = max(d, 1)
		}
	}
	for _, sub := range s.order {
		switch {
		case sub.paused || sub.push.State() == push.Sent:
			continue
		case sub.known && !s.settled:
			later(s.settleAt)
			continue
		case now.Before(sub.notBefore):
			later(sub.notBefore)
			continue
		}
		revision := uint64(s.hub.Revision())
		r, ok, err := sub.push.Next()
		if err != nil {
			return nil, 0, err
		}
		if !ok {
			if sub.push.State() == push.Current && !sub.refused {
				sub.upTo = revision
			}
			continue
		}
		sub.versions = 0
		return s.sendLocked(sub, &r, now), 0, nil
	}
	return nil, wait, nil
}

func (s *session) sendLocked(sub *subscription, r *push.Response, now time.Time) *message {
	m := &message{header: header(s.delta, r.Version, sub.url, r.Nonce, r.Removed), segments: r.Segments}
	sub.nonce, sub.sentAt = r.Nonce, now
	if !s.delta {
		sub.notBefore = now.Add(s.interval(r.Size))
	}
	size := len(m.header) + r.Size
	sub.counters.responses.Inc()
	sub.counters.bytes.Add(float64(size))
	if s.profile != nil && s.profile.Limit > 0 && size > s.profile.Limit {
		s.metrics.oversize.WithLabelValues(s.profile.Name).Inc()
		if !s.warned {
			s.warned = true
			s.log.Warn("response is larger than this istiod receives: it will end the stream and come back for the same, again and again; "+
				"give it several config sources, each a bridge with some of the registries, or upgrade it to 1.12 or later",
				"address", s.address, "profile", s.profile.Name, "collection", clip(sub.collection), "bytes", size, "limit", s.profile.Limit)
		}
	}
	if s.log.Enabled(context.Background(), slog.LevelDebug) {
		s.log.Debug("push", "collection", clip(sub.collection), "nonce", r.Nonce, "revision", uint64(r.Revision), "resources", r.Resources, "removed", len(r.Removed), "bytes", size)
	}
	return m
}

// take dispatches a request.
func (s *session) take(req any, now time.Time) error {
	switch req := req.(type) {
	case *discovery.DiscoveryRequest:
		return s.sotw(req, now)
	case *discovery.DeltaDiscoveryRequest:
		return s.incremental(req, now)
	}
	panic(fmt.Sprintf("BUG: a request of type %T", req))
}

// status returns the session as people want to see it.
func (s *session) status() Status {
	revision := uint64(s.hub.Revision())
	s.mu.Lock()
	defer s.mu.Unlock()
	st := Status{
		Address: s.address, Node: s.node, Metadata: make(map[string]string, len(s.metadata)), Version: s.metadata["ISTIO_VERSION"],
		Protocol: s.protocol, Connected: s.connected, Subscriptions: make([]Subscription, 0, len(s.order)),
	}
	for k, v := range s.metadata {
		st.Metadata[k] = v
	}
	if s.profile != nil {
		st.Profile, st.Shape = s.profile.Name, s.formLocked().Shape.String()
	}
	for _, sub := range s.order {
		p := sub.push.Status()
		p.Collection = sub.collection
		confirmed := max(sub.upTo, uint64(p.AckedRevision))
		lag := uint64(0)
		if revision > confirmed {
			lag = revision - confirmed
		}
		st.Subscriptions = append(st.Subscriptions, Subscription{TypeURL: sub.url, Status: p, Lag: lag})
	}
	return st
}
