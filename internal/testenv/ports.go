package testenv

import (
	"fmt"
	"math/rand/v2"
	"net"
	"strconv"
	"sync"
	"testing"
)

// Ports are taken from below the ranges from which Linux and macOS take the local ports of outgoing connections: a
// server that is restarted then finds its port free, and a client that dials a stopped server on loopback cannot be
// connected to itself.
const (
	firstPort = 20000
	lastPort  = 31999
)

var handedOut = struct {
	sync.Mutex
	ports map[int]bool
}{ports: map[int]bool{}}

// FreePort returns a loopback port on which nothing listens, for TCP or UDP, and that no other call in this process
// got. Another process may still take it: whoever starts a server on it tries again with another.
func FreePort(t testing.TB) int {
	t.Helper()
	handedOut.Lock()
	defer handedOut.Unlock()
	var last error
	for range 1000 {
		port := firstPort + rand.IntN(lastPort-firstPort+1)
		if handedOut.ports[port] {
			continue
		}
		if last = probe(port); last == nil {
			handedOut.ports[port] = true
			return port
		}
	}
	t.Fatalf("no free port on 127.0.0.1 between %d and %d: %v", firstPort, lastPort, last)
	return 0
}

func probe(port int) error {
	addr := loopback(port)
	tcp, err := net.Listen("tcp", addr)
	if err != nil {
		return fmt.Errorf("listen tcp %s: %w", addr, err)
	}
	defer tcp.Close()
	udp, err := net.ListenPacket("udp", addr)
	if err != nil {
		return fmt.Errorf("listen udp %s: %w", addr, err)
	}
	return udp.Close()
}

func loopback(port int) string { return net.JoinHostPort("127.0.0.1", strconv.Itoa(port)) }
