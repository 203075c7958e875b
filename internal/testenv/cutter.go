package testenv

import (
	"net"
	"sync"
	"testing"
)

// Cutter is a proxy that cuts each connection after a number of bytes from the
// server.
type Cutter struct {
	listener net.Listener
	target   string
	running  sync.WaitGroup

	mu    sync.Mutex // guards the fields below
	after int        // -1: all
	conns map[net.Conn]bool
}

// NewCutter starts a proxy of target, host:port, that cuts nothing yet. It ends
// with the test.
func NewCutter(t testing.TB, target string) *Cutter {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p := &Cutter{listener: l, target: target, after: -1, conns: map[net.Conn]bool{}}
	p.running.Go(func() {
		for {
			client, err := l.Accept()
			if err != nil {
				return
			}
			p.running.Go(func() { p.forward(client) })
		}
	})
	t.Cleanup(func() {
		l.Close()
		p.Cut(0)
		p.running.Wait()
	})
	return p
}

// Addr returns the address of the proxy, host:port.
func (p *Cutter) Addr() string { return p.listener.Addr().String() }

// Cut closes all connections. New ones get n bytes, or with -1 all.
func (p *Cutter) Cut(n int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.after = n
	for c := range p.conns {
		c.Close()
	}
}

func (p *Cutter) forward(client net.Conn) {
	defer client.Close()
	server, err := net.Dial("tcp", p.target)
	if err != nil {
		return
	}
	defer server.Close()
	p.mu.Lock()
	left := p.after
	p.conns[client], p.conns[server] = true, true
	p.mu.Unlock()
	defer func() {
		p.mu.Lock()
		delete(p.conns, client)
		delete(p.conns, server)
		p.mu.Unlock()
	}()
	var up sync.WaitGroup
	defer up.Wait()
	up.Go(func() { copyUpTo(server, client, -1) })
	copyUpTo(client, server, left)
	client.Close()
	server.Close()
}

// copyUpTo copies until an end, or until left bytes were copied; a negative
// left is no limit.
func copyUpTo(to, from net.Conn, left int) {
	buf := make([]byte, 32<<10)
	for left != 0 {
		n, err := from.Read(buf)
		if left > 0 && n >= left {
			n, left = left, 0
		} else if left > 0 {
			left -= n
		}
		if _, failed := to.Write(buf[:n]); failed != nil || err != nil {
			return
		}
	}
}
