package testenv

import (
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"syscall"
	"testing"
)

// Ports are below the ranges from which Linux and macOS assign local ports of
// outgoing connections: a restarted server then finds its port free, and a
// client that dials a stopped server on loopback cannot connect to itself.
const (
	firstPort = 20000
	lastPort  = 31999
)

// handedOut holds a locked file for each port that this process has taken.
var handedOut = struct {
	sync.Mutex
	ports map[int]*os.File
}{ports: map[int]*os.File{}}

// FreePort returns a loopback port without a listener, for TCP and UDP, which
// no other call in this process or in one of other tests has returned. Another
// program may still use it; the caller then retries with another port.
func FreePort(t testing.TB) int {
	t.Helper()
	handedOut.Lock()
	defer handedOut.Unlock()
	var last error
	for range 1000 {
		port := firstPort + rand.IntN(lastPort-firstPort+1)
		if last = takeLocked(port); last == nil {
			return port
		}
	}
	t.Fatalf("no free port on 127.0.0.1 between %d and %d: %v", firstPort, lastPort, last)
	return 0
}

// takeLocked takes a port if it is free, until this process ends.
func takeLocked(port int) error {
	if handedOut.ports[port] != nil {
		return fmt.Errorf("port %d is taken by this process", port)
	}
	dir := filepath.Join(os.TempDir(), "isthmus-ports")
	if err := os.MkdirAll(dir, 0o777); err != nil {
		return err
	}
	f, err := os.OpenFile(filepath.Join(dir, strconv.Itoa(port)), os.O_CREATE|os.O_RDWR, 0o666)
	if err != nil {
		return err
	}
	if err = syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err == nil {
		err = probe(port)
	}
	if err != nil {
		f.Close()
		return err
	}
	handedOut.ports[port] = f
	return nil
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
	for i, p := range ports {
		if p < firstPort || p > lastPort || takeLocked(p) != nil {
			for _, taken := range ports[:i] {
				handedOut.ports[taken].Close()
				delete(handedOut.ports, taken)
			}
			return false
		}
	}
	return true
}
