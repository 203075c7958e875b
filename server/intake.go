package server

import (
	"context"
	"encoding/binary"
	"maps"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/time/rate"
	"google.golang.org/grpc/credentials"

	"github.com/isthmus-mesh/isthmus/server/stream"
)

// prefixSize is the size of the prefix of a gRPC message, frameSize of the
// header of an HTTP/2 frame; RFC 9113, section 4.1.
const prefixSize, frameSize = 5, 9

const (
	// headerShare is what the headers of a connection may have when all that an
	// IP address may have are opened at once, in bytes: a token and more. A
	// compressed header of 10 KB takes as long as 30 MB.
	headerShare = 2 << 10
	// framesShare is how many frames other than those of requests a connection
	// may send: what opens it, its streams and its pings. Each response permits
	// some more, as its reader extends the window.
	framesShare = 10
	// refill is the time in which an address may again have as many connections
	// and headers at once.
	refill = 10 * time.Second
	// hostStreamRate is how many streams an IP address opens in a second, after
	// the first hostStreamBurst: a stream takes 0.1 ms of a processor to open,
	// and what other sinks wait for waits behind all that are opened at once.
	hostStreamRate, hostStreamBurst = 500, 1000
	// paceTime bounds how long a connection is held up; beyond it is closed, or
	// what it sent is refused.
	paceTime = 5 * time.Second
	// maxHosts bounds the addresses without a connection that are remembered.
	maxHosts = 10_000
)

// hostPace holds up an address, or a verified identity, that connects, opens
// streams or sends headers and requests faster than any sinks do, or that has
// so many streams that to wake them takes the time of others.
type hostPace struct {
	connections, streams, headers, frames *rate.Limiter
	data, light, turns, queries           pace
	open                                  int                 // connections, of an identity streams; guarded by intake.mu
	on                                    map[*intakeConn]int // streams by connection; guarded by intake.mu
	live                                  atomic.Int64        // streams
}

// countLocked counts streams on a connection, and returns how many there are.
func (h *hostPace) countLocked(c *intakeConn, more int) int {
	h.live.Add(int64(more))
	if h.on == nil {
		h.on = make(map[*intakeConn]int)
	}
	n := h.on[c] + more
	if h.on[c] = n; n == 0 {
		delete(h.on, c)
	}
	return n
}

// turn waits until a change may wake one of the streams.
func (h *hostPace) turn(ctx context.Context) {
	if h.live.Load() > crowded {
		h.turns.wait(ctx, 1)
	}
}

// waste returns what a DATA frame takes in memory besides its bytes: gRPC keeps
// each in a buffer of its own, of 4 or 16 KiB if it is larger than 1 KiB. Who
// sends one byte in each takes a hundred times as much as he sends.
func waste(size int) int64 {
	const entry = 256 // in the queue of the stream
	switch {
	case size > 4<<10:
		return int64(max(16<<10-size, 0)) + entry
	case size > 1<<10:
		return int64(4<<10-size) + entry
	}
	return entry
}

// intake bounds the memory of requests that are being received, on all ports
// together: gRPC collects a request in memory until it is complete, and one may
// have 64 MiB. A request counts until its stream asks for the next one, when it
// was decoded and handled. Beyond the limit a connection of the address that
// takes most is closed, which costs those of others nothing.
type intake struct {
	limit  int64
	peer   int // connections that an IP address may have
	total  atomic.Int64
	refuse func(peer string)
	slowed func(what, peer string)
	gone   func(c *intakeConn) // called when one is closed, if set

	mu sync.Mutex
	// guarded by mu
	conns map[string]*intakeConn // by both ends
	hosts map[string]*hostPace
}

func newIntake(limit int64, perPeer int, refuse func(peer string), slowed func(what, peer string)) *intake {
	return &intake{limit: limit, peer: perPeer, refuse: refuse, slowed: slowed, conns: make(map[string]*intakeConn), hosts: make(map[string]*hostPace)}
}

