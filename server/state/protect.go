package state

import (
	"errors"
	"iter"
	"maps"
	"slices"
	"time"

	"github.com/isthmus-mesh/isthmus/plugin/collection"
	"github.com/isthmus-mesh/isthmus/server/state/problems"
	"github.com/isthmus-mesh/isthmus/server/state/protect"
)

// Protect says which removals are treated as accidental and paused.
type Protect = protect.Config

// ProtectService says which endpoint removals of a service are paused.
type ProtectService = protect.Service

// ProtectWindow is how far back counts are compared with.
const ProtectWindow = protect.Window

// Errors of [Registry.Allow] and [Registry.Keep].
var (
	// ErrNothingPaused is returned if no removal is paused.
	ErrNothingPaused = errors.New("no removal is paused: the registry has everything that is served of it")
	// ErrAlreadyKept is returned if no removal awaits a decision.
	ErrAlreadyKept = errors.New("everything whose removal is paused is kept already; isthmus removals allow is still possible")
)

// Protection summarizes the paused removals of a registry.
type Protection = protect.Protection

// Removal is a resource that is still served after its registry removed it.
type Removal struct {
	Registry   string    `json:"registry"`
	Collection string    `json:"collection"`
	Name       string    `json:"name"`
	Service    string    `json:"service,omitempty"` // of an endpoint
	Reason     string    `json:"reason"`
	Since      time.Time `json:"since"`
	Until      time.Time `json:"until,omitzero"` // time of the removal; zero if refused
}

// guard is the state of [Protect] for one registry, guarded by DB.apply.
type guard struct {
	protect.Guard
	paused map[claimName]*protect.Item // nil until first used
	runs   map[*service]struct{}       // services that lost or got endpoints of late
	run    protect.Run[*lostService]
	told   time.Time // time of the last log line
}

type claimName struct {
	table *table
	name  string
}

// high returns the peak number of services in the window.
func (r *Registry) high(now time.Time) int { return r.guard.High(r.status.Listing, now) }

// noteEndpoint notes an endpoint that the service lost, or got.
func (s *service) noteEndpoint(i *Record, lost bool) {
	g := &s.registry.guard
	if s.counts.Note(&g.Guard, i, lost, s.registry.status.Listed(), func(old *Record) bool { return old.Name() == i.Name() }, time.Now()) {
		if g.runs == nil {
			g.runs = make(map[*service]struct{})
		}
		g.runs[s] = struct{}{}
	}
}

// lostService is a service that was removed, with the endpoints that it had.
type lostService struct {
	entry     *Record
	instances []*Record
}

// noteService notes a service that the registry lost, or got.
func (r *Registry) noteService(l *lostService, lost bool) {
	switch g := &r.guard; {
	case g.Config.MinShare <= 0 || !lost && !r.status.Listed():
	case lost:
		g.run.Remove(l, time.Now())
	default:
		g.run.Add(func(old *lostService) bool { return old.entry.Name() == l.entry.Name() }, time.Now())
	}
}

// forgetRuns forgets what the registry and its services lost: what is over, or
// without keep everything.
func (r *Registry) forgetRuns(keep bool) {
	g, now := &r.guard, time.Now()
	for s := range g.runs {
		if !s.counts.Expire(&g.Guard, !keep, now) {
			delete(g.runs, s)
		}
	}
	if !keep {
		g.run = protect.Run[*lostService]{}
	}
	g.run.Expire(now)
}

// countRestored counts restored claims, which are not applied in batches.
func (r *Registry) countRestored() {
	t := r.db.tables[collection.ServiceEntry]
	r.guard.Live = 0
	for name := range t.index {
		switch c := t.claim(name, r); {
		case c == nil:
		case c.parts != nil:
			c.of.counts.Restore(&r.guard.Guard, c.of.own.Len())
		default:
			r.guard.Live++
		}
	}
}

