package server

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	discovery "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/isthmus-mesh/isthmus/internal/testwait"
	mcpv1 "github.com/isthmus-mesh/isthmus/server/mcp/proto/isthmus/mcp/v1"
	"github.com/isthmus-mesh/isthmus/server/stream"
)

// One who sends requests that do not end is cut off when they take more memory
// than requests may, and a sink of another address sends a large one beside
// him.
func TestRequestBytes(t *testing.T) {
	s := serve(t, "listen: {xds: 127.0.0.1:0, admin: 127.0.0.1:0}\nlimits: {request_bytes: 67108864}")
	good := ask(t, s.XDSAddr(), entries)
	last := responses(t, good, entries, 1)

	dialer := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 0, 0, 2)}}
	conn, err := dialer.DialContext(t.Context(), "tcp", s.XDSAddr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	framer := http2.NewFramer(conn, conn)
	cut, permitted := make(chan struct{}), make(chan uint32, 1000)
	go func() { // ends with the connection
		defer close(cut)
		for {
			frame, err := framer.ReadFrame()
			if err != nil {
				return
			}
			if update, ok := frame.(*http2.WindowUpdateFrame); ok && update.StreamID != 0 && update.Increment >= 50<<20 {
				permitted <- update.StreamID
			}
		}
	}()
	if _, err := io.WriteString(conn, http2.ClientPreface); err != nil {
		t.Fatal(err)
	}
	if err := framer.WriteSettings(); err != nil {
		t.Fatal(err)
	}
	var block bytes.Buffer
	encoder := hpack.NewEncoder(&block)
	const streams = 4
	announce := binary.BigEndian.AppendUint32([]byte{0}, 60<<20)
	for i := range uint32(streams) {
		block.Reset()
		for _, f := range []hpack.HeaderField{
			{Name: ":method", Value: "POST"},
			{Name: ":scheme", Value: "http"},
			{Name: ":authority", Value: "x"},
			{Name: ":path", Value: discovery.AggregatedDiscoveryService_DeltaAggregatedResources_FullMethodName},
			{Name: "content-type", Value: "application/grpc"},
			{Name: "te", Value: "trailers"},
		} {
			if err := encoder.WriteField(f); err != nil {
				t.Fatal(err)
			}
		}
		if err := framer.WriteHeaders(http2.HeadersFrameParam{StreamID: 2*i + 1, BlockFragment: block.Bytes(), EndHeaders: true}); err != nil {
			t.Fatal(err)
		}
		if err := framer.WriteData(2*i+1, false, announce); err != nil {
			t.Fatal(err)
		}
	}
	// The bridge permits a whole request on each stream.
	for range streams {
		testwait.Receive(t, patience, "the permission to send a request", permitted)
	}
	// A byte in a frame of its own counts as 256: what the address may send in
	// two seconds exceeds the limit.
	sent := 0
	for err == nil && sent < streams*60<<20 {
		err = framer.WriteData(2*uint32(sent%streams)+1, false, []byte{0})
		sent++
	}
	select {
	case <-cut:
	case <-time.After(patience):
		t.Fatal("the connection is not closed")
	}
	if n := counter(t, s, "isthmus_connections_refused_total", limitRequests); n != 1 {
		t.Errorf("%v connections counted as closed, want one", n)
	}
	t.Logf("after %d frames", sent)

	// Of those who came before and come now nothing is shadowed.
	if err := good.SendMsg(&mcpv1.RequestResources{Collection: entries, ResponseNonce: last.GetNonce(), Incremental: true}); err != nil {
		t.Fatal(err)
	}
	responses(t, good, entries, 2)
	testwait.Eventually(t, patience, "handled requests not to count", func() (string, bool) {
		n := s.crowd.intake.total.Load()
		return fmt.Sprint(n), n < 4<<10
	})
}

// from is a connection of an address that has sent something.
type from struct {
	net.Conn
	host string
	sent io.Reader
}

