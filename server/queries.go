package server

import (
	"net"
	"net/http"

	"github.com/isthmus-mesh/isthmus/server/stream"
)

// queryListener is of an admin port: an address waits for itself if it connects
// again and again, whatever it sends then.
type queryListener struct{ crowdListener }

// Accept implements [net.Listener].
func (l queryListener) Accept() (net.Conn, error) {
	conn, err := l.crowdListener.Accept()
	if err != nil {
		return nil, err
	}
	host, ok := stream.HostOf(conn.RemoteAddr().String())
	if !ok {
		return conn, nil
	}
	n := l.crowd.intake
	return &queryConn{pacedConn: n.paced(conn, host, n.paceOf(host))}, nil
}

// queryConn is a connection to an admin port. Its first bytes, those of a TLS
// handshake, are read when the address may have another connection.
type queryConn struct {
	pacedConn
	passed bool // used by the one reader
}

// Read implements [net.Conn].
func (c *queryConn) Read(b []byte) (int, error) {
	if !c.passed {
		if err := c.intake.hold(c.gone, c.pace.connections, 1, "connections", c.host); err != nil {
			return 0, err
		}
		c.passed = true
	}
	return c.Conn.Read(b)
}

// Close implements [net.Conn].
func (c *queryConn) Close() error {
	c.leave()
	return c.Conn.Close()
}

// queries has requests to an admin port wait for the pace of their address,
// those too that are refused.
func (c *crowd) queries(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if host, ok := stream.HostOf(r.RemoteAddr); ok {
			pace := c.intake.paceOf(host)
			waited := pace.queries.wait(r.Context(), 1)
			c.intake.leave(pace)
			if waited {
				c.slowed("requests to an admin port", host)
			}
		}
		if r.Context().Err() == nil {
			next.ServeHTTP(w, r)
		}
	})
}
