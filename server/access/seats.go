package access

import "sync"

// Seats bounds how many of something are open at a time, of each network, or
// other name of who opens them, and in all.
type Seats struct {
	each, all int // at most; all is 0 for any number

	mu sync.Mutex
	// guarded by mu
	taken int
	of    map[string]int
}

// NewSeats returns so many seats for each network, and in all; 0 in all is any
// number.
func NewSeats(each, all int) *Seats {
	return &Seats{each: each, all: all, of: make(map[string]int)}
}

// Take takes a seat until leave is called, once or more often. It reports false
// if there is none.
func (s *Seats) Take(network string) (leave func(), ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.all > 0 && s.taken >= s.all || s.of[network] >= s.each {
		return nil, false
	}
	s.taken++
	s.of[network]++
	return sync.OnceFunc(func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.taken--
		if s.of[network]--; s.of[network] == 0 {
			delete(s.of, network)
		}
	}), true
}
