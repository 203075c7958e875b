package access

import (
	"sync"
	"time"
)

const (
	// sparePeriod is the time in which a key is allowed once.
	sparePeriod = time.Minute
	// maxSpared bounds the keys that are remembered; then all are forgotten.
	maxSpared = 10_000
)

// Sparingly allows each key once a minute, for lines of the log that peers can
// cause. The zero value is ready for use.
type Sparingly struct {
	mu   sync.Mutex
	last map[string]time.Time // guarded by mu
}

// Allow reports whether the key was not allowed within the last minute.
func (s *Sparingly) Allow(key string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := time.Now()
	if now.Sub(s.last[key]) < sparePeriod {
		return false
	}
	if s.last == nil || len(s.last) >= maxSpared {
		s.last = make(map[string]time.Time)
	}
	s.last[key] = now
	return true
}
