// Package testwait waits in tests, with deadlines that bound hangs.
package testwait

import (
	"testing"
	"time"
)

const pollInterval = 25 * time.Millisecond

// Eventually polls check until it reports true, for conditions without a
// signal. At the deadline it ends the test with what was waited for and what
// check saw last.
func Eventually(t testing.TB, deadline time.Duration, what string, check func() (seen string, ok bool)) {
	t.Helper()
	if seen, ok := Poll(t, deadline, nil, check); !ok {
		t.Fatalf("waited %v for %s; saw instead: %s", deadline, what, seen)
	}
}

// Poll is like Eventually, but returns the outcome. It also returns when stop
// is closed.
func Poll(t testing.TB, deadline time.Duration, stop <-chan struct{}, check func() (seen string, ok bool)) (seen string, ok bool) {
	t.Helper()
	expired := time.NewTimer(deadline)
	defer expired.Stop()
	tick := time.NewTicker(pollInterval)
	defer tick.Stop()
	for {
		if seen, ok = check(); ok {
			return seen, true
		}
		select {
		case <-tick.C:
		case <-stop:
			return seen, false
		case <-t.Context().Done():
			return seen, false
		case <-expired.C:
			return seen, false
		}
	}
}

// Receive returns the next value of c. At the deadline it ends the test with
// what was waited for.
func Receive[T any](t testing.TB, deadline time.Duration, what string, c <-chan T) T {
	t.Helper()
	timer := time.NewTimer(deadline)
	defer timer.Stop()
	select {
	case v := <-c:
		return v
	case <-timer.C:
		t.Fatalf("waited %v for %s", deadline, what)
		panic("not reached")
	}
}
