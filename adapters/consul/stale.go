package consul

import (
	"cmp"
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/hashicorp/consul/api"

	"github.com/isthmus-mesh/isthmus/plugin"
)

// staleness is how far behind the leader the answers of any server are. The
// answer to a query that waits states that of the time at which it was asked,
// so the server is asked for it again and again meanwhile.
type staleness struct {
	most time.Duration // what is accepted
	// detail receives a description.
	detail func(string)

	asking sync.Mutex // guards the call of measure, so that scopes share it

	mu      sync.Mutex // guards everything below
	measure map[string]measured
	worst   time.Duration
	since   time.Time // when worst was set to 0
	shown   string
}

// measured is what a server of a datacenter said last.
type measured struct {
	at   time.Time
	lags bool
}

// staleFor is how long the staleness that the detail states is counted.
const staleFor = time.Minute

func newStaleness(most time.Duration) *staleness {
	return &staleness{most: most, measure: map[string]measured{}}
}

// every is the time between two measurements of a datacenter.
func (s *staleness) every() time.Duration { return s.most / 2 }

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

// lags reports whether the servers of a datacenter were too far behind the
// leader when they were asked last.
func (s *staleness) lags(datacenter string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.measure[datacenter].lags
}

// ask measures a datacenter unless that was done a moment ago, and reports
// whether it lags. Without an answer nothing is known that the queries
// themselves do not find.
func (s *staleness) ask(datacenter string, call func() (time.Duration, error)) (lags bool) {
	s.asking.Lock()
	defer s.asking.Unlock()
	s.mu.Lock()
	m := s.measure[datacenter]
	s.mu.Unlock()
	if time.Since(m.at) < s.every()/2 {
		return m.lags
	}
	behind, err := call()
	lags = err == nil && !s.accept(behind)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.measure[datacenter] = measured{time.Now(), lags}
	return lags
}

// tellLocked sets the detail. It rounds up, so that it rarely changes.
func (s *staleness) tellLocked() {
	text := fmt.Sprintf("older than %v, so the leader is asked", s.most)
	for _, bound := range []time.Duration{100 * time.Millisecond, time.Second, s.most} {
		if s.worst <= bound {
			text = fmt.Sprintf("at most %v old", min(bound, s.most))
			break
		}
	}
	text = fmt.Sprintf("any server answers queries that wait (stale): answers are %s; a server cut off from the leader shows after %v at most", text, s.most+s.every())
	if text != s.shown {
		s.shown = text
		s.detail(text)
	}
}

// measureStaleness has the scope ask again at index 0 when another address is
// used, or the servers of all are too far behind, until ctx ends.
func (s *scope) measureStaleness(ctx context.Context) {
	stale, hosts := s.clients.stale, s.clients.hosts
	host, was := hosts.current(), false
	for plugin.Pause(ctx, stale.every(), nil) {
		lags := stale.ask(s.datacenter, func() (behind time.Duration, err error) {
			for range hosts.all {
				host := hosts.current()
				if behind, err = s.behind(ctx); err == nil && behind <= stale.most || ctx.Err() != nil {
					break
				}
				hosts.fail(host, cmp.Or(err, fmt.Errorf("it has not heard of the leader for %v", behind)))
			}
			return behind, err
		})
		if now := hosts.current(); lags && !was || now != host {
			host = now
			s.pokeAll()
			s.suspect()
		}
		was = lags
	}
}

// behind asks how far behind the leader a server is now.
func (s *scope) behind(ctx context.Context) (time.Duration, error) {
	ctx, cancel := context.WithTimeout(ctx, s.clients.stale.every())
	defer cancel()
	q := &api.QueryOptions{Datacenter: s.datacenter, AllowStale: true}
	_, meta, err := s.clients.of(s.slot).Health().Service(serversService, "", false, q.WithContext(ctx))
	if err != nil {
		return 0, err
	}
	return meta.LastContact, nil
}
