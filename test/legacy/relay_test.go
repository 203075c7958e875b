package legacy

import (
	"io"
	"net"
	"sync"
	"testing"
	"time"
)

// relay is a TCP address that accepts connections all the time, as some load
// balancers do: those for which there is nobody behind it wait until there is
// somebody.
type relay struct {
	address string
	target  string
	stop    chan struct{} // closed at the end of the test

	running sync.WaitGroup
}

func newRelay(t testing.TB, target string) *relay {
	t.Helper()
	r := &relay{target: target, stop: make(chan struct{})}
	listener := listen(t, &r.address)
	// Owned by the relay; ends with the listener.
	r.running.Go(func() {
		for {
			client, err := listener.Accept()
			if err != nil {
				return
			}
			// Owned by the relay; ends with either side of the connection, at
			// the latest with the relay.
			r.running.Go(func() { r.forward(client) })
		}
	})
	t.Cleanup(func() {
		listener.Close()
		close(r.stop)
		r.running.Wait()
	})
	return r
}

func (r *relay) forward(client net.Conn) {
	defer client.Close()
	var server net.Conn
	again := time.NewTicker(20 * time.Millisecond)
	defer again.Stop()
	for server == nil {
		var err error
		if server, err = net.Dial("tcp", r.target); err == nil {
			break
		}
		select {
		case <-again.C:
		case <-r.stop:
			return
		}
	}
	defer server.Close()
	ended := make(chan struct{}, 2)
	pipe := func(to, from net.Conn) {
		_, _ = io.Copy(to, from)
		ended <- struct{}{}
	}
	var both sync.WaitGroup
	both.Go(func() { pipe(server, client) })
	both.Go(func() { pipe(client, server) })
	select {
	case <-ended:
	case <-r.stop:
	}
	client.Close()
	server.Close()
	both.Wait()
}
