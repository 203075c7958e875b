package server

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/tap"

	"github.com/isthmus-mesh/isthmus/server/access"
	"github.com/isthmus-mesh/isthmus/server/config"
	"github.com/isthmus-mesh/isthmus/server/stream"
	"github.com/isthmus-mesh/isthmus/server/wire"
)

// crowd limits the connections per peer and the streams of all peers, across
// all ports.
type crowd struct {
	perPeer, streams int
	log              *slog.Logger
	refused          *prometheus.CounterVec
	open             atomic.Int64  // streams
	sockets          atomic.Uint64 // connections without an address of their own so far
	intake           *intake
	budget           *budget

	mu    sync.Mutex
	peers map[string]int // connections by address, guarded by mu

	told   access.Sparingly // refusals in the log, by limit
	lately access.Refusals
}

func newCrowd(limits *config.Limits, log *slog.Logger, reg prometheus.Registerer) *crowd {
	c := &crowd{
		perPeer: limits.ConnectionsPerPeer, streams: limits.Streams, log: log, peers: make(map[string]int),
		refused: promauto.With(reg).NewCounterVec(prometheus.CounterOpts{
			Name: "isthmus_connections_refused_total", Help: "Connections and streams that were refused, by the limit that was reached.",
		}, []string{"limit"}),
	}
	for _, limit := range []string{limitPeer, limitStreams, limitRequests, limitRetained, limitResponses} {
		c.refused.WithLabelValues(limit)
	}
	c.intake = newIntake(int64(limits.RequestBytes), limits.ConnectionsPerPeer, func(peer string) { c.refuse(limitRequests, limits.RequestBytes, peer) }, c.slowed)
	c.budget = newBudget(limits.RetainedBytes, limits.ResponseBytes, func(limit, peer string) {
		c.refuse(limit, map[string]int{limitRetained: limits.RetainedBytes, limitResponses: limits.ResponseBytes}[limit], peer)
	})
	c.intake.gone = c.budget.gone
	return c
}

// Names of the limits in the configuration and the metric.
const (
	limitPeer      = "connections_per_peer"
	limitStreams   = "streams"
	limitRequests  = "request_bytes"
	limitRetained  = "retained_bytes"
	limitResponses = "response_bytes"
)

// refuse counts a refusal, and logs at most one per limit and minute.
func (c *crowd) refuse(limit string, value int, peer string) {
	c.refused.WithLabelValues(limit).Inc()
	c.lately.Note("limits."+limit, peer, fmt.Sprintf("it is set to %d", value), "")
	if c.told.Allow(limit) {
		c.log.Warn("a limit of connections or streams is reached; more are refused", "limit", "limits."+limit, "value", value, "peer", peer)
	}
}

// peerName is the address of a peer as text.
type peerName string

// Network implements [net.Addr].
func (peerName) Network() string { return "" }

// String implements [net.Addr].
func (p peerName) String() string { return string(p) }

// socketConn is a connection to a unix socket. All that connect there count as
// one address, and each connection has a name of its own.
type socketConn struct {
	net.Conn
	name peerName
}

// RemoteAddr implements [net.Conn].
func (c socketConn) RemoteAddr() net.Addr { return c.name }

// crowdListener limits the connections per peer.
type crowdListener struct {
	net.Listener
	crowd *crowd
}

// Accept implements [net.Listener]. It closes a connection beyond the limit at
// once.
func (l crowdListener) Accept() (net.Conn, error) {
	for {
		conn, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		if local := conn.LocalAddr(); local.Network() == "unix" {
			conn = socketConn{conn, peerName(fmt.Sprintf("unix:%s#%d", local, l.crowd.sockets.Add(1)))}
		}
		host, ok := stream.HostOf(conn.RemoteAddr())
		if !ok {
			return conn, nil // no peer that could be counted
		}
		if counted := l.crowd.enter(conn, host); counted != nil {
			return counted, nil
		}
		l.crowd.refuse(limitPeer, l.crowd.perPeer, host)
		_ = conn.Close()
	}
}