// isService reports whether the record is a ServiceEntry published unchanged.
func (r *Record) isService() bool { return r.of == nil && r.Collection() == collection.ServiceEntry }

// setPaused marks a resource as retained, for readers too; nil ends that.
func (r *Registry) setPaused(c *Record, why *protect.Item) {
	g, name := &r.guard, claimName{c.kind.collection, c.Name()}
	r.db.book.Change(func() {
		c.mark(isPaused, why != nil)
		if why == nil {
			delete(g.paused, name)
			return
		}
		if g.paused == nil {
			g.paused = make(map[claimName]*protect.Item)
		}
		g.paused[name] = why
	})
}

// countPaused adds n to the counts that include the retained resource.
func (g *guard) countPaused(c *Record, n int) {
	switch {
	case c.IsInstance():
		c.of.counts.Pause(&g.Guard, n, time.Now())
	case c.parts != nil:
		c.of.counts.Entry = n > 0
		c.of.counts.Recount(&g.Guard)
	case c.isService():
		g.Services += n
		g.Live -= n
	default:
		g.Resources += n
	}
}

// resume ends the retention of a resource that its registry has again or that
// is being removed.
func (r *Registry) resume(c *Record) {
	if !c.marked(isPaused) {
		return
	}
	g := &r.guard
	g.Count(g.paused[claimName{c.kind.collection, c.Name()}], -1)
	r.setPaused(c, nil)
	g.countPaused(c, -1)
}

// protectionChanged logs changes of the paused removals at the end of a batch.
func (r *Registry) protectionChanged(before, kept int) {
	g := &r.guard
	switch {
	case before == 0 && g.Pending == 0:
		if kept == len(g.paused) {
			return
		}
	case g.Pending == 0:
		r.log.Info("the registry has everything again; no removal is paused any more")
		r.endProtection()
	case before == 0, g.Pending > before && time.Since(g.told) >= problems.Within:
		g.told = time.Now()
		p := r.guard.Protection()
		r.log.Warn("a removal looks like an accident and is paused", "services", p.Services, "of", p.Of, "endpoints", p.Endpoints,
			"resources", p.Resources, "put_back", p.PutBack, "until", p.Until, "decide", "isthmus removals allow "+r.name+" or isthmus removals keep "+r.name)
	}
	r.db.metrics.setPaused(r)
	r.db.remark()
}

// endProtection resets the state once no removal is pending.
func (r *Registry) endProtection() {
	g := &r.guard
	g.Since, g.told = time.Time{}, time.Time{}
	if len(g.paused) == 0 {
		r.db.book.Change(func() { g.paused = nil })
		g.Of = 0
	}
	r.db.metrics.setPaused(r)
	r.db.remark()
}

// Protection summarizes the paused removals; ok is false if there are none.
func (r *Registry) Protection() (p Protection, ok bool) {
	if now := r.Status().Protection; now != nil {
		return *now, true
	}
	return p, false
}

// Allow applies all paused removals, and those that an operator keeps, and
// returns their summary. The error is [ErrNothingPaused].
func (r *Registry) Allow() (Protection, error) {
	r.db.apply.Lock()
	defer r.db.unlock()
	if len(r.guard.paused) == 0 {
		return Protection{}, ErrNothingPaused
	}
	was := r.guard.Protection()
	if err := r.removePaused(func(*protect.Item) bool { return true }); err != nil {
		return was, err
	}
	r.log.Warn("an operator allowed the paused removal", "services", was.Services, "endpoints", was.Endpoints, "resources", was.Resources)
	return was, nil
}

