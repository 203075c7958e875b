package server

import (
	"log/slog"
	"net"
	"sync"
	"sync/atomic"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"
	"google.golang.org/grpc"

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

	mu    sync.Mutex
	peers map[string]int // connections by IP address; guarded by mu

	told access.Sparingly // refusals in the log, by limit
}

func newCrowd(perPeer, streams int, log *slog.Logger, reg prometheus.Registerer) *crowd {
	c := &crowd{
		perPeer: perPeer, streams: streams, log: log, peers: make(map[string]int),
		refused: promauto.With(reg).NewCounterVec(prometheus.CounterOpts{
			Name: "isthmus_connections_refused_total", Help: "Connections and streams that were refused, by the limit that was reached.",
		}, []string{"limit"}),
	}
	for _, limit := range []string{limitPeer, limitStreams} {
		c.refused.WithLabelValues(limit)
	}
	return c
}

// Names of the limits in the configuration and the metric.
const (
	limitPeer    = "connections_per_peer"
	limitStreams = "streams"
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

// stream is a gRPC interceptor that limits the number of streams.
func (c *crowd) stream(srv any, ss grpc.ServerStream, _ *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
	defer c.open.Add(-1)
	if c.open.Add(1) > int64(c.streams) {
		c.refuse(limitStreams, c.streams, "")
		return stream.TooMany(c.streams)
	}
	return handler(srv, ss)
}
