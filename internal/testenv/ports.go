package testenv

import (
	"fmt"
	"math/rand/v2"
	"net"
	"strconv"
	"sync"
	"testing"
)

// Ports are below the ranges from which Linux and macOS assign local ports of
// outgoing connections: a restarted server then finds its port free, and a
// client that dials a stopped server on loopback cannot connect to itself.
const (
	firstPort = 20000
	lastPort  = 31999
)

var handedOut = struct {
	sync.Mutex
	ports map[int]bool
}{ports: map[int]bool{}}

// FreePort returns a loopback port without a listener, for TCP and UDP, which
// no other call in this process has returned. Another process may still use it;
// the caller then retries with another port.
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
	addr := Loopback(port)
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

// Loopback returns the address of a port on 127.0.0.1.
func Loopback(port int) string { return net.JoinHostPort("127.0.0.1", strconv.Itoa(port)) }

// ReservePorts reserves ports as FreePort does, all or none.
func ReservePorts(ports ...int) bool {
	handedOut.Lock()
	defer handedOut.Unlock()
	for _, p := range ports {
		if p < firstPort || p > lastPort || handedOut.ports[p] || probe(p) != nil {
			return false
		}
	}
	for _, p := range ports {
		handedOut.ports[p] = true
	}
	return true
}
