package mcp

import (
	"cmp"
	"errors"
	"log/slog"
	"math/rand/v2"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/isthmus-mesh/isthmus/internal/wait"
	"github.com/isthmus-mesh/isthmus/server/stream"
	"github.com/isthmus-mesh/isthmus/server/view"
)

// ErrorDelay is the least time that a stream stays open after an error of the
// sink. A random time of up to as much is added.
const ErrorDelay = time.Second

// Config tunes a server. The zero value works.
type Config struct {
	// Profile is the name of the profile for every sink. If empty, the
	// requested collections identify it.
	Profile string
	// SyntheticEntries sends ServiceEntries on the streams of Pilot 1.4 and 1.5
	// that request synthetic ones, and not on their main streams.
	SyntheticEntries bool
	// FullState sends full responses even to sinks that permit incremental
	// ones.
	FullState bool
	// Streams runs the streams, with those of other protocols; nil creates a
	// server for them.
	Streams *stream.Server
	// Acked receives acknowledged responses; nil discards them.
	Acked stream.AckFunc
}

// Server implements the source of the Mesh Configuration Protocol. Its methods
// may be called from any goroutine.
type Server struct {
	*stream.Server
	view      *view.View
	config    Config
	override  *stream.Profile
	log       *slog.Logger
	metrics   *metrics
	penalties penalties
}

// New returns a server of a view. A nil log discards records; with a nil
// registerer metrics are not registered. The error is that of an unknown
// profile.
func New(v *view.View, c Config, log *slog.Logger, reg prometheus.Registerer) (*Server, error) {
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	s := &Server{Server: cmp.Or(c.Streams, stream.NewServer(v)), view: v, config: c, log: log}
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

// source is the handler type of the gRPC service.
type source interface {
	establish(stream grpc.ServerStream) error
}

// Register adds the service, under its name in Istio, to a server with the
// codec of package wire.
func (s *Server) Register(server grpc.ServiceRegistrar) {
	server.RegisterService(&grpc.ServiceDesc{
		ServiceName: sourceService,
		HandlerType: (*source)(nil),
		Streams: []grpc.StreamDesc{{
			StreamName: streamName, ServerStreams: true, ClientStreams: true,
			Handler: func(srv any, stream grpc.ServerStream) error { return srv.(source).establish(stream) },
		}},
		Metadata: "mcp/v1alpha1/mcp.proto",
	}, s)
}

// RefuseIf returns what refuses new streams of the legacy protocol while
// elsewhere reports that it is served on another port.
func RefuseIf(elsewhere func() bool) grpc.StreamServerInterceptor {
	return func(srv any, st grpc.ServerStream, info *grpc.StreamServerInfo, next grpc.StreamHandler) error {
		if info.FullMethod == SourceMethod && elsewhere() {
			return status.Error(codes.Unimplemented, "the legacy protocol is served on another port, that of listen.mcp")
		}
		return next(srv, st)
	}
}

// establish handles a sink's call.
func (s *Server) establish(st grpc.ServerStream) error {
	_, err := s.serve(st, false)
	if _, ok := errors.AsType[*stream.Fault](err); ok {
		// Pilots 1.6 to 1.8 reconnect at once, without a limit.
		wait.Pause(st.Context(), ErrorDelay+rand.N(ErrorDelay), s.Down())
	}
	return err
}

var errMalformed = errors.New("a request is not an istio.mcp.v1alpha1.RequestResources")

// serve runs one stream until it ends. asked reports whether the sink
// subscribed to anything.
func (s *Server) serve(st stream.Stream, reverse bool) (asked bool, _ error) {
	var sess *session
	err := s.Serve(st, func(e *stream.Entry) stream.Session {
		sess = newSession(s.view, s.config, s.override, s.metrics, e.Log(s.log))
		sess.Entry, sess.reverse, sess.penalties = e, reverse, &s.penalties
		return sess
	})
	return sess != nil && len(sess.Subs) > 0, err
}
