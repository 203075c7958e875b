package protect

import (
	"fmt"
	"iter"
	"time"
)

// Guard counts what a registry has, and what is served of it after the registry
// removed it.
type Guard struct {
	Config Config
	Live   int // services, except those whose endpoints were all removed
	Base   int // Live at the start of the current listing
	Clock  Clock

	// What is served after it was removed.

	Services  int       // with those of which only endpoints are left
	Endpoints int       // of all services
	Resources int       // neither services nor endpoints
	PutBack   int       // of all these, those that had gone
	Pending   int       // of all these, those that wait for a decision
	Mass      int       // of Pending, those due to Config.MinShare
	Of        int       // services before, with those that were retained already
	Since     time.Time // the earliest time from which the hold of a pending one counts

	missing int   // what the services of Live have lost with endpoints, in parts of [Whole]
	peaks   Peaks // past values of Live
}

// Reset empties the counts of what is served after it was removed.
func (g *Guard) Reset() {
	g.Services, g.Endpoints, g.Resources, g.PutBack, g.Pending, g.Mass, g.missing = 0, 0, 0, 0, 0, 0, 0
}

// High returns the peak number of services in the window. Additions count once
// their listing is complete: before that, renamed services would count twice.
func (g *Guard) High(listing bool, now time.Time) int {
	count := g.Live
	if listing {
		count = g.Base
	}
	return g.peaks.Max(count, now)
}

// NoteLive records a decrease in the number of services, outside of a listing.
func (g *Guard) NoteLive(before int, now time.Time) {
	if g.Config.MinShare > 0 && g.Live < before {
		g.peaks.Note(before, now)
	}
}

// ForgetPeaks has later removals compared with what remains.
func (g *Guard) ForgetPeaks() { g.peaks = nil }

// IsHarmless reports whether so many removals are none to decide on: each
// removes at most one service.
func (g *Guard) IsHarmless(n int, listing bool, now time.Time) bool {
	return !g.Config.Enabled() || g.Config.Service.MinShare <= 0 && g.Mass == 0 &&
		!g.Config.Suspicious(g.Live-n, g.missing, g.High(listing, now), false)
}

// Batch returns a batch without losses, which adds so many services.
func (g *Guard) Batch(gain int, complete, listing bool, now time.Time) *Batch {
	return &Batch{
		Services: g.Live + gain, Missing: g.missing, Peak: g.High(listing, now), Complete: complete, Pending: g.Pending, Mass: g.Mass > 0,
	}
}

// Begin notes what a removal that is going to be paused is compared with, if it
// is the first one.
func (g *Guard) Begin(it *Item, listing bool) {
	if g.Pending == 0 {
		g.Since, g.Of = it.From, g.High(listing, it.Since)+g.Services
	}
}

// Count adds n to the counts of items like one.
func (g *Guard) Count(it *Item, n int) {
	if !it.Kept {
		g.Pending += n
		if !it.Service {
			g.Mass += n
		}
	}
	if it.Back {
		g.PutBack += n
	}
}

// Protection summarizes the removals that are paused for a registry.
type Protection struct {
	// Pending reports whether removals await Until or a decision. It is false
	// once an operator keeps all of it.
	Pending   bool `json:"pending"`
	Services  int  `json:"services"`  // to be removed or left without endpoints
	Of        int  `json:"of"`        // services before the removals
	Endpoints int  `json:"endpoints"` // to be removed
	Resources int  `json:"resources"` // others to be removed
	// PutBack is how many of all these had gone before the removals looked like
	// an accident, and were put back then.
	PutBack int       `json:"put_back,omitempty"`
	Since   time.Time `json:"since,omitzero"` // of the first removal
	Until   time.Time `json:"until,omitzero"` // time of the removal; zero if an operator keeps it
}

// String returns the counts in words.
func (p Protection) String() string {
	s := fmt.Sprintf("would remove %d of %d services, %d endpoints", p.Services, p.Of, p.Endpoints)
	if p.Resources > 0 {
		s += fmt.Sprintf(", %d other resources", p.Resources)
	}
	if p.PutBack > 0 {
		s += fmt.Sprintf("; %d resources of these had gone and are put back", p.PutBack)
	}
	return s
}

// Protection summarizes the paused removals.
func (g *Guard) Protection() Protection {
	p := Protection{
		Pending: g.Pending > 0, Services: g.Services, Of: g.Of, Endpoints: g.Endpoints, Resources: g.Resources, PutBack: g.PutBack,
	}
	if p.Pending {
		p.Since, p.Until = g.Since, g.Since.Add(g.Config.Hold)
	}
	return p
}

// IsDue reports whether nobody has decided on an item in time.
func (c *Config) IsDue(it *Item, now time.Time) bool {
	return !it.Kept && now.Sub(it.From) >= c.Hold
}

// Until returns the time at which an item is removed, zero if an operator keeps
// it.
func (c *Config) Until(it *Item) time.Time {
	if it.Kept {
		return time.Time{}
	}
	return it.From.Add(c.Hold)
}