// Keep retains the resources until the registry has them again or their
// removal is accepted. The error is [ErrNothingPaused] or [ErrAlreadyKept].
func (r *Registry) Keep() (Protection, error) {
	r.db.apply.Lock()
	defer r.db.unlock()
	g := &r.guard
	if len(g.paused) == 0 {
		return Protection{}, ErrNothingPaused
	}
	if g.Pending == 0 {
		return Protection{}, ErrAlreadyKept
	}
	for name, k := range g.paused {
		r.db.book.Change(func() { k.Kept = true })
		name.table.claim(name.name, r).forgetPeaks()
	}
	g.Pending, g.Mass = 0, 0
	g.ForgetPeaks()
	r.forgetRuns(false)
	was := r.guard.Protection()
	r.endProtection()
	r.log.Warn("an operator keeps what the registry removed, until it has that again", "services", was.Services, "endpoints", was.Endpoints, "resources", was.Resources)
	return was, nil
}

// forgetPeaks clears the endpoint peaks of the record's service.
func (r *Record) forgetPeaks() {
	if r.of != nil {
		r.of.counts.ForgetPeaks()
	}
}

// expire applies removals that have been paused for Protect.Hold, except
// while the registry is disconnected or a listing is in progress.
func (r *Registry) expire(now time.Time) {
	g := &r.guard
	if g.Pending == 0 || now.Sub(g.Since) < g.Config.Hold || r.status.Listing || r.status.Stale() {
		return
	}
	if g.Since = protect.Earliest(maps.Values(g.paused)); now.Sub(g.Since) < g.Config.Hold {
		return // those before are there again
	}
	was := r.guard.Protection()
	if r.removePaused(func(k *protect.Item) bool { return g.Config.IsDue(k, now) }) != nil {
		r.db.book.Change(func() {
			for _, k := range g.paused {
				k.From = now // until another hold is over
			}
		})
		g.Since = now
		return
	}
	r.log.Warn("nobody decided on the paused removal; it is carried out", "services", was.Services-g.Services, "endpoints", was.Endpoints-g.Endpoints,
		"resources", was.Resources-g.Resources, "after", g.Config.Hold)
}

// removePaused removes the resources that chosen selects of those whose removal
// is paused. After an error all of them are served as before.
func (r *Registry) removePaused(chosen func(*protect.Item) bool) error {
	b := &batch{r: r, db: r.db}
	return r.db.attempt(b, aDecision, func() { r.removeChosen(b, chosen) })
}

func (r *Registry) removeChosen(b *batch, chosen func(*protect.Item) bool) {
	var gone []*Record
	for name, k := range r.guard.paused {
		if chosen(k) {
			gone = append(gone, name.table.claim(name.name, r))
		}
	}
	for _, c := range gone {
		// Removing an entry also removes its instances.
		if c.kind.collection.claim(c.Name(), r) == c {
			b.removeRecord(c)
		}
		c.forgetPeaks()
	}
	b.commit()
	r.guard.ForgetPeaks()
	r.forgetRuns(false)
	if r.guard.Pending == 0 {
		r.endProtection()
	} else {
		r.guard.Since = protect.Earliest(maps.Values(r.guard.paused))
		r.db.metrics.setPaused(r)
	}
	r.db.metrics.setBytes(r)
	r.countProblems()
	r.summarize(false)
}

// Removals yields the paused removals of one registry, or of all if the name is
// empty, in any order.
func (d *DB) Removals(registry string) iter.Seq[Removal] {
	return func(yield func(Removal) bool) {
		d.apply.Lock()
		registries := slices.Clone(d.registries)
		d.apply.Unlock()
		for _, r := range registries {
			if registry != "" && r.name != registry {
				continue
			}
			for _, k := range r.removalsNow() {
				if !yield(k) {
					return
				}
			}
		}
	}
}

func (r *Registry) removalsNow() []Removal {
	r.db.apply.Lock()
	defer r.db.apply.Unlock()
	g := &r.guard
	out := make([]Removal, 0, len(g.paused))
	for name, item := range g.paused {
		k := Removal{Registry: r.name, Collection: name.table.name, Name: name.name, Since: item.Since, Until: g.Config.Until(item), Reason: item.Reason()}
		if c := name.table.claim(name.name, r); c.IsInstance() {
			k.Service = c.of.name
		}
		out = append(out, k)
	}
	return out
}
