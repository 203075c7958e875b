package xds

import (
	"cmp"
	"context"
	"errors"
	"io"
	"log/slog"
	"slices"
	"sync"
	"time"

	discovery "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

	"github.com/isthmus-mesh/isthmus/server/push"
	"github.com/isthmus-mesh/isthmus/server/wire"
)

// Config tunes a server. The zero value works.
type Config struct {
	// Profile is the name of the profile that every sink gets; "" finds it by what a sink asks for.
	Profile string
}

// Status is one stream as people want to see it.
type Status struct {
	Address       string            `json:"address"`
	Node          string            `json:"node"`
	Metadata      map[string]string `json:"metadata,omitempty"` // of the node, its strings only
	Version       string            `json:"version,omitempty"`  // what the node says of itself; every istiod says 65536.65536.65536
	Protocol      string            `json:"protocol"`           // sotw or delta
	Profile       string            `json:"profile"`            // "" until it is decided
	Shape         string            `json:"shape"`              // the same
	Connected     time.Time         `json:"connected"`
	Subscriptions []Subscription    `json:"subscriptions"` // in the order in which they were asked for
}

// Subscription is one type URL of a stream.
type Subscription struct {
	TypeURL string `json:"type_url"`
	push.Status
	// Lag is how many revisions of the store the sink has not confirmed. Changes of other collections count too while a
	// response is under way.
	Lag uint64 `json:"lag"`
}

// Server is the aggregated discovery service. Its methods may be called from any goroutine.
type Server struct {
	hub      *push.Hub
	override *Profile
	log      *slog.Logger
	metrics  *metrics
	interval func(size int) time.Duration // between state-of-the-world responses; benchmarks have none
	down     chan struct{}                // closed by Shutdown
	downOnce sync.Once

	mu       sync.Mutex
	sessions map[*session]struct{} // guarded by mu
}

// New returns a server that serves what hub has. A nil log drops what there is to say, a nil registerer the metrics. The error is that of a
// profile that does not exist, or of metrics that are registered already.
func New(hub *push.Hub, c Config, log *slog.Logger, reg prometheus.Registerer) (*Server, error) {
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	s := &Server{hub: hub, log: log, interval: push.Interval, down: make(chan struct{}), sessions: make(map[*session]struct{})}
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

// ServerOptions returns what the gRPC server has to be made with: the codec, without which no response can be sent, and rules for
// connections that sinks of all ages can live with.
func ServerOptions() []grpc.ServerOption {
	return []grpc.ServerOption{
		grpc.ForceServerCodecV2(wire.NewCodec()),
		// initial_resource_versions of a big mesh is one message: 100,000 names of 100 bytes are 14 MB.
		grpc.MaxRecvMsgSize(64 << 20),
		// istiod pings every 30 s. The default policy would end its connection after two minutes.
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: 5 * time.Second, PermitWithoutStream: true}),
		// A sink that is gone without a word is noticed after 50 s. There is no MaxConnectionAge: an istiod whose stream ends after more than
		// 15 minutes comes back after 60 s only.
		grpc.KeepaliveParams(keepalive.ServerParameters{Time: 30 * time.Second, Timeout: 20 * time.Second}),
	}
}

// Register adds the service to a server that was made with [ServerOptions].
func (s *Server) Register(server grpc.ServiceRegistrar) {
	discovery.RegisterAggregatedDiscoveryServiceServer(server, service{s: s})
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

// service is the gRPC face of a Server.
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

func (s *Server) serve(stream grpc.ServerStream, delta bool) error {
	ctx := stream.Context()
	sess := newSession(s.hub, delta, s.override, s.metrics, s.log)
	sess.connected, sess.interval = time.Now(), s.interval
	if p, ok := peer.FromContext(ctx); ok {
		sess.address = p.Addr.String()
	}
	s.mu.Lock()
	s.sessions[sess] = struct{}{}
	s.mu.Unlock()
	err := s.run(ctx, stream, sess)
	s.mu.Lock()
	delete(s.sessions, sess)
	s.mu.Unlock()
	sess.close()

	// The session has no other user from here on.
	switch code := status.Code(err); {
	case code == codes.OK, code == codes.Canceled, errors.Is(err, errShutdown):
		sess.log.Info("sink disconnected", "address", sess.address)
	default:
		sess.log.Warn("stream ended", "address", sess.address, "err", err)
	}
	return err
}

var errShutdown = status.Error(codes.Unavailable, "isthmus is shutting down; connect again")

func (s *Server) run(ctx context.Context, stream grpc.ServerStream, sess *session) error {
	requests := make(chan any)
	ended := make(chan error, 1)
	// Owned by this stream. It ends when gRPC ends the stream, which it does as soon as this method has returned; until then there is no
	// way to interrupt RecvMsg, so it is not waited for here.
	go func() {
		for {
			req, err := receive(stream, sess.delta)
			if err != nil {
				ended <- err
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
				return status.Error(codes.Unavailable, err.Error())
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
				return status.Error(codes.ResourceExhausted, err.Error())
			}
		case <-changed:
		case <-timeout:
		case err := <-ended:
			if errors.Is(err, io.EOF) {
				return nil
			}
			return err
		case <-ctx.Done():
			return status.FromContextError(ctx.Err()).Err()
		case <-s.down:
			return errShutdown
		}
	}
}

func receive(stream grpc.ServerStream, delta bool) (any, error) {
	if delta {
		req := new(discovery.DeltaDiscoveryRequest)
		return req, stream.RecvMsg(req)
	}
	req := new(discovery.DiscoveryRequest)
	return req, stream.RecvMsg(req)
}