// Earliest returns the time from which the hold of the first pending item
// counts; zero if there is none.
func Earliest(items iter.Seq[*Item]) (first time.Time) {
	for it := range items {
		if !it.Kept && (first.IsZero() || it.From.Before(first)) {
			first = it.From
		}
	}
	return first
}

// Endpoints counts those of a service of a [Guard].
type Endpoints[E any] struct {
	Live   int  // except those that are served after they were removed
	Paused int  // these
	Entry  bool // the entry is one of these

	emptied bool    // none of Live is left
	counted bool    // in Guard.Live
	lost    bool    // in Guard.Services
	peaks   Peaks   // past values of Live, with Config.Service
	run     *Run[E] // what went of late
	missing int     // in Guard.missing
}

// Recount updates what the service counts for.
func (e *Endpoints[E]) Recount(g *Guard) {
	if live := !e.Entry && !e.emptied; live != e.counted {
		e.counted = live
		g.Live += one(live)
	}
	if lost := e.Entry || e.Live == 0 && e.Paused > 0; lost != e.lost {
		e.lost = lost
		g.Services += one(lost)
	}
	e.weigh(g)
}

func one(up bool) int {
	if up {
		return 1
	}
	return -1
}

// weigh updates what the registry misses of the service.
func (e *Endpoints[E]) weigh(g *Guard) {
	missing := 0
	if e.counted {
		missing = Missing(e.Live, e.run.Len(0))
	}
	g.missing += missing - e.missing
	e.missing = missing
}

// Add adds n to the endpoints.
func (e *Endpoints[E]) Add(g *Guard, n int, now time.Time) {
	if g.Config.Service.MinShare > 0 && n < 0 {
		e.peaks.Note(e.Live, now)
	}
	e.Live += n
	if empty := e.Live == 0; empty != e.emptied {
		e.emptied = empty
		e.Recount(g)
	}
}

// Pause adds n, 1 or -1, to the endpoints that are served after they were
// removed.
func (e *Endpoints[E]) Pause(g *Guard, n int, now time.Time) {
	g.Endpoints += n
	e.Paused += n
	e.Add(g, -n, now)
	e.Recount(g)
}

// Note notes an endpoint that the service lost, or got, and reports whether it
// remembers that. What a first listing brings replaces nothing.
func (e *Endpoints[E]) Note(g *Guard, i E, lost, listed bool, same func(E) bool, now time.Time) (noted bool) {
	if noted = g.Config.Enabled() && (lost || listed); noted {
		if e.run == nil {
			e.run = new(Run[E])
		}
		if lost {
			e.run.Remove(i, now)
		} else {
			e.run.Add(same, now)
		}
	}
	e.weigh(g)
	return noted
}

// Expire forgets what the service lost, as far as it is over, or all of it, and
// reports whether anything is left.
func (e *Endpoints[E]) Expire(g *Guard, all bool, now time.Time) (left bool) {
	if left = !all && e.run != nil && e.run.Expire(now); !left {
		e.run = nil
	}
	e.weigh(g)
	return left
}

// Take forgets what the service lost of late and returns it, the newest first.
func (e *Endpoints[E]) Take() []E {
	if e.run == nil {
		return nil
	}
	return e.run.Take()
}

// IsFew reports whether the service lost more endpoints of late than the share
// allows; see [Config.Few].
func (e *Endpoints[E]) IsFew(c *Config) bool { return c.Few(e.Live, e.run.Len(0)) }

// ForgetPeaks has later removals compared with what remains.
func (e *Endpoints[E]) ForgetPeaks() { e.peaks = nil }

// Leave ends what the service counts for.
func (e *Endpoints[E]) Leave(g *Guard) {
	if e.counted {
		e.counted = false
		g.Live--
	}
	e.weigh(g)
}

// Inherit takes over what is known of the past of a service that is made anew.
func (e *Endpoints[E]) Inherit(old *Endpoints[E]) { e.peaks, e.emptied = old.peaks, old.emptied }

// Restore counts a service with n endpoints that is made anew.
func (e *Endpoints[E]) Restore(g *Guard, n int) {
	e.Live = n
	if e.counted = !e.emptied; e.counted {
		g.Live++
	}
	e.weigh(g)
}

// Loss returns what a batch removes of the service, and adds to it: endpoints,
// or the entry with all of them, which it may have again. Swept means that a
// listing lacks them.
func (e *Endpoints[E]) Loss(goes, comes int, entry, again, swept bool, now time.Time) Loss {
	l := Loss{Counted: e.counted, Whole: goes >= e.Live && comes == 0, Live: e.Live, Goes: goes, Less: e.run.Len(0), Peak: e.peaks.Max(e.Live, now)}
	if entry {
		l.Goes, l.Whole = e.Live, !again
	}
	l.Net = min(e.Live, e.run.Len(max(0, l.Goes-comes))-l.Less)
	l.Replaced = swept && e.Live-l.Goes >= l.Goes || !l.Whole && comes > 0
	return l
}
