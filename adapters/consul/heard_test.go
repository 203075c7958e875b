package consul

import (
	"testing"
	"testing/synctest"
	"time"
)

// TestHeard shows that a quiet Consul is heard from each time that a query's
// wait is over, and one that cannot be reached is not.
func TestHeard(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFake(t)
		f.set("web", entry("web", "web-1", 80))
		r, _ := startFake(t, f)
		synctest.Wait()
		for range 3 {
			before := r.held().Heard
			time.Sleep(2 * time.Duration(DefaultConfig.Wait))
			if r.held().Heard == before {
				t.Fatalf("a quiet Consul was not heard from, after %d times before", before)
			}
		}
		f.mu.Lock()
		f.down = errRefused
		f.mu.Unlock()
		time.Sleep(2 * time.Duration(DefaultConfig.Wait))
		before := r.held().Heard
		time.Sleep(time.Hour)
		if n := r.held().Heard - before; n != 0 {
			t.Errorf("heard %d times from a Consul that cannot be reached", n)
		}
	})
}
