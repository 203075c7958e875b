package access

import (
	"cmp"
	"slices"
	"sync"
	"time"
)

// Recent is how long a refusal counts as one of now.
const Recent = 15 * time.Minute

// Refusal is what was refused lately at one place.
type Refusal struct {
	Where       string
	First, Last time.Time
	Count       int
	// Peer, Why and Cure are of the last.
	Peer, Why, Cure string
}

// Refusals are those of the last time. The zero value is ready for use.
type Refusals struct {
	mu  sync.Mutex
	all map[string]*Refusal // by place, guarded by mu
}

// Note adds one.
func (r *Refusals) Note(where, peer, why, cure string) {
	now := time.Now()
	r.mu.Lock()
	defer r.mu.Unlock()
	one := r.all[where]
	if one == nil || now.Sub(one.Last) > Recent {
		if r.all == nil {
			r.all = make(map[string]*Refusal)
		}
		one = &Refusal{Where: where, First: now}
		r.all[where] = one
	}
	one.Count++
	one.Last, one.Peer, one.Why, one.Cure = now, peer, why, cure
}

// Recent returns those whose last is not older than [Recent], by place.
func (r *Refusals) Recent() (out []Refusal) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, one := range r.all {
		if time.Since(one.Last) <= Recent {
			out = append(out, *one)
		}
	}
	slices.SortFunc(out, func(a, b Refusal) int { return cmp.Compare(a.Where, b.Where) })
	return out
}

// Refusals returns what the listeners refused lately.
func (m *Metrics) Refusals() []Refusal { return m.lately.Recent() }

// Certificate is the certificate in use at a listener.
type Certificate struct {
	Listener    string
	From, Until time.Time
}

// Certificates returns those in use at all listeners with TLS, by listener.
func (m *Metrics) Certificates() (out []Certificate) {
	for _, g := range m.all() {
		if p := g.policy.Load(); p.tls != nil {
			c := Certificate{Listener: g.listener}
			c.From, c.Until = p.tls.valid()
			out = append(out, c)
		}
	}
	return out
}

// Fault is why the files of a listener are not those in use.
type Fault struct {
	Listener string
	Err      error
}

// Faults returns the listeners whose files cannot be used.
func (m *Metrics) Faults() (out []Fault) {
	for _, g := range m.all() {
		if err := g.policy.Load().fault(); err != nil {
			out = append(out, Fault{g.listener, err})
		}
	}
	return out
}

// all returns the gates, by listener.
func (m *Metrics) all() []*Gate {
	m.mu.Lock()
	defer m.mu.Unlock()
	out := make([]*Gate, 0, len(m.gates))
	for g := range m.gates {
		out = append(out, g)
	}
	slices.SortFunc(out, func(a, b *Gate) int { return cmp.Compare(a.listener, b.listener) })
	return out
}
