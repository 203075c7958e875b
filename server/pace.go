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
	requestRate, requestBurst = 500, 2000
)

// pace lets events pass at a rate, after a number of them that pass at once.
type pace struct {
	every time.Duration
	burst int

	mu   sync.Mutex
	next time.Time // when the next one would pass without a burst; guarded by mu
}

// wait waits until the event may pass or ctx ends, and reports whether it had
// to.
func (p *pace) wait(ctx context.Context) (waited bool) {
	p.mu.Lock()
	now := time.Now()
	if p.next.Before(now) {
		p.next = now
	}
	due := p.next.Add(-time.Duration(p.burst) * p.every)
	p.next = p.next.Add(p.every)
	p.mu.Unlock()
	if !due.After(now) {
		return false
	}
	timer := time.NewTimer(due.Sub(now))
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
	}
	return true
}

// earn lets one more pass at once.
func (p *pace) earn() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.next = p.next.Add(-p.every)
}
