package server

import (
	"context"
	"sync"
	"time"
)

// Rates in a second, and how many may come at once before. A sink has a stream,
// or one for each type, and sends a request for each response, besides those
// that change what it wants; a proxy in between may have many sinks on a
// connection.
const (
	streamRate, streamBurst   = 200, 1000
	requestRate, requestBurst = 100, 250
)

// Rates of an IP address in a second, and how much may come at once before.
const (
	// dataRate is in bytes of requests and their frames. The largest request is
	// initial_resource_versions, 14 MB for 100,000 names of 100 bytes, which
	// then takes six seconds. It takes 3 µs of a processor to handle a name.
	dataRate, dataBurst = 2 << 20, 2 << 20
	// lightRate is how many requests of at most 1 KiB are handled at once,
	// besides one for each response. Others wait for their turn, as large ones.
	lightRate, lightBurst = 100, 1000
	// turnRate is how many streams of an address that has more than crowded a
	// change may wake, 2 µs of a processor each. For 10,000 streams changes of
	// half a second come together.
	turnRate, turnBurst, crowded = 20_000, 2_000, 1_000
	// queryRate is how many requests an admin port answers, with a refusal too,
	// 0.1 ms of a processor each at least.
	queryRate, queryBurst = 100, 200
)

// frameCost is what a frame of a request costs besides its bytes, in bytes: a
// frame that is empty takes as much time as one of so many.
const frameCost = 64

// windowShare is the bytes of a response for which its reader may send a frame:
// clients extend their window by 8 KiB or more at a time. perResponse is how
// many frames it may send besides: two windows, and a ping that measures them.
// maxPermitted bounds how many of them are remembered for a connection.
const windowShare, perResponse, maxPermitted = 4 << 10, 4, 100_000

// refund is what is given back of each request, in bytes: as many as a sink
// needs to acknowledge a response. [requestRate] bounds them.
const refund = 1 << 10

// pace lets events pass at a rate, after a number of them that pass at once.
type pace struct {
	every time.Duration // at least 1 ns
	burst int

	mu   sync.Mutex
	next time.Time // when the next one would pass without a burst; guarded by mu
}

// wait waits until n events may pass or ctx ends, and reports whether it had
// to.
func (p *pace) wait(ctx context.Context, n int) (waited bool) {
	p.mu.Lock()
	due := p.dueLocked()
	p.next = p.next.Add(time.Duration(n) * p.every)
	p.mu.Unlock()
	if due <= 0 {
		return false
	}
	timer := time.NewTimer(due)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
	}
	return true
}

// allow reports whether an event may pass at once, and lets it pass then.
func (p *pace) allow() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.dueLocked() > 0 {
		return false
	}
	p.next = p.next.Add(p.every)
	return true
}

// dueLocked returns how long the next event has to wait, if at all.
func (p *pace) dueLocked() time.Duration {
	now := time.Now()
	if p.next.Before(now) {
		p.next = now
	}
	return p.next.Add(-time.Duration(p.burst) * p.every).Sub(now)
}

// earn lets n more pass at once.
func (p *pace) earn(n int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.next = p.next.Add(-time.Duration(n) * p.every)
}
