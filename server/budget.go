package server

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/isthmus-mesh/isthmus/server/access"
	"github.com/isthmus-mesh/isthmus/server/stream"
	"github.com/isthmus-mesh/isthmus/server/wire"
)

// Shares of limits.retained_bytes and limits.response_bytes. Of what is
// retained a stream may have a quarter, and an address or identity half. Of
// what is being sent half is for pages that sinks share; of the rest an address
// or identity may have half, and half is for first responses.
const (
	streamShare, peerShare = 4, 2
	sentShare, firstShare  = 2, 2
)

const (
	// stallTime is how long a sink may take for a response that others wait
	// for, and a second more for each stallRate bytes.
	stallTime, stallRate = 5 * time.Second, 8 << 20
)

// workers is how many requests are handled and large responses made at a time:
// on half of the processors.
func workers() int { return max(1, runtime.GOMAXPROCS(0)/2) }

var errShed = errors.New("the memory for what sinks ask for is used up, and this address or identity has most of it; see limits.retained_bytes")

// budget bounds what streams have the bridge keep: the words of sinks for as
// long as the stream needs them, and responses until they are sent. It counts
// by stream, by address, by verified identity, and all together.
type budget struct {
	retain, send int64 // limits
	work         *access.Turns
	refuse       func(limit, peer string)

	mu sync.Mutex
	// guarded by mu
	retained, sending, shared int64
	peers                     map[string]*peerAccount // by address or identity
	streams                   map[*account]struct{}
	pinned                    map[*byte]int      // pages that are being sent, and on how many streams
	waiting                   []*peerAccount     // those with streams that wait
	sent                      map[*sent]struct{} // responses that are being sent
	timer                     *time.Timer
}

// peerAccount is what the streams of an address or identity have.
type peerAccount struct {
	name              string
	streams           int
	retained, sending int64
	queue             []*account // streams that wait for room, if it is an address
}

// account is what a stream has. It implements [stream.Account].
type account struct {
	b     *budget
	conn  *intakeConn
	paces []*hostPace    // of the address, and of the identity if there is one
	peers []*peerAccount // likewise
	end   func(error)    // ends the stream

	requests pace         // as many as it gets responses, and some more
	request  atomic.Int64 // size of the one that is being handled

	// guarded by budget.mu
	retained int64
	reserved int64         // for the next response
	granted  bool          // the next response may be made
	wait     chan struct{} // closed when there is room; nil if the stream does not wait
	wanted   int64         // size of the next response
	pages    bool          // it is of pages that sinks share
}

// sent is a response that is being sent.
type sent struct {
	a        *account
	size     int64
	segments [][]byte // if other sinks share them
	since    time.Time
}

func newBudget(retain, send int, refuse func(limit, peer string)) *budget {
	return &budget{
		retain: int64(retain), send: int64(send), refuse: refuse, peers: make(map[string]*peerAccount),
		work:    access.NewTurns(workers(), 0, 0),
		streams: make(map[*account]struct{}), pinned: make(map[*byte]int), sent: make(map[*sent]struct{}),
	}
}

// open returns the account of a stream. end ends the stream. of is the pace of
// its identity, if it has one.
func (b *budget) open(c *intakeConn, identity string, of *hostPace, end func(error)) *account {
	b.mu.Lock()
	defer b.mu.Unlock()
	a := &account{b: b, conn: c, end: end, paces: []*hostPace{c.pace}, requests: pace{every: time.Second / requestRate, burst: requestBurst}}
	if of != nil {
		a.paces = append(a.paces, of)
	}
	for _, name := range []string{c.host, identity} {
		if name == "" {
			continue
		}
		p := b.peers[name]
		if p == nil {
			p = &peerAccount{name: name}
			b.peers[name] = p
		}
		p.streams++
		a.peers = append(a.peers, p)
	}
	b.streams[a] = struct{}{}
	return a
}

// close ends the account of a stream. What it was sent counts until it is gone.
func (a *account) close() {
	a.conn.handled(a.request.Swap(0))
	b := a.b
	b.mu.Lock()
	defer b.mu.Unlock()
	delete(b.streams, a)
	a.retainLocked(0)
	a.unwaitLocked()
	a.doneLocked()
	for _, p := range a.peers {
		p.streams--
		b.forgetLocked(p)
	}
}

func (b *budget) forgetLocked(p *peerAccount) {
	if p.streams == 0 && p.sending == 0 && b.peers[p.name] == p {
		delete(b.peers, p.name)
	}
}

// Await implements [stream.Account].
func (a *account) Await(ctx context.Context) {
	a.conn.handled(a.request.Swap(0))
	if a.requests.wait(ctx, 1) {
		a.conn.intake.slowed("requests", a.conn.RemoteAddr().String())
	}
}

// Received implements [stream.Account].
func (a *account) Received(ctx context.Context, size int) {
	n := int64(prefixSize + size)
	a.request.Store(n)
	if len(a.paces) > 1 && a.own().data.wait(ctx, int(max(n-refund, 0))) {
		a.conn.intake.slowed("bytes of requests", a.peers[1].name)
	}
}