// enter counts a connection until it is closed. It returns nil beyond the
// limit.
func (c *crowd) enter(conn net.Conn, host string) net.Conn {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.peers[host] >= c.perPeer {
		return nil
	}
	c.peers[host]++
	return &countedConn{Conn: conn, leave: sync.OnceFunc(func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		if c.peers[host]--; c.peers[host] == 0 {
			delete(c.peers, host)
		}
	})}
}

type countedConn struct {
	net.Conn
	leave func()
}

// Close implements [net.Conn].
func (c *countedConn) Close() error {
	c.leave()
	return c.Conn.Close()
}

// endsOf identifies a connection. The address and port of a peer do not: it may
// use one port for connections to several listeners.
func endsOf(local, remote net.Addr) string {
	return local.String() + " " + remote.String()
}

// tap holds up a connection that opens streams faster than any sink does, as to
// reset them at once, and those of an address that opens many at once. It runs
// in the goroutine that reads the connection, so that only that one waits.
func (c *crowd) tap(ctx context.Context, _ *tap.Info) (context.Context, error) {
	p, ok := peer.FromContext(ctx)
	if !ok || p.Addr == nil {
		return ctx, nil
	}
	if err := c.intake.of(endsOf(p.LocalAddr, p.Addr)).open(); err != nil {
		return ctx, stream.TooFast()
	}
	return ctx, nil
}

// slowed logs, at most once a minute, that a peer is held up.
func (c *crowd) slowed(what, peer string) {
	if c.told.Allow("slowed " + what) {
		c.log.Warn("a peer is slowed down, as it sends more than any sink does", "what", what, "peer", peer)
	}
}

// pacedStream holds up a sink that sends requests faster than any does: as many
// as it gets responses, and some more. It is used by one sender and one reader.
type pacedStream struct {
	grpc.ServerStream // nil for a sink that the bridge dials
	of                stream.Stream
	crowd             *crowd
	pace              pace

	ctx      context.Context //nolint:containedctx // of the stream, with its turns
	conn     *intakeConn     // nil if it is not counted
	identity *hostPace       // nil without one
	account  *account        // nil if it is not counted
	request  atomic.Int64    // size of the request that is being handled
}

func requestPace() pace { return pace{every: time.Second / requestRate, burst: requestBurst} }

// Context implements [grpc.ServerStream].
func (s *pacedStream) Context() context.Context { return s.ctx }

// RecvMsg implements [grpc.ServerStream].
func (s *pacedStream) RecvMsg(m any) error {
	s.conn.handled(s.request.Swap(0))
	if s.pace.wait(s.Context(), 1) {
		address := ""
		if p, ok := peer.FromContext(s.Context()); ok && p.Addr != nil {
			address = p.Addr.String()
		}
		s.crowd.slowed("requests", address)
	}
	err := s.of.RecvMsg(m)
	if err == nil && s.conn != nil {
		size := int64(prefixSize + m.(*wire.Request).Size())
		s.request.Store(size)
		if s.identity != nil && s.identity.data.wait(s.Context(), int(max(size-refund, 0))) {
			s.crowd.slowed("bytes of requests", s.account.peers[1].name)
		}
	}
	return err
}

// SendMsg implements [grpc.ServerStream].
func (s *pacedStream) SendMsg(m any) error {
	s.pace.earn(1)
	response, ok := m.(*stream.Message)
	if !ok || s.account == nil {
		return s.of.SendMsg(m)
	}
	s.conn.permit(response.Size)
	s.account.own().light.earn(1)
	response.Done = s.account.begin(response)
	err := s.of.SendMsg(m)
	if err != nil && response.Done != nil {
		response.Done()
	}
	return err
}

// errCompressed refuses a stream whose requests may be compressed: 735 kB of
// gzip are 900 MB of names. No istiod and no Pilot compresses its requests, and
// gRPC would compress the responses likewise, for each stream.
var errCompressed = status.Error(codes.Unimplemented, "requests are not to be compressed; send them without grpc-encoding")

// counted is a gRPC interceptor that counts the streams of a connection, those
// that are refused too.
func (c *crowd) counted(srv any, ss grpc.ServerStream, _ *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
	if p, ok := peer.FromContext(ss.Context()); ok && p.Addr != nil {
		conn := c.intake.of(endsOf(p.LocalAddr, p.Addr))
		conn.begin()
		defer conn.end()
	}
	// No interface of gRPC says how requests are compressed, before one is
	// read.
	if t, ok := grpc.ServerTransportStreamFromContext(ss.Context()).(interface{ RecvCompress() string }); !ok || !plain(t.RecvCompress()) {
		return errCompressed
	}
	return handler(srv, ss)
}

