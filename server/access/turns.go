package access

import (
	"context"
	"errors"
	"net/netip"
	"slices"
	"sync"
	"time"
)

// ErrTurns is the error of a caller whose address waits for too much already.
var ErrTurns = errors.New("too much is under way for this address")

// Turns bounds work that callers cause: so much at a time, and of each address,
// or /64 of IPv6, one at a time. Who asks without end waits for himself.
type Turns struct {
	waiting int // at most, of an address; 0 for any number

	// Newest has the address that came last go first, so that one of many waits
	// for none of the others. They may wait until they give up.
	Newest bool

	mu    sync.Mutex
	free  int             // slots; guarded by mu, as the rest
	queue []chan struct{} // closed when its slot is free
	of    map[netip.Prefix]*turn
}

// turn is had by one caller of an address at a time.
type turn struct {
	c     chan struct{} // of capacity 1
	users int           // guarded by Turns.mu
}

// NewTurns returns turns of so many at a time, for which so many of an address
// may wait; 0 is any number.
func NewTurns(slots, waiting int) *Turns {
	return &Turns{free: slots, waiting: waiting, of: make(map[netip.Prefix]*turn)}
}

// Pass is the turn of one caller.
type Pass struct {
	of     *Turns
	forget func()
	own    *turn
	free   bool          // the slot is free, or will be
	rest   time.Duration // of the address, after the turn
}

// FreeAfter frees the slot for others after a while. The address keeps its turn
// until [Pass.Leave].
func (p *Pass) FreeAfter(d time.Duration) {
	p.free = true
	time.AfterFunc(d, p.of.release)
}

// RestAfter has the address wait for so long after its turn.
func (p *Pass) RestAfter(d time.Duration) { p.rest = d }

// Leave ends the turn.
func (p *Pass) Leave() {
	if !p.free {
		p.of.release()
	}
	end := func() {
		<-p.own.c
		p.forget()
	}
	if p.rest > 0 {
		time.AfterFunc(p.rest, end)
	} else {
		end()
	}
}

// Enter waits for a turn of the address and for a slot, until ctx ends.
func (t *Turns) Enter(ctx context.Context, from netip.Addr) (*Pass, error) {
	key := Network(from)
	t.mu.Lock()
	own := t.of[key]
	if own == nil {
		own = &turn{c: make(chan struct{}, 1)}
		t.of[key] = own
	}
	if t.waiting > 0 && own.users > t.waiting {
		t.mu.Unlock()
		return nil, ErrTurns
	}
	own.users++
	t.mu.Unlock()
	forget := func() {
		t.mu.Lock()
		defer t.mu.Unlock()
		if own.users--; own.users == 0 {
			delete(t.of, key)
		}
	}
	select {
	case own.c <- struct{}{}:
	case <-ctx.Done():
		forget()
		return nil, ctx.Err()
	}
	if err := t.acquire(ctx); err != nil {
		<-own.c
		forget()
		return nil, err
	}
	return &Pass{of: t, forget: forget, own: own}, nil
}

// acquire waits for a slot.
func (t *Turns) acquire(ctx context.Context) error {
	t.mu.Lock()
	if t.free > 0 {
		t.free--
		t.mu.Unlock()
		return nil
	}
	c := make(chan struct{})
	t.queue = append(t.queue, c)
	t.mu.Unlock()
	select {
	case <-c:
		return nil
	case <-ctx.Done():
	}
	t.mu.Lock()
	i := slices.Index(t.queue, c)
	if i >= 0 {
		t.queue = slices.Delete(t.queue, i, i+1)
	}
	t.mu.Unlock()
	if i < 0 {
		t.release() // it came meanwhile
	}
	return ctx.Err()
}

// release frees a slot, or hands it on.
func (t *Turns) release() {
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.queue) == 0 {
		t.free++
		return
	}
	i := 0
	if t.Newest {
		i = len(t.queue) - 1
	}
	close(t.queue[i])
	t.queue = slices.Delete(t.queue, i, i+1)
}

// Network returns what bounds of one client are for: its address, or the /64
// that an address of IPv6 is in, as who has one has all of it.
func Network(a netip.Addr) netip.Prefix {
	a = a.Unmap().WithZone("")
	bits := a.BitLen()
	if a.Is6() {
		bits = 64
	}
	p, _ := a.Prefix(bits) // the zero value on a unix socket
	return p
}