func (f from) Read(b []byte) (int, error) { return f.sent.Read(b) }
func (f from) RemoteAddr() net.Addr       { return &net.TCPAddr{IP: net.ParseIP(f.host), Port: 1} }
func (from) LocalAddr() net.Addr          { return &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: 2} }
func (from) Close() error                 { return nil }

// An address that connects again and again, or sends headers without end, waits
// for itself, and another one does not wait.
func TestHostPace(t *testing.T) {
	const connectionBurst, headerBurst = 1000, 1000 * headerShare
	synctest.Test(t, func(t *testing.T) {
		var mu sync.Mutex
		slowed := map[string]int{} // guarded by mu
		n := newIntake(1<<30, connectionBurst, func(string) { t.Error("a connection was closed") }, func(what, peer string) {
			mu.Lock()
			defer mu.Unlock()
			slowed[what+" "+peer]++
		})
		accept := func(host string, sent []byte) net.Conn {
			t.Helper()
			conn, _, err := n.credentials(insecure.NewCredentials()).ServerHandshake(from{host: host, sent: bytes.NewReader(sent)})
			if err != nil {
				t.Fatal(err)
			}
			return conn
		}
		for range connectionBurst {
			_ = accept("10.0.0.1", nil).Close()
		}
		if len(slowed) != 0 {
			t.Errorf("%v within the burst", slowed)
		}
		_ = accept("10.0.0.1", nil).Close()
		_ = accept("10.0.0.2", nil).Close()

		headers := bytes.NewBufferString(http2.ClientPreface)
		framer := http2.NewFramer(headers, nil)
		for i := range headerBurst / (8 << 10) {
			if err := framer.WriteHeaders(http2.HeadersFrameParam{StreamID: uint32(2*i + 1), BlockFragment: make([]byte, 8<<10), EndHeaders: true}); err != nil {
				t.Fatal(err)
			}
		}
		bomb := append([]byte(nil), headers.Bytes()...)
		for i, host := range []string{"10.0.0.3", "10.0.0.3", "10.0.0.4"} { // a new connection is no new burst
			conn := accept(host, bomb)
			if _, err := io.Copy(io.Discard, conn); err != nil {
				t.Fatal(err)
			}
			_ = conn.Close()
			if (len(slowed) > 1) != (i > 0) {
				t.Errorf("after %d: %v", i+1, slowed)
			}
		}
		// Who would have to wait for long is sent away.
		var closed int
		var all sync.WaitGroup
		for range 1000 {
			conn := accept("10.0.0.5", bomb)
			all.Go(func() {
				if _, err := io.Copy(io.Discard, conn); err != nil {
					mu.Lock()
					closed++
					mu.Unlock()
				}
				_ = conn.Close()
			})
		}
		all.Wait()
		if closed < 800 {
			t.Errorf("%d of 1000 bombs were cut off", closed)
		}
		delete(slowed, "headers 10.0.0.5")
		for _, what := range []string{"connections 10.0.0.1", "headers 10.0.0.3"} {
			if slowed[what] == 0 {
				t.Errorf("%s were not held up: %v", what, slowed)
			}
			delete(slowed, what)
		}
		if len(slowed) != 0 {
			t.Errorf("others were held up: %v", slowed)
		}
		if total := n.total.Load(); total != 0 || len(n.conns) != 0 {
			t.Errorf("%d bytes and %d connections are left", total, len(n.conns))
		}
		// Addresses that have left are forgotten some time.
		for i := range maxHosts {
			n.leave(n.paceOf(fmt.Sprint(i)))
		}
		if len(n.hosts) > maxHosts {
			t.Errorf("%d addresses are remembered", len(n.hosts))
		}
	})
}

