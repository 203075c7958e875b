package server

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"sync/atomic"

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
	peers            *access.Seats // connections by address

	told   access.Sparingly // refusals in the log, by limit
	lately access.Refusals
}

func newCrowd(limits *config.Limits, log *slog.Logger, reg prometheus.Registerer) *crowd {
	c := &crowd{
		perPeer: limits.ConnectionsPerPeer, streams: limits.Streams, log: log, peers: access.NewSeats(limits.ConnectionsPerPeer, 0),
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
		host, ok := stream.HostOf(conn.RemoteAddr().String())
		if !ok {
			return conn, nil // no peer that could be counted
		}
		if leave, ok := l.crowd.peers.Take(host); ok {
			return &countedConn{conn, leave}, nil
		}
		l.crowd.refuse(limitPeer, l.crowd.perPeer, host)
		_ = conn.Close()
	}
}

// countedConn is a connection that counts until it is closed.
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

// errCompressed refuses a stream whose requests may be compressed: 735 kB of
// gzip are 900 MB of names. No istiod and no Pilot compresses its requests, and
// gRPC would compress the responses likewise, for each stream.
var errCompressed = status.Error(codes.Unimplemented, "requests are not to be compressed; send them without grpc-encoding")

// connOf returns the connection of a stream, nil if it is not counted.
func (c *crowd) connOf(ctx context.Context) *intakeConn {
	if p, ok := peer.FromContext(ctx); ok && p.Addr != nil {
		return c.intake.of(endsOf(p.LocalAddr, p.Addr))
	}
	return nil
}

// counted is a gRPC interceptor that counts the streams of a connection, those
// that are refused too.
func (c *crowd) counted(srv any, ss grpc.ServerStream, _ *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
	conn := c.connOf(ss.Context())
	conn.count(1)
	defer conn.count(-1)
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

// stream is a gRPC interceptor that limits the number of streams, and what each
// may have.
func (c *crowd) stream(srv any, ss grpc.ServerStream, _ *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
	defer c.open.Add(-1)
	if c.open.Add(1) > int64(c.streams) {
		c.refuse(limitStreams, c.streams, "")
		return stream.TooMany(c.streams)
	}
	conn, entry := c.connOf(ss.Context()), stream.EntryOf(ss.Context())
	if conn == nil {
		return handler(srv, ss)
	}
	var of *hostPace
	identity := entry.Identity()
	if identity != "" {
		var leave func()
		var err error
		if of, leave, err = c.intake.join(conn, identity); err != nil {
			c.refuse(limitPeer, c.perPeer, identity)
			return err
		}
		defer leave()
	}
	account := c.budget.open(conn, identity, of, func(err error) { entry.End(status.Error(codes.ResourceExhausted, err.Error())) })
	defer account.close()
	entry.SetAccount(account)
	return handler(srv, ss)
}

// dialed is an interceptor that bounds a sink that the bridge dials as one
// that connects. Its requests are bounded by their size: it has one stream.
func (c *crowd) dialed(ctx context.Context, desc *grpc.StreamDesc, cc *grpc.ClientConn, method string, open grpc.Streamer, opts ...grpc.CallOption) (grpc.ClientStream, error) {
	entry := stream.EntryOf(ctx)
	conn := c.intake.enter(dialedConn{name: peerName(fmt.Sprintf("%s#%d", cc.Target(), c.sockets.Add(1))), entry: entry}, cc.Target(), c.intake.paceOf(cc.Target()))
	conn.count(1)
	account := c.budget.open(conn, "", nil, entry.End)
	entry.SetAccount(account)
	context.AfterFunc(entry.Context(), func() {
		account.close()
		conn.count(-1)
		_ = conn.Close() // it only ends the stream
	})
	return open(ctx, desc, cc, method, opts...)
}

// dialedConn stands for the connection of a sink that the bridge dials.
type dialedConn struct {
	net.Conn
	name  peerName
	entry *stream.Entry
}

// LocalAddr implements [net.Conn].
func (c dialedConn) LocalAddr() net.Addr { return c.name }

// RemoteAddr implements [net.Conn].
func (c dialedConn) RemoteAddr() net.Addr { return c.name }

// Close implements [net.Conn].
func (c dialedConn) Close() error {
	c.entry.End(errShed)
	return nil
}