// paceOf returns the pace of an address, and counts a connection of it.
func (n *intake) paceOf(host string) *hostPace {
	n.mu.Lock()
	defer n.mu.Unlock()
	h := n.hosts[host]
	if h == nil {
		if len(n.hosts) >= maxHosts {
			maps.DeleteFunc(n.hosts, func(_ string, h *hostPace) bool { return h.open == 0 })
		}
		refilled := func(burst int) *rate.Limiter {
			return rate.NewLimiter(rate.Limit(float64(burst)/refill.Seconds()), burst)
		}
		// One Read has at most the 32 KiB that gRPC reads at a time.
		h = &hostPace{
			connections: refilled(n.peer), headers: refilled(max(headerShare*n.peer, 64<<10)),
			frames:  refilled(max(framesShare*n.peer, 32<<10/frameSize)),
			streams: rate.NewLimiter(hostStreamRate, hostStreamBurst),
			data:    pace{every: time.Second / dataRate, burst: dataBurst},
			light:   pace{every: time.Second / lightRate, burst: lightBurst},
			turns:   pace{every: time.Second / turnRate, burst: turnBurst},
			queries: pace{every: time.Second / queryRate, burst: queryBurst},
		}
		n.hosts[host] = h
	}
	h.open++
	return h
}

func (n *intake) leave(h *hostPace) {
	n.mu.Lock()
	defer n.mu.Unlock()
	h.open--
}

// credentials returns c with connections that are counted. They are counted
// above TLS, as the bytes of requests are.
func (n *intake) credentials(c credentials.TransportCredentials) credentials.TransportCredentials {
	return intakeCredentials{c, n}
}

type intakeCredentials struct {
	credentials.TransportCredentials
	intake *intake
}

// ServerHandshake implements [credentials.TransportCredentials].
func (c intakeCredentials) ServerHandshake(raw net.Conn) (net.Conn, credentials.AuthInfo, error) {
	n := c.intake
	host, ok := stream.HostOf(raw.RemoteAddr().String())
	if !ok {
		return c.TransportCredentials.ServerHandshake(raw)
	}
	pace := n.paceOf(host)
	if err := n.hold(context.Background(), pace.connections, 1, "connections", host); err != nil {
		n.leave(pace)
		return nil, nil, err
	}
	conn, info, err := c.TransportCredentials.ServerHandshake(raw)
	if err != nil {
		n.leave(pace)
		return conn, info, err
	}
	return n.enter(conn, host, pace), info, nil
}

// Clone implements [credentials.TransportCredentials].
func (c intakeCredentials) Clone() credentials.TransportCredentials {
	return intakeCredentials{c.TransportCredentials.Clone(), c.intake}
}

// pacedConn is a connection of an address that has a pace.
type pacedConn struct {
	net.Conn
	intake *intake
	host   string
	pace   *hostPace
	gone   context.Context //nolint:containedctx // ends with the connection
	leave  func()
}

func (n *intake) paced(conn net.Conn, host string, of *hostPace) pacedConn {
	ctx, cancel := context.WithCancel(context.Background()) // until Close
	return pacedConn{conn, n, host, of, ctx, sync.OnceFunc(func() {
		cancel()
		n.leave(of)
	})}
}

// intakeConn counts what a connection has sent and the bridge has not handled.
type intakeConn struct {
	pacedConn
	ends   string // see endsOf
	opened pace   // of streams

	// The state of the reader: bytes of the preface that are missing, a header
	// of a frame that has begun, what is left of a frame, and its kind.
	preface int
	header  []byte
	left    int
	kind    http2.FrameType
	fields  int // bytes of headers that were read and not held up
	data    int // likewise of requests, and frameCost for each of their frames
	frames  int // likewise all other frames

	mu sync.Mutex
	// guarded by mu
	bytes, wasted int64
	permitted     int // frames, by responses
	closed        bool
}

