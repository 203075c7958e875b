package xds

import (
	"cmp"
	"log/slog"
	"time"

	discovery "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"
	"google.golang.org/grpc/keepalive"

	"github.com/isthmus-mesh/isthmus/server/stream"
	"github.com/isthmus-mesh/isthmus/server/view"
	"github.com/isthmus-mesh/isthmus/server/wire"
)

// Config tunes a server. The zero value works.
type Config struct {
	// Profile is the name of the profile for every sink. If empty, the
	// requested types identify it.
	Profile string
	// Streams runs the streams, with those of other protocols; nil creates a
	// server for them.
	Streams *stream.Server
	// Acked receives acknowledged responses; nil discards them.
	Acked stream.AckFunc
}

// Server is the aggregated discovery service. Its methods may be called from
// any goroutine.
type Server struct {
	*stream.Server
	view     *view.View
	override *stream.Profile
	log      *slog.Logger
	metrics  *stream.Metrics
	interval func(size int) time.Duration // between SotW responses; 0 in benchmarks
}

// New returns a server of a view. A nil log discards records; with a nil
// registerer metrics are not registered. The error is that of an unknown
// profile.
func New(v *view.View, c Config, log *slog.Logger, reg prometheus.Registerer) (*Server, error) {
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	s := &Server{Server: cmp.Or(c.Streams, stream.NewServer(v)), view: v, log: log, interval: view.Interval}
	if c.Profile != "" {
		var err error
		if s.override, err = profiles.Find(c.Profile); err != nil {
			return nil, err
		}
	}
	s.metrics = newMetrics(reg)
	s.metrics.Acked = c.Acked
	return s, nil
}

// ServerOptions returns the options of the gRPC server: the codec, without
// which no response can be sent, and connection policies that sinks of all
// versions can work with.
func ServerOptions() []grpc.ServerOption {
	return []grpc.ServerOption{
		grpc.ForceServerCodecV2(wire.NewCodec()),
		// initial_resource_versions of a large mesh is one message: 100,000
		// names of 100 bytes are 14 MB.
		grpc.MaxRecvMsgSize(64 << 20),
		// istiod pings every 30 s. The default policy would close its
		// connection after two minutes.
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: 5 * time.Second, PermitWithoutStream: true}),
		// A dead peer is detected after 50 s. MaxConnectionAge is unset: an
		// istiod whose stream ends after more than 15 minutes waits 60 s before
		// it reconnects.
		grpc.KeepaliveParams(keepalive.ServerParameters{Time: 30 * time.Second, Timeout: 20 * time.Second}),
	}
}

// Register adds the service to a server created with [ServerOptions].
func (s *Server) Register(server grpc.ServiceRegistrar) {
	discovery.RegisterAggregatedDiscoveryServiceServer(server, service{s: s})
}

// service implements the gRPC service.
type service struct {
	discovery.UnimplementedAggregatedDiscoveryServiceServer
	s *Server
}

// StreamAggregatedResources implements the state-of-the-world variant.
func (v service) StreamAggregatedResources(stream discovery.AggregatedDiscoveryService_StreamAggregatedResourcesServer) error {
	return v.s.serve(stream, false)
}

// DeltaAggregatedResources implements the delta variant.
func (v service) DeltaAggregatedResources(stream discovery.AggregatedDiscoveryService_DeltaAggregatedResourcesServer) error {
	return v.s.serve(stream, true)
}

func (s *Server) serve(st grpc.ServerStream, delta bool) error {
	return s.Serve(st, func(e *stream.Entry) stream.Session {
		sess := newSession(s.view, delta, s.override, s.metrics, e.Log(s.log))
		sess.Entry, sess.Interval = e, s.interval
		return sess
	})
}
