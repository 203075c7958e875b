// Package wait has the one pause between two tries.
package wait

import (
	"context"
	"time"
)

// Pause waits for d, for a value or the close of wake (nil for none) or for the end of ctx. It reports whether ctx still goes on.
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