func (n *intake) enter(conn net.Conn, host string, of *hostPace) *intakeConn {
	c := &intakeConn{pacedConn: n.paced(conn, host, of), ends: endsOf(conn.LocalAddr(), conn.RemoteAddr()), opened: pace{every: time.Second / streamRate, burst: streamBurst}, preface: len(http2.ClientPreface), header: make([]byte, 0, frameSize)}
	n.mu.Lock()
	defer n.mu.Unlock()
	n.conns[c.ends] = c
	return c
}

// of returns the connection between two ends, nil if it is not counted.
func (n *intake) of(ends string) *intakeConn {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.conns[ends]
}

// Read implements [net.Conn].
func (c *intakeConn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	if bytes, wasted := c.parse(b[:n]); bytes+wasted > 0 {
		c.add(bytes, wasted)
		if c.intake.total.Load() > c.intake.limit {
			c.intake.shed()
		}
	}
	// Headers and requests are held up before gRPC decodes them, in the
	// goroutine that reads this connection.
	if fields := c.fields; fields > 0 {
		c.fields = 0
		if slow := c.intake.hold(c.gone, c.pace.headers, fields, "headers", c.host); slow != nil {
			return 0, slow
		}
	}
	if frames := c.frames; frames > 0 {
		c.frames = 0
		if over := c.exceed(frames); over > 0 {
			if slow := c.intake.hold(c.gone, c.pace.frames, over, "frames", c.host); slow != nil {
				return 0, slow
			}
		}
	}
	if data := c.data; data > 0 {
		c.data = 0
		if c.pace.data.wait(c.gone, data) {
			c.intake.slowed("bytes of requests", c.host)
		}
	}
	return n, err
}

// permit lets the reader of a response of a size send the frames that it takes
// to read it.
func (c *intakeConn) permit(size int) {
	if c != nil {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.permitted = min(c.permitted+perResponse+size/windowShare, maxPermitted)
	}
}

// exceed returns how many of the frames that were read are not permitted by
// responses.
func (c *intakeConn) exceed(frames int) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	permitted := min(frames, c.permitted)
	c.permitted -= permitted
	return frames - permitted
}

// open waits for the turn of a stream that the connection opens. It returns an
// error if that would take too long.
func (c *intakeConn) open() error {
	if c == nil {
		return nil
	}
	if c.opened.wait(c.gone, 1) {
		c.intake.slowed("streams", c.host)
	}
	return c.intake.hold(c.gone, c.pace.streams, 1, "streams", c.host)
}

// identityPrefix is before the name of an identity where addresses are kept.
const identityPrefix = "identity "

// join counts a stream of a verified identity, which has the paces of an
// address however many it comes from, and as many connections. It returns an
// error if there are more, or if the stream would wait for long.
func (n *intake) join(c *intakeConn, identity string) (h *hostPace, leave func(), err error) {
	h = n.paceOf(identityPrefix + identity)
	n.mu.Lock()
	first := h.on[c] == 0
	if first && len(h.on) >= n.peer {
		h.open--
		n.mu.Unlock()
		return nil, nil, stream.TooManyConnections(n.peer)
	}
	h.countLocked(c, 1)
	n.mu.Unlock()
	leave = func() {
		n.mu.Lock()
		defer n.mu.Unlock()
		h.open--
		h.countLocked(c, -1)
	}
	if first {
		err = n.hold(c.gone, h.connections, 1, "connections", identity)
	}
	if err == nil {
		err = n.hold(c.gone, h.streams, 1, "streams", identity)
	}
	if err != nil {
		leave()
		return nil, nil, stream.TooFast()
	}
	return h, leave, nil
}

// hold waits until k of something may pass. It returns an error, and counts
// nothing, if that would take too long.
func (n *intake) hold(ctx context.Context, l *rate.Limiter, k int, what, host string) error {
	if l.AllowN(time.Now(), k) {
		return nil
	}
	n.slowed(what, host)
	ctx, cancel := context.WithTimeout(ctx, paceTime)
	defer cancel()
	return l.WaitN(ctx, k)
}