// An address sends requests at its pace, on however many connections. What is
// handled is no part of it as far as an acknowledgement needs, and another
// address does not wait.
func TestHostRequests(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var mu sync.Mutex
		slowed := map[string]int{} // guarded by mu
		n := newIntake(1<<30, 100, func(string) { t.Error("a connection was closed") }, func(what, peer string) {
			mu.Lock()
			defer mu.Unlock()
			slowed[what+" "+peer]++
		})
		// requests sends DATA frames of an address on some connections, and
		// returns how long that takes.
		requests := func(host string, connections, frames, size int, handle bool) time.Duration {
			sent := bytes.NewBufferString(http2.ClientPreface)
			framer := http2.NewFramer(sent, nil)
			for range frames {
				if err := framer.WriteData(1, false, make([]byte, size)); err != nil {
					t.Fatal(err)
				}
			}
			began := time.Now()
			var all sync.WaitGroup
			for range connections {
				c := n.enter(from{host: host, sent: bytes.NewReader(sent.Bytes())}, host, n.paceOf(host))
				all.Go(func() {
					defer c.Close()
					for b := make([]byte, frameSize+size); ; {
						if _, err := c.Read(b); err != nil {
							return
						}
						if handle {
							c.handled(int64(size))
						}
					}
				})
			}
			all.Wait()
			return time.Since(began)
		}
		const size = 16<<10 - frameCost
		if took := requests("10.0.0.1", 2, dataBurst/(16<<10)/2, size, false); took != 0 {
			t.Errorf("the burst took %v", took)
		}
		if took := requests("10.0.0.1", 4, dataRate/(16<<10), size, true); took < 3500*time.Millisecond || took > 4*time.Second {
			t.Errorf("what may come in four seconds took %v", took)
		}
		// Acknowledgements: their frames only.
		if took := requests("10.0.0.2", 10, 20_000, 100, true); took > 100*time.Millisecond {
			t.Errorf("200,000 acknowledgements took %v", took)
		}
		mu.Lock()
		defer mu.Unlock()
		if slowed["bytes of requests 10.0.0.1"] == 0 || len(slowed) != 1 {
			t.Errorf("held up: %v", slowed)
		}
	})
}

// A change wakes all streams of an address that has some, and as many as may be
// woken in the time of one that has very many; they are not held up when there
// are few.
func TestHostTurns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newIntake(1<<20, 100, func(string) {}, func(string, string) {})
		c := n.enter(from{host: "10.0.0.1"}, "10.0.0.1", n.paceOf("10.0.0.1"))
		defer c.Close()
		wake := func(times int) time.Duration {
			began := time.Now()
			for range times {
				c.pace.turn(t.Context())
			}
			return time.Since(began)
		}
		for range crowded {
			c.count(1)
		}
		if took := wake(10 * turnRate); took != 0 {
			t.Errorf("changes of %d streams waited %v", crowded, took)
		}
		c.count(1)
		if took := wake(turnBurst + turnRate); took < time.Second-time.Millisecond || took > time.Second+time.Millisecond {
			t.Errorf("changes that many streams may have in a second and at once took %v", took)
		}
		c.count(-1)
		if took := wake(turnRate); took != 0 {
			t.Errorf("after one has left, changes waited %v", took)
		}
	})
}

