package testenv

import (
	"io"
	"net"
	"sync"
	"testing"
)

// Gate forwards TCP connections to a server while it is open. While shut, it
// refuses new connections and has closed existing ones, as for an unreachable
// server. Its address does not change.
type Gate struct {
	// Addr is where clients connect, host:port.
	Addr string

	target string

	mu       sync.Mutex
	listener net.Listener // nil while shut
	conns    map[net.Conn]struct{}
	running  sync.WaitGroup
}

// NewGate returns a gate to the server at target. It is shut.
func NewGate(t testing.TB, target string) *Gate {
	t.Helper()
	g := &Gate{Addr: loopback(FreePort(t)), target: target, conns: map[net.Conn]struct{}{}}
	t.Cleanup(func() {
		g.Shut()
		g.running.Wait()
	})
	return g
}

// Open makes the gate forward connections.
func (g *Gate) Open(t testing.TB) {
	t.Helper()
	l, err := net.Listen("tcp", g.Addr)
	if err != nil {
		t.Fatalf("gate: %v", err)
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.listener != nil {
		l.Close()
		return
	}
	g.listener = l
	// Owned by the gate; ends when Shut closes the listener.
	g.running.Go(func() {
		for {
			client, err := l.Accept()
			if err != nil {
				return
			}
			// Owned by the gate; ends when either side closes the connection,
			// at the latest at Shut.
			g.running.Go(func() { g.forward(l, client) })
		}
	})
}

// Shut closes all connections and refuses new ones.
func (g *Gate) Shut() {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.listener != nil {
		g.listener.Close()
		g.listener = nil
	}
	for c := range g.conns {
		c.Close()
	}
}

// LocalPorts returns the local ports of the connections to the server, by which
// the server may identify them.
func (g *Gate) LocalPorts() []int {
	g.mu.Lock()
	defer g.mu.Unlock()
	var ports []int
	for c := range g.conns {
		if local, ok := c.LocalAddr().(*net.TCPAddr); ok && c.RemoteAddr().String() == g.target {
			ports = append(ports, local.Port)
		}
	}
	return ports
}

func (g *Gate) forward(l net.Listener, client net.Conn) {
	defer client.Close()
	server, err := net.Dial("tcp", g.target)
	if err != nil {
		return
	}
	defer server.Close()
	g.mu.Lock()
	if g.listener != l { // shut meanwhile
		g.mu.Unlock()
		return
	}
	g.conns[client], g.conns[server] = struct{}{}, struct{}{}
	g.mu.Unlock()
	var both sync.WaitGroup
	pipe := func(to, from net.Conn) {
		_, _ = io.Copy(to, from)
		to.Close()
		from.Close()
	}
	both.Go(func() { pipe(server, client) })
	both.Go(func() { pipe(client, server) })
	both.Wait()
	g.mu.Lock()
	delete(g.conns, client)
	delete(g.conns, server)
	g.mu.Unlock()
}
