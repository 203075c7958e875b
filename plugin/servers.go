package plugin

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"
)

// Servers are equivalent servers of one registry, of which one is in use: the
// last to answer, while it answers. It is safe for concurrent use.
type Servers struct {
	mu  sync.Mutex     // guards the fields below
	all []ServerHealth // in configured order
	now int            // index of the server in use
}

// ServerHealth is the state of one server.
type ServerHealth struct {
	Address string
	// Err is the error of the last attempt; nil if it succeeded or there was
	// none.
	Err error
	// Since is when the state last changed; zero if the server is untried.
	Since time.Time
	// InUse reports whether the server is in use.
	InUse bool
}

// NewServers returns a Servers of the addresses, at least one.
func NewServers(addresses []string) *Servers {
	if len(addresses) == 0 {
		panic("BUG: Servers without an address")
	}
	s := &Servers{}
	for _, a := range addresses {
		s.all = append(s.all, ServerHealth{Address: a})
	}
	return s
}

// Do calls try with the server in use and, until one succeeds, with the others:
// healthy ones first, then by the time of failure, oldest first. If all fail,
// the error has the reason of each.
func (s *Servers) Do(ctx context.Context, try func(ctx context.Context, address string) error) error {
	var errs []error
	for _, i := range s.order() {
		err := try(ctx, s.all[i].Address) // addresses are immutable
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		s.note(i, err)
		if err == nil {
			return nil
		}
		errs = append(errs, fmt.Errorf("%s: %w", s.all[i].Address, err))
	}
	return &noServer{errs}
}

// noServer is the error of several servers.
type noServer struct{ errs []error }

// Error implements error.
func (n *noServer) Error() string {
	texts := make([]string, 0, len(n.errs))
	for _, err := range n.errs {
		texts = append(texts, err.Error())
	}
	slices.Sort(texts) // independent of the order of attempts
	return strings.Join(texts, "; ")
}

// Unwrap returns the error of each server.
func (n *noServer) Unwrap() []error { return n.errs }

func (s *Servers) order() []int {
	s.mu.Lock()
	defer s.mu.Unlock()
	order := make([]int, len(s.all))
	for i := range order {
		order[i] = (s.now + i) % len(s.all)
	}
	slices.SortStableFunc(order[1:], func(a, b int) int {
		x, y := s.all[a], s.all[b]
		switch {
		case (x.Err == nil) != (y.Err == nil):
			if x.Err == nil {
				return -1
			}
			return 1
		case x.Err == nil:
			return 0
		}
		return x.Since.Compare(y.Since)
	})
	return order
}

func (s *Servers) note(i int, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	h := &s.all[i]
	if h.Since.IsZero() || (h.Err == nil) != (err == nil) {
		h.Since = time.Now()
	}
	if h.Err = err; err == nil {
		s.now = i
	}
}

// Health returns the state of each server, in the order of NewServers.
func (s *Servers) Health() []ServerHealth {
	s.mu.Lock()
	defer s.mu.Unlock()
	all := slices.Clone(s.all)
	for i := range all {
		all[i].InUse = i == s.now && all[i].Err == nil && !all[i].Since.IsZero()
	}
	return all
}

// String describes the server in use and those that fail, for [Catalog].Detail.
func (s *Servers) String() string {
	var texts []string
	for _, h := range s.Health() {
		var status *StatusError
		switch {
		case h.InUse:
			texts = append([]string{h.Address}, texts...)
		case errors.As(h.Err, &status):
			texts = append(texts, fmt.Sprintf("%s answers status %d since %s", h.Address, status.Status, h.Since.UTC().Format(time.RFC3339)))
		case h.Err != nil:
			texts = append(texts, fmt.Sprintf("%s cannot be used since %s", h.Address, h.Since.UTC().Format(time.RFC3339)))
		}
	}
	return strings.Join(texts, ", ")
}