// Close implements [net.Conn].
func (c *intakeConn) Close() error {
	c.leave()
	c.intake.mu.Lock()
	if c.intake.conns[c.ends] == c {
		delete(c.intake.conns, c.ends)
	}
	c.intake.mu.Unlock()
	c.mu.Lock()
	c.intake.total.Add(-c.weight())
	c.bytes, c.wasted, c.closed = 0, 0, true
	c.mu.Unlock()
	if c.intake.gone != nil {
		c.intake.gone(c)
	}
	return c.Conn.Close()
}

// parse returns how many bytes of DATA frames are in what was read, and what
// the frames that begin there waste.
func (c *intakeConn) parse(b []byte) (bytes, wasted int64) {
	for len(b) > 0 {
		switch {
		case c.preface > 0:
			k := min(c.preface, len(b))
			c.preface, b = c.preface-k, b[k:]
		case c.left > 0:
			k := min(c.left, len(b))
			c.left, b = c.left-k, b[k:]
			switch c.kind {
			case http2.FrameData:
				bytes += int64(k)
				c.data += k
			case http2.FrameHeaders, http2.FrameContinuation:
				c.fields += k
			}
		default:
			k := min(frameSize-len(c.header), len(b))
			c.header, b = append(c.header, b[:k]...), b[k:]
			if len(c.header) < frameSize {
				continue
			}
			c.left = int(binary.BigEndian.Uint32(c.header) >> 8)
			if c.kind = http2.FrameType(c.header[3]); c.kind == http2.FrameData {
				wasted += waste(c.left)
				c.data += frameCost
			} else {
				c.frames++
			}
			c.header = c.header[:0]
		}
	}
	return bytes, wasted
}

// weight returns what the connection takes, in bytes. mu is held.
func (c *intakeConn) weight() int64 { return c.bytes + c.wasted }

func (c *intakeConn) add(bytes, wasted int64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.addLocked(bytes, wasted)
}

func (c *intakeConn) addLocked(bytes, wasted int64) {
	if c.closed {
		return
	}
	before := c.weight()
	c.bytes, c.wasted = max(c.bytes+bytes, 0), max(c.wasted+wasted, 0)
	c.intake.total.Add(c.weight() - before)
}

// handled takes off a request and its share of what is wasted. Like count
// it may be called for a nil connection.
func (c *intakeConn) handled(size int64) {
	if c == nil || size == 0 {
		return
	}
	c.pace.data.earn(int(min(size, refund)) + frameCost)
	c.mu.Lock()
	defer c.mu.Unlock()
	wasted := c.wasted
	if size < c.bytes {
		wasted = int64(float64(c.wasted) * float64(size) / float64(c.bytes))
	}
	c.addLocked(-size, -wasted)
}

// count counts so many streams more. What the last one has not completed is
// gone.
func (c *intakeConn) count(more int) {
	if c == nil {
		return
	}
	c.intake.mu.Lock()
	left := c.pace.countLocked(c, more)
	c.intake.mu.Unlock()
	if left == 0 {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.addLocked(-c.bytes, -c.wasted)
	}
}

// shed closes connections until the limit holds.
func (n *intake) shed() {
	n.mu.Lock()
	var closing []*intakeConn
	total := n.total.Load()
	for total > n.limit {
		hosts := make(map[string]int64)
		weights := make(map[*intakeConn]int64)
		for _, c := range n.conns {
			c.mu.Lock()
			weights[c] = c.weight()
			c.mu.Unlock()
			hosts[c.host] += weights[c]
		}
		var worst *intakeConn
		for c, w := range weights {
			if worst == nil || hosts[c.host] > hosts[worst.host] || c.host == worst.host && w > weights[worst] {
				worst = c
			}
		}
		if worst == nil {
			break
		}
		delete(n.conns, worst.ends)
		total -= weights[worst]
		closing = append(closing, worst)
	}
	n.mu.Unlock()
	for _, c := range closing {
		n.refuse(c.host)
		_ = c.Close()
	}
}