// However the bytes of a connection are cut, the DATA frames are counted that a
// reader of HTTP/2 finds there.
func FuzzIntake(f *testing.F) {
	f.Add([]byte{0, 1, 2, 3}, []byte{1, 200, 3})
	f.Add([]byte{0, 255, 0, 0, 0, 7}, []byte{9})
	f.Fuzz(func(t *testing.T, kinds, cuts []byte) {
		stream := bytes.NewBufferString(http2.ClientPreface)
		framer := http2.NewFramer(stream, nil)
		var want, wasted int64
		for i, k := range kinds {
			switch id := uint32(i + 1); k % 4 {
			case 0:
				size := int(k) * i % (16 << 10)
				_ = framer.WriteData(id, false, make([]byte, size))
				want, wasted = want+int64(size), wasted+waste(size)
			case 1:
				_ = framer.WriteHeaders(http2.HeadersFrameParam{StreamID: id, BlockFragment: make([]byte, k)})
			case 2:
				_ = framer.WritePing(false, [8]byte{})
			case 3:
				_ = framer.WriteRawFrame(http2.FrameType(k), 0, id, make([]byte, k))
			}
		}
		c := &intakeConn{preface: len(http2.ClientPreface), header: make([]byte, 0, frameSize)}
		var got, gotWasted int64
		for i := 0; stream.Len() > 0; i++ {
			size := 1 << 10
			if len(cuts) > 0 {
				size = 1 + int(cuts[i%len(cuts)])
			}
			b, w := c.parse(stream.Next(size))
			got, gotWasted = got+b, gotWasted+w
		}
		if got != want || gotWasted != wasted {
			t.Errorf("%d bytes and %d wasted, want %d and %d", got, gotWasted, want, wasted)
		}
	})
}

// Ten connections of an address that open streams without end have the pace of
// one address together; another address has its own, and what would wait for
// longer than a sink is patient is refused.
func TestHostStreams(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var mu sync.Mutex
		slowed := map[string]int{} // guarded by mu
		held := func(what string) int {
			mu.Lock()
			defer mu.Unlock()
			return slowed[what]
		}
		n := newIntake(1<<20, 100, func(string) {}, func(what, peer string) {
			mu.Lock()
			defer mu.Unlock()
			slowed[what+" "+peer]++
		})
		connect := func(host string) *intakeConn {
			c := n.enter(from{host: host}, host, n.paceOf(host))
			t.Cleanup(func() { _ = c.Close() })
			return c
		}
		opened := 0
		var all sync.WaitGroup
		for range 10 {
			c := connect("10.0.0.1")
			all.Go(func() {
				for range 300 {
					if err := c.open(); err != nil {
						t.Errorf("a stream that waits for its turn: %v", err)
					}
					mu.Lock()
					opened++
					mu.Unlock()
				}
			})
		}
		began := time.Now()
		other := connect("10.0.0.2")
		time.Sleep(time.Second)
		mu.Lock()
		if want := hostStreamBurst + hostStreamRate; opened < want-10 || opened > want+10 {
			t.Errorf("%d streams were opened in a second, want %d", opened, want)
		}
		mu.Unlock()
		at := time.Now()
		if err := other.open(); err != nil || time.Since(at) != 0 || held("streams 10.0.0.2") != 0 {
			t.Errorf("a stream of another address: %v after %v", err, time.Since(at))
		}
		all.Wait()
		if took := time.Since(began); took > 5*time.Second || held("streams 10.0.0.1") == 0 {
			t.Errorf("3000 streams took %v, held up %d times", took, held("streams 10.0.0.1"))
		}
		for range 13 {
			n.paceOf("10.0.0.1").streams.ReserveN(time.Now(), hostStreamBurst)
		}
		if err := connect("10.0.0.1").open(); err == nil {
			t.Error("a stream that would wait for six seconds is not refused")
		}
		if err := (*intakeConn)(nil).open(); err != nil {
			t.Errorf("on a connection that is not counted: %v", err)
		}
	})
}

