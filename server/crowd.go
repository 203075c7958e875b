package server

import (
	"context"
	"log/slog"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"
	"google.golang.org/grpc"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/tap"

	"github.com/isthmus-mesh/isthmus/server/access"
	"github.com/isthmus-mesh/isthmus/server/stream"
)

// crowd limits the connections per peer and the streams of all peers, across
// all ports.
type crowd struct {
	perPeer, streams int
	log              *slog.Logger
	refused          *prometheus.CounterVec
	open             atomic.Int64 // streams
	intake           *intake

	mu    sync.Mutex
	peers map[string]int // connections by IP address, guarded by mu

	told access.Sparingly // refusals in the log, by limit
}

func newCrowd(perPeer, streams, requestBytes int, log *slog.Logger, reg prometheus.Registerer) *crowd {
	c := &crowd{
		perPeer: perPeer, streams: streams, log: log, peers: make(map[string]int),
		refused: promauto.With(reg).NewCounterVec(prometheus.CounterOpts{
			Name: "isthmus_connections_refused_total", Help: "Connections and streams that were refused, by the limit that was reached.",
		}, []string{"limit"}),
	}
	for _, limit := range []string{limitPeer, limitStreams, limitRequests} {
		c.refused.WithLabelValues(limit)
	}
	c.intake = newIntake(int64(requestBytes), perPeer, func(peer string) { c.refuse(limitRequests, requestBytes, peer) }, c.slowed)
	return c
}

// Names of the limits in the configuration and the metric.
const (
	limitPeer     = "connections_per_peer"
	limitStreams  = "streams"
	limitRequests = "request_bytes"
)

// refuse counts a refusal, and logs at most one per limit and minute.
func (c *crowd) refuse(limit string, value int, peer string) {
	c.refused.WithLabelValues(limit).Inc()
	if c.told.Allow(limit) {
		c.log.Warn("a limit of connections or streams is reached; more are refused", "limit", "limits."+limit, "value", value, "peer", peer)
	}
}

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
		host, _, err := net.SplitHostPort(conn.RemoteAddr().String())
		if err != nil {
			return conn, nil //nolint:nilerr // no peer that could be counted
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
	grpc.ServerStream
	crowd *crowd
	pace  pace

	ctx     context.Context //nolint:containedctx // of the stream, with its turns
	conn    *intakeConn     // nil if it is not counted
	request atomic.Int64    // size of the request that is being handled
}

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
	err := s.ServerStream.RecvMsg(m)
	if err == nil && s.conn != nil {
		s.request.Store(sizeOf(m))
	}
	return err
}

// SendMsg implements [grpc.ServerStream].
func (s *pacedStream) SendMsg(m any) error {
	s.pace.earn(1)
	return s.ServerStream.SendMsg(m)
}

// counted is a gRPC interceptor that counts the streams of a connection, those
// that are refused too.
func (c *crowd) counted(srv any, ss grpc.ServerStream, _ *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
	if p, ok := peer.FromContext(ss.Context()); ok && p.Addr != nil {
		conn := c.intake.of(endsOf(p.LocalAddr, p.Addr))
		conn.begin()
		defer conn.end()
	}
	return handler(srv, ss)
}

// stream is a gRPC interceptor that limits the number of streams, and the rate
// of requests on each.
func (c *crowd) stream(srv any, ss grpc.ServerStream, _ *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
	defer c.open.Add(-1)
	if c.open.Add(1) > int64(c.streams) {
		c.refuse(limitStreams, c.streams, "")
		return stream.TooMany(c.streams)
	}
	paced := &pacedStream{ServerStream: ss, ctx: ss.Context(), crowd: c, pace: pace{every: time.Second / requestRate, burst: requestBurst}}
	if p, ok := peer.FromContext(ss.Context()); ok && p.Addr != nil {
		paced.conn = c.intake.of(endsOf(p.LocalAddr, p.Addr))
	}
	if paced.conn != nil {
		paced.ctx = stream.WithTurns(paced.ctx, paced.conn.turn)
	}
	defer func() { paced.conn.handled(paced.request.Swap(0)) }()
	return handler(srv, paced)
}
