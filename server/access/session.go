package access

import (
	"context"
	"math/rand/v2"
	"net"
	"time"

	"google.golang.org/grpc/credentials"
)

const (
	// checkEvery is how often credentials in use are looked at again.
	checkEvery = 5 * time.Second
	// ageSpread is the share of max_age by which ages differ, so that those who
	// connected together do not come back together.
	ageSpread = 0.2
)

// session is a connection of a client with a certificate.
type session struct {
	net.Conn
	g          *Gate
	identified identified
	// guarded by Gate.mu
	until  time.Time // when the certificate ends
	ending bool      // its streams were ended
}

// identified is the AuthInfo of a session.
type identified struct {
	credentials.TLSInfo
	opened time.Time
	spread float64
}

// session returns a connection that ends with what admitted it.
func (g *Gate) session(conn net.Conn, info credentials.TLSInfo) *session {
	s := &session{Conn: conn, g: g, identified: identified{info, time.Now(), ageSpread * rand.Float64()}, until: endOf(info.State.VerifiedChains)}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.conns[s] = struct{}{}
	return s
}

// Close implements net.Conn.
func (s *session) Close() error {
	s.g.mu.Lock()
	delete(s.g.conns, s)
	s.g.mu.Unlock()
	return s.Conn.Close()
}

// Watch looks at the credentials in use until ctx ends, and ends streams and
// connections whose credential is gone, or that are too old.
func (g *Gate) Watch(ctx context.Context) {
	t := time.NewTicker(checkEvery)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-t.C:
			g.recheck(time.Now())
		}
	}
}

// recheck ends what is no longer valid: first streams, with a status, and at
// the next call connections. The work is one comparison for each, unless files
// have changed.
func (g *Gate) recheck(now time.Time) {
	p := g.policy.Load()
	generation := p.generation()
	g.checkFiles(p)
	g.mu.Lock()
	changed := generation != g.seen
	g.seen = generation
	var over, doubtful []*session
	for s := range g.conns {
		switch {
		case s.ending:
			over = append(over, s)
		case !now.Before(p.age(s.identified.opened, s.identified.spread)):
			s.ending = true
		case changed || past(s.until, now):
			doubtful = append(doubtful, s)
		}
	}
	g.mu.Unlock()
	for _, s := range over {
		_ = s.Close() // its streams have ended
	}
	g.apply(p, func(s *guarded) bool { return s.due(now, changed) })
	for _, s := range doubtful {
		c, ok := p.verify(Caller{TLS: &s.identified.State})
		g.mu.Lock()
		s.ending, s.until = !ok, c.until
		g.mu.Unlock()
	}
}

// age returns when what a credential admitted is too old.
func (p *Policy) age(opened time.Time, spread float64) time.Time {
	most := p.listener.OldestConnection()
	return opened.Add(most - time.Duration(spread*float64(most)))
}

// admitted notes what the stream was let in with.
func (s *guarded) admitted(p *Policy, a admission) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.grant(a.views, a.identity)
	s.until, s.aged = a.until, time.Time{}
	if a.credential {
		s.aged = p.age(s.opened, s.spread)
	}
	if past(s.aged, time.Now()) {
		s.entry.End(errAged)
	}
}

// due reports whether the policy has to be applied again: credentials changed,
// or the certificate or the stream is over.
func (s *guarded) due(now time.Time, changed bool) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if past(s.aged, now) {
		s.entry.End(errAged)
		return false
	}
	return changed || past(s.until, now)
}

// past reports whether a time is over, which the zero time never is.
func past(t, now time.Time) bool { return !t.IsZero() && !now.Before(t) }