// What counts as one address is one of IPv4, in either notation, and a /64 of
// IPv6: the limits of connections and all paces have it in common.
func TestNetworks(t *testing.T) {
	for _, c := range [][2]string{
		{"10.0.0.1:1", "10.0.0.1"},
		{"[::ffff:10.0.0.1]:1", "10.0.0.1"},
		{"[2001:db8:0:1::1]:1", "2001:db8:0:1::/64"},
		{"[2001:db8:0:1:ffff::2]:1", "2001:db8:0:1::/64"},
		{"[2001:db8:0:2::1]:1", "2001:db8:0:2::/64"},
		{"[fe80::1%lo]:1", "fe80::/64"},
	} {
		address, err := netip.ParseAddrPort(c[0])
		if err != nil {
			t.Fatal(err)
		}
		if got, ok := stream.HostOf(address.String()); !ok || got != c[1] {
			t.Errorf("%s counts as %s, want %s", c[0], got, c[1])
		}
	}
	if got, ok := stream.HostOf("@"); ok {
		t.Errorf("a unix socket counts as %s", got)
	}
	crowd := newTestCrowd(2)
	n := crowd.intake
	queue := make(chan net.Conn, 4)
	for i := range 3 {
		queue <- from{host: fmt.Sprintf("2001:db8::%d", i)}
	}
	queue <- from{host: "2001:db8:1::"}
	l := crowdListener{queued{conns: queue}, crowd}
	var got []string
	for range 3 {
		conn, err := l.Accept()
		if err != nil {
			t.Fatal(err)
		}
		got = append(got, conn.RemoteAddr().String())
		counted, _, err := n.credentials(insecure.NewCredentials()).ServerHandshake(conn)
		if err != nil {
			t.Fatal(err)
		}
		defer counted.Close()
	}
	if want := []string{"[2001:db8::]:1", "[2001:db8::1]:1", "[2001:db8:1::]:1"}; !slices.Equal(got, want) || len(n.hosts) != 2 {
		t.Errorf("of at most 2 connections for an address accepted %v, want %v; %d paces", got, want, len(n.hosts))
	}
}

// queued is a listener of connections that are there already.
type queued struct {
	net.Listener
	conns chan net.Conn
}

func (q queued) Accept() (net.Conn, error) { return <-q.conns, nil }

// Frames that are no requests have a pace for each address: settings, pings,
// windows, resets, and those that HTTP/2 does not know. Who reads responses may
// send as many as that takes.
func TestHostFrames(t *testing.T) {
	const connections, burst = 1000, 1000 * framesShare
	write := map[string]func(f *http2.Framer) error{
		"settings": func(f *http2.Framer) error { return f.WriteSettings() },
		"ping":     func(f *http2.Framer) error { return f.WritePing(false, [8]byte{}) },
		"window":   func(f *http2.Framer) error { return f.WriteWindowUpdate(0, 1) },
		"reset":    func(f *http2.Framer) error { return f.WriteRSTStream(1, http2.ErrCodeCancel) },
		"empty":    func(f *http2.Framer) error { return f.WriteContinuation(1, false, nil) },
		"unknown":  func(f *http2.Framer) error { return f.WriteRawFrame(99, 0, 0, nil) },
	}
	for name, one := range write {
		synctest.Test(t, func(t *testing.T) {
			var mu sync.Mutex
			slowed := map[string]int{} // guarded by mu
			n := newIntake(1<<30, connections, func(string) { t.Error("a connection was closed") }, func(what, peer string) {
				mu.Lock()
				defer mu.Unlock()
				slowed[what+" "+peer]++
			})
			// send sends frames of an address on four connections, and returns
			// how long that takes, and how many were closed.
			send := func(host string, count, responses int) (took time.Duration, closed int) {
				sent := bytes.NewBufferString(http2.ClientPreface)
				for f := http2.NewFramer(sent, nil); count > 0; count-- {
					if err := one(f); err != nil {
						t.Fatal(err)
					}
				}
				began := time.Now()
				var all sync.WaitGroup
				for range 4 {
					c := n.enter(from{host: host, sent: bytes.NewReader(sent.Bytes())}, host, n.paceOf(host))
					for range responses {
						c.permit(100)
					}
					all.Go(func() {
						defer c.Close()
						for b := make([]byte, 1<<10); ; {
							if _, err := c.Read(b); errors.Is(err, io.EOF) {
								return
							} else if err != nil {
								mu.Lock()
								closed++
								mu.Unlock()
								return
							}
						}
					})
				}
				all.Wait()
				return time.Since(began), closed
			}
			if took, closed := send("10.0.0.1", burst/4, 0); took != 0 || closed != 0 {
				t.Errorf("%s: the burst took %v, %d closed", name, took, closed)
			}
			if took, closed := send("10.0.0.1", burst/8, 0); took < refill/4 || took > refill || closed != 0 {
				t.Errorf("%s: half as many more took %v, want %v; %d closed", name, took, refill/2, closed)
			}
			if took, closed := send("10.0.0.2", burst*perResponse, burst); took != 0 || closed != 0 {
				t.Errorf("%s: a sink that gets a response for each waited %v, %d closed", name, took, closed)
			}
			// What has to wait for long is not waited for, by the next either.
			var flood sync.WaitGroup
			for range 200 {
				c := n.enter(from{host: "10.0.0.1"}, "10.0.0.1", n.paceOf("10.0.0.1"))
				flood.Go(func() {
					_ = n.hold(c.gone, c.pace.frames, burst/10, "frames", "10.0.0.1")
					_ = c.Close()
				})
			}
			synctest.Wait()
			began := time.Now()
			_ = n.hold(t.Context(), n.paceOf("10.0.0.1").frames, 1, "frames", "10.0.0.1")
			if took := time.Since(began); took > paceTime {
				t.Errorf("%s: after a flood a frame waits %v", name, took)
			}
			flood.Wait()
			mu.Lock()
			defer mu.Unlock()
			if slowed["frames 10.0.0.1"] == 0 || len(slowed) != 1 {
				t.Errorf("%s: held up: %v", name, slowed)
			}
		})
	}
}

