package xds

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
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

// session implements [stream.Session].
type session struct {
	stream.Base // in the order of the first requests

	delta    bool
	override *stream.Profile

	// guarded by Mu
	identified bool              // the node is known
	node       string            // id
	metadata   map[string]string // of the node
	shape      *encode.Shape     // requested by the node
	registry   bool              // likewise
	asked      fingerprint
	settled    bool      // the profile is decided
	settleAt   time.Time // when the profile will be decided if no type is added
}

func newSession(v *view.View, delta bool, override *stream.Profile, m *stream.Metrics, log *slog.Logger) *session {
	name := "sotw"
	if delta {
		name = "delta"
	}
	s := &session{delta: delta, override: override, Base: stream.Base{
		Name: name, Labels: []string{name}, Metrics: m, Wake: stream.NewWaker(), Interval: view.Interval, Log: log,
		View: v, Of: make(map[string]*stream.Subscription),
	}}
	s.Protocol = s
	return s
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
	s.Log = s.Log.With("node", s.node)
	s.Log.Info("sink connected", "identity", s.Entry.Identity(), "protocol", s.Name, "version", s.metadata["ISTIO_VERSION"])
	s.registry = node.GetMetadata().GetFields()[registryKey].GetStringValue() == "true"
	if want := node.GetMetadata().GetFields()[shapeKey].GetStringValue(); want != "" {
		shape, err := encode.ParseShape(want)
		if err != nil {
			s.Log.Warn("node metadata ISTHMUS_SHAPE ignored", "err", err)
		} else {
			s.shape = &shape
		}
	}
	if s.settled {
		s.reformLocked()
	}
}

// subscribeLocked returns the subscription to a type URL and whether it is new.
func (s *session) subscribeLocked(url string, options view.Options, now time.Time) (sub *stream.Subscription, first bool, err error) {
	if sub := s.Of[url]; sub != nil {
		return sub, false, nil
	}
	if len(s.Subs) >= MaxTypes {
		return nil, false, errTypes
	}
	if len(url) > maxURL {
		return nil, false, errURL
	}
	coll := collection.OfTypeURL(url)
	known, label := slices.Contains(collections, coll), coll
	options.Collection = coll
	if !known && coll != meshConfig {
		// Prefix unknown collections so that no client-chosen name matches a
		// collection of the state, or is a label.
		options.Collection, label = unknown+coll, "other"
	}
	if s.delta {
		options.Framing, options.Wake = view.DeltaXDS, s.Wake.Wake
	}
	if known && s.settled {
		options.Form = s.formLocked()
	}
	sub = s.Subscribe(url, label, known, options)
	s.asked.add(url, coll)
	if s.settled && s.override == nil && s.asked.profile() != s.Profile {
		s.settled = false
	}
	if !s.settled {
		s.settleAt = now.Add(Settle)
	}
	if s.Log.Enabled(context.Background(), slog.LevelDebug) {
		s.Log.Debug("subscribed", "collection", stream.Clip(coll), "type_url", stream.Clip(url))
	}
	return sub, true, nil
}

// unknown begins the collections that no adapter can publish to.
const unknown = "?"

// answeredLocked handles the nonce of a request. It reports false for a stale
// nonce; such a request is ignored (xDS protocol, "ACK and resource type
// instance version").
func (s *session) answeredLocked(sub *stream.Subscription, nonce string, refusal *statuspb.Status, now time.Time) bool {
	if nonce == "" || nonce != sub.Nonce() {
		return false
	}
	if sub.State() != view.Sent {
		return true // already answered; a sink repeats the nonce to change its names
	}
	var r *stream.Refusal
	if refusal != nil {
		r = &stream.Refusal{Code: refusal.GetCode(), Reason: refusal.GetMessage()}
	}
	if sub.Answer(nonce, r, false, now, s.Log) && r != nil {
		stream.LogRefusal(s.Log, collection.OfTypeURL(sub.Name), nonce, r)
	}
	return true
}

