package nacos

import (
	"context"
	"math/rand/v2"
	"time"
)

// backoff is a wait that doubles with each failure, jittered so that what failed together does not return together.
type backoff struct {
	first, most time.Duration
	failures    int
}

// next returns how long to wait now, between half and all of the present step.
func (b *backoff) next() time.Duration {
	d := b.most
	if b.failures < 16 {
		d = min(b.first<<b.failures, b.most)
	}
	b.failures++
	return jitter(d)
}

// reset begins again at the first step.
func (b *backoff) reset() { b.failures = 0 }

// jitter returns a random duration between half of d and d.
func jitter(d time.Duration) time.Duration {
	return d/2 + time.Duration(rand.Int64N(int64(d/2)+1))
}

// pause waits for d, for a value or the close of wake (nil for none) or for the end of ctx. It reports whether ctx still goes on.
func pause(ctx context.Context, d time.Duration, wake <-chan struct{}) bool {
	if d > 0 {
		t := time.NewTimer(d)
		defer t.Stop()
		select {
		case <-t.C:
		case <-wake:
		case <-ctx.Done():
		}
	}
	return ctx.Err() == nil
}
