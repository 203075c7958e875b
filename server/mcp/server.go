package mcp

import (
	"cmp"
	"context"
	"errors"
	"io"
	"log/slog"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/isthmus-mesh/isthmus/internal/wait"
	mcpv1 "github.com/isthmus-mesh/isthmus/server/mcp/proto/isthmus/mcp/v1"
	"github.com/isthmus-mesh/isthmus/server/push"
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

// Status is one stream as people want to see it.
type Status struct {
	Address       string         `json:"address"`
	Node          string         `json:"node"`    // the sink's id; most Pilots have none
	Profile       string         `json:"profile"` // "" until it is decided
	Shape         string         `json:"shape"`   // the same
	Reverse       bool           `json:"reverse"` // we dialled
	Connected     time.Time      `json:"connected"`
	StaleNonces   uint64         `json:"stale_nonces"`  // requests that were ignored
	Subscriptions []Subscription `json:"subscriptions"` // serviceentries first, then in the order in which they were asked for
}

// Subscription is one collection of a stream.
type Subscription struct {
	Name string `json:"name"` // as the sink calls the collection
	push.Status
	// Incremental says whether the newest response was.
	Incremental bool `json:"incremental"`
	// Oversize says that the newest response is larger than a Pilot accepts by default.
	Oversize bool `json:"oversize,omitempty"`
	// Waiting says what a collection that was not answered yet waits for: "profile", the collection that has to be acknowledged
	// first, or "penalty", the time that a sink has to wait that went away over a response of more than 4 MiB.
	Waiting string `json:"waiting,omitempty"`
	// Lag is how many revisions of the store the sink has not confirmed. Changes of other collections count too while a
	// response is under way.
	Lag uint64 `json:"lag"`
}

// Server is the source of the Mesh Configuration Protocol. Its methods may be called from any goroutine.
type Server struct {
	hub       *push.Hub
	config    Config
	override  *Profile
	log       *slog.Logger
	metrics   *metrics
	penalties penalties
	down      chan struct{} // closed by Shutdown
	downOnce  sync.Once

	mu       sync.Mutex
	sessions map[*session]struct{} // guarded by mu
}

// New returns a server that serves what hub has. A nil log drops what there is to say, a nil registerer the metrics. The error is that of a
// profile that does not exist, or of metrics that are registered already.
func New(hub *push.Hub, c Config, log *slog.Logger, reg prometheus.Registerer) (*Server, error) {
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	s := &Server{hub: hub, config: c, log: log, down: make(chan struct{}), sessions: make(map[*session]struct{})}
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

// Shutdown ends all streams, after what was handed to gRPC already, and refuses new ones. It does not wait.
func (s *Server) Shutdown() { s.downOnce.Do(func() { close(s.down) }) }

// Status returns all streams, the oldest first.
func (s *Server) Status() []Status {
	s.mu.Lock()
	sessions := make([]*session, 0, len(s.sessions))
	for sess := range s.sessions {
		sessions = append(sessions, sess)
	}
	s.mu.Unlock()
	out := make([]Status, 0, len(sessions))
	for _, sess := range sessions {
		out = append(out, sess.status())
	}
	slices.SortFunc(out, func(a, b Status) int {
		return cmp.Or(a.Connected.Compare(b.Connected), cmp.Compare(a.Address, b.Address))
	})
	return out
}

// stream is what both directions have in common.
type stream interface {
	Context() context.Context
	SendMsg(m any) error
	RecvMsg(m any) error
}

// establish is a sink's call.
func (s *Server) establish(stream grpc.ServerStream) error {
	ctx := stream.Context()
	address := ""
	if p, ok := peer.FromContext(ctx); ok {
		address = p.Addr.String()
	}
	_, err := s.serve(stream, address, false)
	if errors.Is(err, io.EOF) {
		return nil
	}
	if fault := (*sinkError)(nil); errors.As(err, &fault) {
		// Pilot 1.6 to 1.8 come back at once, however often.
		wait.Pause(ctx, ErrorDelay+rand.N(ErrorDelay), s.down)
		return status.Error(fault.code, fault.Error())
	}
	return err
}

// sinkError ends a stream because of something that the sink did.
type sinkError struct {
	code codes.Code
	err  error
}

func (e *sinkError) Error() string { return e.err.Error() }
func (e *sinkError) Unwrap() error { return e.err }

var errMalformed = errors.New("a request is no istio.mcp.v1alpha1.RequestResources")

// errShutdown ends all streams when the server ends.
var errShutdown = status.Error(codes.Unavailable, "isthmus is shutting down; connect again")

// serve drives one stream until it ends, and reports whether the sink asked for anything.
func (s *Server) serve(stream stream, address string, reverse bool) (asked bool, _ error) {
	sess := newSession(s.hub, s.config, s.override, s.metrics, s.log, time.Now())
	sess.address, sess.reverse = address, reverse
	sess.waits = s.penalties.until
	s.mu.Lock()
	s.sessions[sess] = struct{}{}
	s.mu.Unlock()
	err := s.run(stream, sess)
	s.mu.Lock()
	delete(s.sessions, sess)
	s.mu.Unlock()
	lost, taken := sess.oversized()
	for _, key := range lost {
		s.penalties.add(key, time.Now())
	}
	for _, key := range taken {
		s.penalties.clear(key)
	}
	sess.close()

	// The session has no other user from here on.
	switch {
	case err == nil, errors.Is(err, io.EOF), status.Code(err) == codes.Canceled:
		sess.log.Info("sink disconnected", slog.String("address", address))
	default:
		sess.log.Warn("stream ended", slog.String("address", address), slog.Any("err", err))
	}
	return len(sess.subs) > 0, err
}

func (s *Server) run(stream stream, sess *session) error {
	ctx := stream.Context()
	requests := make(chan *mcpv1.RequestResources)
	ended := make(chan error, 1)
	// Owned by this stream. It ends when gRPC ends the stream, which it does as soon as the caller has returned or cancelled it; until
	// then there is no way to interrupt RecvMsg, so it is not waited for here.
	go func() {
		for {
			var raw wire.Raw
			if err := stream.RecvMsg(&raw); err != nil {
				ended <- err
				return
			}
			req := new(mcpv1.RequestResources)
			if err := proto.Unmarshal(raw, req); err != nil {
				// What protobuf says of it is of no use to anybody, and worded differently each time.
				ended <- &sinkError{codes.InvalidArgument, errMalformed}
				return
			}
			select {
			case requests <- req:
			case <-ctx.Done():
				return
			}
		}
	}()
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	for {
		changed := s.hub.Changed() // taken before looking, so that no change is missed
		var timeout <-chan time.Time
		for {
			m, wait, err := sess.next(time.Now())
			if err != nil {
				return &sinkError{codes.Unavailable, err}
			}
			if m != nil {
				// Blocks while the sink does not read, which is this stream's own affair.
				if err := stream.SendMsg(m); err != nil {
					return err
				}
				continue
			}
			if wait > 0 {
				timer.Reset(wait)
				timeout = timer.C
			}
			break
		}
		select {
		case req := <-requests:
			if err := sess.take(req, time.Now()); err != nil {
				return &sinkError{codes.ResourceExhausted, err}
			}
		case <-changed:
		case <-timeout:
		case err := <-ended:
			return err
		case <-ctx.Done():
			return status.FromContextError(ctx.Err()).Err()
		case <-s.down:
			return errShutdown
		}
	}
}