// sotw handles a SotW request. An error ends the stream.
func (s *session) sotw(req *discovery.DiscoveryRequest, now time.Time) error {
	s.Mu.Lock()
	defer s.Mu.Unlock()
	s.identifyLocked(req.GetNode())
	if req.GetTypeUrl() == "" {
		s.Log.Warn("request without a type URL ignored")
		return nil
	}
	sub, first, err := s.subscribeLocked(req.GetTypeUrl(), view.Options{}, now)
	if err != nil {
		return err
	}
	// Names may change with the nonce of the newest response, or without one
	// before the first response.
	if !first && !s.answeredLocked(sub, req.GetResponseNonce(), req.GetErrorDetail(), now) && sub.Nonce() != "" {
		return nil
	}
	sub.Want(req.GetResourceNames())
	return s.checkNamesLocked()
}

// incremental handles a delta request. An error ends the stream.
func (s *session) incremental(req *discovery.DeltaDiscoveryRequest, now time.Time) error {
	s.Mu.Lock()
	defer s.Mu.Unlock()
	s.identifyLocked(req.GetNode())
	if req.GetTypeUrl() == "" {
		s.Log.Warn("request without a type URL ignored")
		return nil
	}
	sub, first, err := s.subscribeLocked(req.GetTypeUrl(), view.Options{Versions: req.GetInitialResourceVersions()}, now)
	if err != nil {
		return err
	}
	add, drop := req.GetResourceNamesSubscribe(), req.GetResourceNamesUnsubscribe()
	if first {
		sub.Stated = len(req.GetInitialResourceVersions())
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
		total += sub.Named()
	}
	if total > MaxNames {
		return errNames
	}
	return nil
}

// formLocked returns the form of the decided profile.
func (s *session) formLocked() encode.Form {
	f := s.Profile.Form
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
		if sub.Profiled {
			sub.SetForm(f)
		}
	}
}

// Settle implements [stream.Protocol].
func (s *session) Settle(now time.Time) (due time.Time) {
	if s.settled || len(s.Subs) == 0 {
		return time.Time{}
	}
	p := s.override
	if p == nil {
		if !s.asked.complete() && now.Before(s.settleAt) {
			return s.settleAt
		}
		p = s.asked.profile()
	}
	s.settled, s.Limit = true, p.Limit
	if s.Decide(p) {
		s.Log.Info("profile decided", "profile", p.Name, "form", s.formLocked().String(), "types", len(s.Subs))
	}
	s.reformLocked()
	return time.Time{}
}

// Header implements [stream.Protocol].
func (s *session) Header(sub *stream.Subscription, r view.Response) []byte {
	return header(s.delta, r.Version, sub.Name, r.Nonce, r.Removed)
}

// Large implements [stream.Protocol].
func (s *session) Large(sub *stream.Subscription, first bool) {
	s.Metrics.Oversize.WithLabelValues(s.Profile.Name).Inc()
	if first {
		s.Log.Warn("response is larger than this istiod accepts: it will end the stream and ask for the same again, over and over; "+
			"give it several config sources, each a bridge with some of the registries, or upgrade it to 1.12 or later",
			"profile", s.Profile.Name, "collection", stream.Clip(collection.OfTypeURL(sub.Name)), "bytes", sub.Size(), "limit", s.Limit)
	}
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
func (s *session) Status(st *stream.Status) {
	s.Base.Status(st)
	s.Mu.Lock()
	defer s.Mu.Unlock()
	st.Node, st.Metadata, st.Version = s.node, maps.Clone(s.metadata), s.metadata["ISTIO_VERSION"]
	if s.Profile != nil {
		st.Shape = s.formLocked().Shape.String()
	}
	for i := range st.Subscriptions {
		sub := &st.Subscriptions[i]
		sub.Collection = strings.TrimPrefix(sub.Collection, unknown)
	}
}