// Send implements [stream.Account].
func (a *account) Send(m *stream.Message) {
	a.requests.earn(1)
	a.conn.permit(m.Size)
	a.own().light.earn(1)
	m.Done = a.begin(m)
}

// Turn implements [stream.Account].
func (a *account) Turn(ctx context.Context) {
	for _, p := range a.paces {
		p.turn(ctx)
	}
}

// Retain implements [stream.Account].
func (a *account) Retain(bytes int) error {
	b := a.b
	b.mu.Lock()
	defer b.mu.Unlock()
	if _, open := b.streams[a]; !open {
		return errShed // and has not ended yet
	}
	more := int64(bytes) > a.retained
	a.retainLocked(int64(bytes))
	if !more {
		return nil
	}
	if a.retained > b.retain/streamShare {
		b.refuse(limitRetained, a.conn.host)
		return fmt.Errorf("the stream asks for names, versions and types of %d bytes, of at most %d; see limits.retained_bytes", a.retained, b.retain/streamShare)
	}
	for _, p := range a.peers {
		b.shedLocked(p.retained, b.retain/peerShare, func(other *account) bool { return slices.Contains(other.peers, p) })
	}
	b.shedLocked(b.retained, b.retain, func(*account) bool { return true })
	return nil
}

// own returns the pace of the identity, or of the address if there is none.
func (a *account) own() *hostPace { return a.paces[len(a.paces)-1] }

// Work implements [stream.Account].
func (a *account) Work(ctx context.Context, light bool) (end func(), err error) {
	if light && a.own().light.allow() {
		return func() {}, nil
	}
	pass, err := a.b.work.Enter(ctx, a.peers[len(a.peers)-1].name)
	if err != nil {
		return nil, err
	}
	return pass.Leave, nil
}

func (a *account) retainLocked(bytes int64) {
	more := bytes - a.retained
	a.retained += more
	a.b.retained += more
	for _, p := range a.peers {
		p.retained += more
	}
}

// shedLocked ends streams if more is retained than a limit permits: of the
// address or identity that has most, those that have most.
func (b *budget) shedLocked(retained, limit int64, of func(a *account) bool) {
	if retained <= limit {
		return
	}
	for retained > limit-limit/8 {
		var worst *account
		for a := range b.streams {
			if of(a) && a.retained > 0 && (worst == nil || cmp.Or(cmp.Compare(a.mostLocked(), worst.mostLocked()), cmp.Compare(a.retained, worst.retained)) > 0) {
				worst = a
			}
		}
		if worst == nil {
			return
		}
		retained -= worst.retained
		b.refuse(limitRetained, worst.conn.host)
		worst.retainLocked(0)
		delete(b.streams, worst)
		worst.end(errShed)
	}
}

// mostLocked returns what the address or the identity of the stream retains,
// whichever is more.
func (a *account) mostLocked() (most int64) {
	for _, p := range a.peers {
		most = max(most, p.retained)
	}
	return most
}

// Room implements [stream.Account].
func (a *account) Room(size int, shared bool) <-chan struct{} {
	b := a.b
	b.mu.Lock()
	defer b.mu.Unlock()
	if a.reserved >= int64(size) && a.granted {
		return nil
	}
	a.wanted, a.pages = int64(size), shared
	if a.wait != nil {
		return a.wait
	}
	if (len(a.peers[0].queue) == 0 || a.wanted < stream.LargeResponse) && b.fitsLocked(a) {
		a.grantLocked()
		return nil
	}
	a.wait = make(chan struct{})
	p := a.peers[0]
	if p.queue = append(p.queue, a); len(p.queue) == 1 {
		b.waiting = append(b.waiting, p)
	}
	if b.timer == nil {
		b.timer = time.AfterFunc(stallTime, b.unstall)
	}
	return a.wait
}

// fitsLocked reports whether there is room for what a stream wants.
func (b *budget) fitsLocked(a *account) bool {
	if a.pages {
		return b.shared <= b.send/sentShare
	}
	return !b.fullLocked(a) && !slices.ContainsFunc(a.peers, func(p *peerAccount) bool { return p.sending > 0 && p.sending+a.wanted > b.mostLocked(a)/peerShare })
}

// fullLocked reports whether responses of all addresses take the room that a
// stream wants.
func (b *budget) fullLocked(a *account) bool {
	return b.sending > 0 && b.sending+a.wanted > b.mostLocked(a)
}

// mostLocked returns what may be sent while a stream gets what it wants: what
// has changed goes out while first responses wait.
func (b *budget) mostLocked(a *account) int64 {
	if a.wanted >= stream.LargeResponse {
		return b.send / sentShare / firstShare
	}
	return b.send / sentShare
}

func (a *account) grantLocked() {
	a.granted = true
	a.reserveLocked(a.wanted)
}

