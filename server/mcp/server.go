package mcp

import (
	"errors"
	"log/slog"
	"math/rand/v2"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/isthmus-mesh/isthmus/internal/wait"
	mcpv1 "github.com/isthmus-mesh/isthmus/server/mcp/proto/isthmus/mcp/v1"
	"github.com/isthmus-mesh/isthmus/server/stream"
	"github.com/isthmus-mesh/isthmus/server/view"
	"github.com/isthmus-mesh/isthmus/server/wire"
)

// ErrorDelay is the least time for which a stream stays open after an error of the sink's; up to as much again is added at random.
const ErrorDelay = time.Second

// Config tunes a server. The zero value works.
type Config struct {
	// Profile is the name of the profile that every sink gets; "" finds it by what a sink asks for.
	Profile string
	// SyntheticEntries serves ServiceEntries to the streams of Pilot 1.4 and 1.5 that ask for synthetic ones, and not to their
	// main streams.
	SyntheticEntries bool
	// FullState never makes use of a sink's permission to send incremental responses.
	FullState bool
}

// Server is the source of the Mesh Configuration Protocol. Its methods may be
// called from any goroutine.
type Server struct {
	*stream.Server
	view      *view.View
	config    Config
	override  *Profile
	log       *slog.Logger
	metrics   *metrics
	penalties penalties
}

// New returns a server that serves a view. A nil log drops what there is to
// say, a nil registerer the metrics. The error is that of a profile that does
// not exist, or of metrics that are registered already.
func New(v *view.View, c Config, log *slog.Logger, reg prometheus.Registerer) (*Server, error) {
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	s := &Server{Server: stream.NewServer(v), view: v, config: c, log: log}
	var err error
	if c.Profile != "" {
		if s.override, err = profileOf(c.Profile); err != nil {
			return nil, err
		}
	}
	if s.metrics, err = newMetrics(reg); err != nil {
		return nil, err
	}
	return s, nil
}

// source is what gRPC checks a service's implementation against.
type source interface {
	establish(stream grpc.ServerStream) error
}

// Register adds the service to a server whose codec is that of package wire. The service keeps the name that it has in Istio.
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

// establish is a sink's call.
func (s *Server) establish(st grpc.ServerStream) error {
	ctx := st.Context()
	address := ""
	if p, ok := peer.FromContext(ctx); ok {
		address = p.Addr.String()
	}
	_, err := s.serve(st, address, false)
	if fault, ok := errors.AsType[*stream.Fault](err); ok {
		// Pilot 1.6 to 1.8 come back at once, however often.
		wait.Pause(ctx, ErrorDelay+rand.N(ErrorDelay), s.Down())
		return status.Error(fault.Code, fault.Error())
	}
	return err
}

var errMalformed = errors.New("a request is no istio.mcp.v1alpha1.RequestResources")

// serve drives one stream until it ends, and reports whether the sink asked for
// anything.
func (s *Server) serve(st stream.Stream, address string, reverse bool) (asked bool, _ error) {
	sess := newSession(s.view, s.config, s.override, s.metrics, s.log, time.Now())
	sess.address, sess.reverse, sess.penalties = address, reverse, &s.penalties
	err := s.Serve(st, sess, sess.wake, func() (any, error) {
		var raw wire.Raw
		if err := st.RecvMsg(&raw); err != nil {
			return nil, err
		}
		req := new(mcpv1.RequestResources)
		if err := proto.Unmarshal(raw, req); err != nil {
			// What protobuf says of it is of no use to anybody, and worded
			// differently each time.
			return nil, &stream.Fault{Code: codes.InvalidArgument, Err: errMalformed}
		}
		return req, nil
	})
	return sess.worked(), err
}
