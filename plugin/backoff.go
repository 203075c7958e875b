package plugin

import (
	"context"
	"math/rand/v2"
	"time"

	"github.com/isthmus-mesh/isthmus/internal/wait"
)

// Backoff is a wait that doubles with each failure, jittered so that what failed together does not return together. It belongs to one
// goroutine.
type Backoff struct {
	// First and Most are the shortest and the longest step. Both must be positive.
	First, Most time.Duration

	failures int
}

// Next returns how long to wait now, between half and all of the present step.
func (b *Backoff) Next() time.Duration {
	d := b.Most
	if b.failures < 16 {
		d = min(b.First<<b.failures, b.Most)
	}
	b.failures++
	return Jitter(d)
}

// Reset begins again at the first step.
func (b *Backoff) Reset() { b.failures = 0 }

// Jitter returns a random duration between half of d and d.
func Jitter(d time.Duration) time.Duration {
	return d/2 + time.Duration(rand.Int64N(int64(d/2)+1))
}

// Pause waits for d, for a value or the close of wake (nil for none) or for the end of ctx. It reports whether ctx still goes on.
func Pause(ctx context.Context, d time.Duration, wake <-chan struct{}) bool {
	return wait.Pause(ctx, d, wake)
}