// Done implements [stream.Account].
func (a *account) Done() {
	a.b.mu.Lock()
	defer a.b.mu.Unlock()
	a.doneLocked()
}

func (a *account) doneLocked() {
	if a.granted {
		a.granted = false
		a.reserveLocked(0)
		a.b.wakeLocked()
	}
}

func (a *account) reserveLocked(bytes int64) {
	a.countLocked(bytes - a.reserved)
	a.reserved = bytes
}

func (a *account) countLocked(more int64) {
	a.b.sending += more
	for _, p := range a.peers {
		p.sending += more
	}
}

// wakeLocked grants room to streams that wait: one of each address after the
// other, and of each address in order.
func (b *budget) wakeLocked() {
	for granted := true; granted && len(b.waiting) > 0; {
		granted = false
		for _, p := range slices.Clone(b.waiting) {
			if a := p.queue[0]; b.fitsLocked(a) {
				a.unwaitLocked()
				a.grantLocked()
				granted = true
			}
		}
	}
}

// unwaitLocked ends the wait of a stream.
func (a *account) unwaitLocked() {
	if a.wait == nil {
		return
	}
	close(a.wait)
	a.wait = nil
	p := a.peers[0]
	p.queue = slices.DeleteFunc(p.queue, func(other *account) bool { return other == a })
	if len(p.queue) == 0 {
		a.b.waiting = slices.DeleteFunc(a.b.waiting, func(other *peerAccount) bool { return other == p })
	}
}

// begin counts a response until it is sent, in the place of what was reserved
// for it. The returned function may be called more than once; it is nil for a
// response that is too small to be counted.
func (a *account) begin(m *stream.Message) (done func()) {
	b := a.b
	if !wire.Tracks(m) {
		a.Done()
		return nil
	}
	s := &sent{a: a, size: int64(m.Size), since: time.Now()}
	if m.Shared {
		s.segments = m.Segments
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.sent[s] = struct{}{}
	if m.Shared {
		for _, segment := range s.segments {
			b.pinLocked(segment, 1)
		}
	} else {
		a.countLocked(s.size)
	}
	a.doneLocked()
	return func() {
		b.mu.Lock()
		defer b.mu.Unlock()
		b.doneLocked(s)
	}
}

func (b *budget) doneLocked(s *sent) {
	if _, going := b.sent[s]; !going {
		return
	}
	delete(b.sent, s)
	if s.segments == nil {
		s.a.countLocked(-s.size)
	}
	for _, segment := range s.segments {
		b.pinLocked(segment, -1)
	}
	for _, p := range s.a.peers {
		b.forgetLocked(p)
	}
	b.wakeLocked()
}

// pinLocked counts a page on one stream more or less.
func (b *budget) pinLocked(page []byte, more int) {
	if len(page) == 0 {
		return
	}
	switch n := b.pinned[&page[0]] + more; {
	case n == 0:
		delete(b.pinned, &page[0])
		b.shared -= int64(len(page))
	case n == 1 && more > 0:
		b.shared += int64(len(page))
		fallthrough
	default:
		b.pinned[&page[0]] = n
	}
}

// gone forgets what was to be sent on a connection that is closed: gRPC drops
// it.
func (b *budget) gone(c *intakeConn) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for s := range b.sent {
		if s.a.conn == c {
			b.doneLocked(s)
		}
	}
}

// unstall closes connections that do not take their responses, as far as others
// wait for the room: those of an address whose own streams wait, and if all of
// the room is taken, those of the address that has most.
func (b *budget) unstall() {
	b.mu.Lock()
	b.timer = nil
	var cut []*intakeConn
	if len(b.waiting) > 0 {
		b.timer = time.AfterFunc(stallTime, b.unstall)
		full, pages := false, false
		for _, p := range b.waiting {
			full = full || !p.queue[0].pages && b.fullLocked(p.queue[0])
			pages = pages || p.queue[0].pages
		}
		now := time.Now()
		stalled := make(map[*sent]bool)
		for s := range b.sent {
			if now.Sub(s.since) > stallTime+time.Duration(s.size/stallRate)*time.Second {
				stalled[s] = true
			}
		}
		end := func(s *sent) {
			cut = append(cut, s.a.conn)
			for other := range stalled {
				if other.a.conn == s.a.conn {
					delete(stalled, other)
				}
			}
			for other := range b.sent {
				if other.a.conn == s.a.conn {
					b.doneLocked(other)
				}
			}
		}
		for s := range stalled {
			if stalled[s] && (len(s.a.peers[0].queue) > 0 || pages && s.segments != nil) {
				end(s)
			}
		}
		for full && len(stalled) > 0 && b.sending > b.send/sentShare/firstShare/2 {
			var worst *sent
			for s := range stalled {
				if worst == nil || s.a.peers[0].sending > worst.a.peers[0].sending {
					worst = s
				}
			}
			end(worst)
		}
	}
	b.mu.Unlock()
	for _, c := range cut {
		b.refuse(limitResponses, c.host)
		_ = c.Close()
	}
}
