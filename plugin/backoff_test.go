package plugin

import (
	"context"
	"testing"
	"testing/synctest"
	"time"
)

// The step doubles up to the longest, each wait is between half of it and all
// of it, and a reset begins again.
func TestBackoff(t *testing.T) {
	b := Backoff{First: 100 * time.Millisecond, Most: time.Second}
	for range 2 {
		for i, step := range []time.Duration{100, 200, 400, 800, 1000, 1000} {
			step *= time.Millisecond
			if d := b.Next(); d < step/2 || d > step {
				t.Errorf("wait %d is %v, want %v to %v", i, d, step/2, step)
			}
		}
		for range 100 { // the shift must not run over
			if d := b.Next(); d < time.Second/2 || d > time.Second {
				t.Fatalf("a late wait is %v", d)
			}
		}
		b.Reset()
	}
}

// A pause ends when its time is over, when it is woken, and when the context
// ends, and says only of the last that there is no going on.
func TestPause(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		start := time.Now()
		if !Pause(t.Context(), time.Minute, nil) || time.Since(start) != time.Minute {
			t.Errorf("a pause of a minute took %v", time.Since(start))
		}
		wake := make(chan struct{}, 1)
		wake <- struct{}{}
		start = time.Now()
		if !Pause(t.Context(), time.Minute, wake) || time.Since(start) != 0 {
			t.Errorf("a pause that was woken took %v", time.Since(start))
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if Pause(ctx, time.Minute, nil) || time.Since(start) != time.Second {
			t.Errorf("a pause whose context ended took %v, or goes on", time.Since(start))
		}
		if Pause(ctx, 0, nil) {
			t.Error("a pause of nothing goes on after the end of the context")
		}
	})
}
