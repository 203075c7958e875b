package server

import (
	"testing"
	"testing/synctest"
	"time"
)

// Events pass at once up to the burst, then at the rate; one that is earned
// passes besides.
func TestPace(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := pace{every: 10 * time.Millisecond, burst: 5}
		began := time.Now()
		pass := func(n int) (waited int) {
			for range n {
				if p.wait(t.Context(), 1) {
					waited++
				}
			}
			return waited
		}
		if n := pass(6); n != 0 || time.Since(began) != 0 {
			t.Errorf("of the first 6, %d waited %v", n, time.Since(began))
		}
		if n := pass(10); n != 10 || time.Since(began) != 100*time.Millisecond {
			t.Errorf("of the next 10, %d waited %v", n, time.Since(began))
		}
		p.earn(2)
		if n := pass(2); n != 0 {
			t.Errorf("of 2 that were earned, %d waited", n)
		}
		p.earn(2)
		if a, b, c := p.allow(), p.allow(), p.allow(); !a || !b || c {
			t.Errorf("of 2 that were earned pass at once: %v, %v, and one more: %v", a, b, c)
		}
		time.Sleep(time.Hour)
		if n := pass(7); n != 1 {
			t.Errorf("after an hour %d of 7 waited", n)
		}
	})
}
