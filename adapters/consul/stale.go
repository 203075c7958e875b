package consul

import (
	"fmt"
	"sync"
	"time"
)

// staleness watches how far behind the leader the answers of any server are.
type staleness struct {
	most time.Duration // what is accepted
	wait time.Duration // of queries, as configured
	// detail receives a description.
	detail func(string)

	mu    sync.Mutex // guards everything below
	worst time.Duration
	since time.Time // when worst was set to 0
	shown string
}

// staleFor is how long the staleness that the detail states is counted.
const staleFor = time.Minute

// accept records how far behind the leader an answer was, and reports whether
// that is accepted.
func (s *staleness) accept(behind time.Duration) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := time.Now()
	if s.worst = max(s.worst, behind); s.shown == "" || behind > s.most || now.Sub(s.since) >= staleFor {
		s.tellLocked()
		s.worst, s.since = 0, now
	}
	return behind <= s.most
}

// tellLocked sets the detail. It rounds up, so that it rarely changes.
func (s *staleness) tellLocked() {
	text := fmt.Sprintf("older than %v, which are asked of the leader", s.most)
	for _, bound := range []time.Duration{100 * time.Millisecond, time.Second, s.most} {
		if s.worst <= bound {
			text = fmt.Sprintf("at most %v old", min(bound, s.most))
			break
		}
	}
	text = fmt.Sprintf("any server answers queries that wait (stale): answers are %s; a server cut off from the leader shows after %v at most", text, s.most+s.wait)
	if text != s.shown {
		s.shown = text
		s.detail(text)
	}
}