func plain(compression string) bool {
	return compression == "" || compression == encoding.Identity
}

// stream is a gRPC interceptor that limits the number of streams, and the rate
// of requests on each.
func (c *crowd) stream(srv any, ss grpc.ServerStream, _ *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
	defer c.open.Add(-1)
	if c.open.Add(1) > int64(c.streams) {
		c.refuse(limitStreams, c.streams, "")
		return stream.TooMany(c.streams)
	}
	paced := &pacedStream{ServerStream: ss, of: ss, ctx: ss.Context(), crowd: c, pace: requestPace()}
	if p, ok := peer.FromContext(ss.Context()); ok && p.Addr != nil {
		paced.conn = c.intake.of(endsOf(p.LocalAddr, p.Addr))
	}
	defer func() { paced.conn.handled(paced.request.Swap(0)) }()
	if paced.conn == nil {
		return handler(srv, paced)
	}
	ctx, end := context.WithCancelCause(paced.ctx)
	defer end(nil)
	identity := ""
	if g := access.GrantOf(ctx); g != nil {
		identity = g.Identity()
	}
	if identity != "" {
		of, leave, err := c.intake.join(paced.conn, identity)
		if err != nil {
			c.refuse(limitPeer, c.perPeer, identity)
			return err
		}
		defer leave()
		paced.identity = of
	}
	paced.account = c.budget.open(paced.conn, identity, paced.identity, end)
	defer paced.account.close()
	paced.ctx = stream.WithAccount(ctx, paced.account)
	err := handler(srv, paced)
	if errors.Is(context.Cause(ctx), errShed) {
		return status.Error(codes.ResourceExhausted, errShed.Error())
	}
	return err
}

// dialed is an interceptor that bounds a sink that the bridge dials as one
// that connects. Its requests are bounded by their size: it has one stream.
func (c *crowd) dialed(ctx context.Context, desc *grpc.StreamDesc, cc *grpc.ClientConn, method string, open grpc.Streamer, opts ...grpc.CallOption) (grpc.ClientStream, error) {
	ctx, end := context.WithCancelCause(ctx)
	of, err := open(ctx, desc, cc, method, opts...)
	if err != nil {
		end(nil)
		return nil, err
	}
	pace := c.intake.paceOf(cc.Target())
	conn := c.intake.enter(dialedConn{name: peerName(fmt.Sprintf("%s#%d", cc.Target(), c.sockets.Add(1))), end: end}, cc.Target(), pace)
	conn.begin()
	account := c.budget.open(conn, "", nil, end)
	context.AfterFunc(ctx, func() {
		account.close()
		conn.end()
		_ = conn.Close() // it only ends the stream
	})
	return &dialedStream{of, &pacedStream{
		of: of, ctx: stream.WithAccount(of.Context(), account), crowd: c, pace: requestPace(), conn: conn, account: account,
	}}, nil
}

// dialedConn stands for the connection of a sink that the bridge dials.
type dialedConn struct {
	net.Conn
	name peerName
	end  context.CancelCauseFunc
}

// LocalAddr implements [net.Conn].
func (c dialedConn) LocalAddr() net.Addr { return c.name }

// RemoteAddr implements [net.Conn].
func (c dialedConn) RemoteAddr() net.Addr { return c.name }

// Close implements [net.Conn].
func (c dialedConn) Close() error {
	c.end(errShed)
	return nil
}

// dialedStream is the stream to a sink that the bridge dials.
type dialedStream struct {
	grpc.ClientStream
	paced *pacedStream
}

// Context implements [grpc.ClientStream].
func (s *dialedStream) Context() context.Context { return s.paced.Context() }

// SendMsg implements [grpc.ClientStream].
func (s *dialedStream) SendMsg(m any) error { return s.paced.SendMsg(m) }

// RecvMsg implements [grpc.ClientStream].
func (s *dialedStream) RecvMsg(m any) error { return s.paced.RecvMsg(m) }
