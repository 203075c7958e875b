package plugin

import (
	"context"
	"math/rand/v2"
	"time"

	"github.com/isthmus-mesh/isthmus/internal/wait"
)

// Backoff is an exponential backoff with jitter. It is not safe for concurrent
// use.
type Backoff struct {
	// First and Most are the shortest and longest step. Both must be positive.
	First, Most time.Duration

	failures int
}

// Next returns the next wait: between half and all of the current step.
func (b *Backoff) Next() time.Duration {
	d := b.Most
	if b.failures < 16 {
		d = min(b.First<<b.failures, b.Most)
	}
	b.failures++
	return Jitter(d)
}

// Reset returns to the first step.
func (b *Backoff) Reset() { b.failures = 0 }

// Jitter returns a random duration between half of d and d.
func Jitter(d time.Duration) time.Duration {
	return d/2 + time.Duration(rand.Int64N(int64(d/2)+1))
}

// Pause waits for d, for wake to deliver or close (nil for none) or for the end
// of ctx. It reports whether ctx is still active.
func Pause(ctx context.Context, d time.Duration, wake <-chan struct{}) bool {
	return wait.Pause(ctx, d, wake)
}