// A verified identity has the paces of one address and as many connections,
// however many addresses it comes from; another one does not wait.
func TestIdentityPace(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const most = 10
		n := newTestCrowd(most).intake
		conn := func(i int) *intakeConn {
			host := fmt.Sprintf("10.0.0.%d", i)
			c := n.enter(from{host: host}, host, n.paceOf(host))
			t.Cleanup(func() { _ = c.Close() })
			return c
		}
		var mu sync.Mutex
		var leaves []func() // guarded by mu
		began := time.Now()
		var all sync.WaitGroup
		for i := range most {
			c := conn(i)
			all.Go(func() {
				for range (hostStreamBurst + hostStreamRate) / most {
					_, leave, err := n.join(c, "spiffe://a")
					if err != nil {
						t.Error(err)
						return
					}
					mu.Lock()
					leaves = append(leaves, leave)
					mu.Unlock()
				}
			})
		}
		all.Wait()
		if took := time.Since(began); took < 900*time.Millisecond || took > time.Second {
			t.Errorf("what may be opened in a second took %v", took)
		}
		over := conn(most)
		if _, _, err := n.join(over, "spiffe://a"); err == nil || !strings.Contains(err.Error(), "limits.connections_per_peer allows (10)") {
			t.Errorf("on one more connection: %v", err)
		}
		began = time.Now()
		_, leave, err := n.join(over, "spiffe://b")
		if took := time.Since(began); err != nil || took != 0 {
			t.Fatalf("another identity: %v after %v", err, took)
		}
		leave()
		// Changes wake as many streams of all its addresses as of one.
		h := n.paceOf(identityPrefix + "spiffe://a")
		a := account{paces: []*hostPace{over.pace, h}}
		began = time.Now()
		for range turnBurst + turnRate {
			a.Turn(t.Context())
		}
		if took := time.Since(began); took < 900*time.Millisecond || took > time.Second {
			t.Errorf("what may be woken in a second took %v", took)
		}
		for _, leave := range leaves {
			leave()
		}
		if n.leave(h); h.open != 0 || len(h.on) != 0 || h.live.Load() != 0 {
			t.Errorf("%d streams, %d connections are left", h.open, len(h.on))
		}
	})
}
