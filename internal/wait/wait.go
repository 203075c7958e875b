// Package wait implements the pause between attempts.
package wait

import (
	"context"
	"time"
)

// Pause waits for d, for wake to yield a value or be closed (nil for none), or
// for the end of ctx. It reports whether ctx has not ended.
func Pause(ctx context.Context, d time.Duration, wake <-chan struct{}) bool {
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
