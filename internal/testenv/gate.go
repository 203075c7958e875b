package testenv

import (
	"io"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// Gate forwards TCP connections to a server while it is open. While shut, it
// refuses new connections and has closed existing ones, as for an unreachable
// server. Its address does not change.
type Gate struct {
	// Addr is where clients connect, host:port.
	Addr string

	target string
	delay  atomic.Int64  // of what is forwarded, in nanoseconds
	end    chan struct{} // closed at the end of the test

	mu       sync.Mutex
	listener net.Listener // nil while shut
	cut      int          // see CutAfter
	conns    map[net.Conn]struct{}
	running  sync.WaitGroup
}

// NewGate returns a gate to the server at target. It is shut.
func NewGate(t testing.TB, target string) *Gate {
	t.Helper()
	g := &Gate{Addr: Loopback(FreePort(t)), target: target, cut: -1, conns: map[net.Conn]struct{}{}, end: make(chan struct{})}
	t.Cleanup(func() {
		close(g.end)
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

// CutAfter closes all connections. Later ones are closed after the server has
// sent n bytes, or with -1 are whole again.
func (g *Gate) CutAfter(n int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.cut = n
	for c := range g.conns {
		c.Close()
	}
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

// Delay makes what is forwarded in either direction from now on arrive later.
func (g *Gate) Delay(d time.Duration) { g.delay.Store(int64(d)) }

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
	cut := g.cut
	g.mu.Unlock()
	var both sync.WaitGroup
	closeBoth := func() {
		client.Close()
		server.Close()
	}
	pipe := func(to net.Conn, from io.Reader) {
		g.copy(to, from, closeBoth)
		closeBoth()
	}
	both.Go(func() { pipe(server, client) })
	both.Go(func() {
		if cut < 0 {
			pipe(client, server)
		} else {
			pipe(client, io.LimitReader(server, int64(cut)))
		}
	})
	both.Wait()
	g.mu.Lock()
	delete(g.conns, client)
	delete(g.conns, server)
	g.mu.Unlock()
}

// copy forwards one direction until either side closes its connection; end
// is called when it cannot write. At most 256 pieces wait for their time; then
// it reads no further.
func (g *Gate) copy(to net.Conn, from io.Reader, end func()) {
	type piece struct {
		data []byte
		due  time.Time
	}
	pieces := make(chan piece, 256)
	var writer sync.WaitGroup
	writer.Go(func() { // ends when the reader does
		broken := false
		for p := range pieces {
			if broken {
				continue
			}
			if wait := time.Until(p.due); wait > 0 {
				select {
				case <-time.After(wait):
				case <-g.end:
				}
			}
			if _, err := to.Write(p.data); err != nil {
				broken = true
				end() // of the reader
			}
		}
	})
	buffer := make([]byte, 64<<10)
	for {
		n, err := from.Read(buffer)
		if n > 0 {
			pieces <- piece{append([]byte(nil), buffer[:n]...), time.Now().Add(time.Duration(g.delay.Load()))}
		}
		if err != nil {
			break
		}
	}
	close(pieces)
	writer.Wait()
}
