package state

import (
	"iter"
	"maps"
	"time"

	"github.com/isthmus-mesh/isthmus/plugin/collection"
	"github.com/isthmus-mesh/isthmus/server/state/protect"
	"github.com/isthmus-mesh/isthmus/server/state/status"
)

// Protect says which removals are treated as accidental and paused.
type Protect = protect.Config

// ProtectService says which endpoint removals of a service are paused.
type ProtectService = protect.Service

// ProtectWindow is how far back counts are compared with.
const ProtectWindow = protect.Window

// Protection summarizes the paused removals of a registry.
type Protection = protect.Protection

// guard is the state of [Protect] for one registry, guarded by DB.apply; a
// writer holds the book too when it changes what is paused.
type guard struct {
	protect.Paused[claimName]
	runs map[*service]struct{} // services that lost or got endpoints of late
	run  protect.Run[*lostService]
}

// claimName identifies a claim of a registry.
type claimName struct {
	table *table
	name  string
	of    *service // nil for a resource without instances
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
	for c := range t.All() {
		switch {
		case !c.isOf(r):
		case c.parts != nil:
			c.of.counts.Restore(&r.guard.Guard, c.of.own.Len())
		default:
			r.guard.Live++
		}
	}
}

// isService reports whether the record is a ServiceEntry published unchanged.
func (r *Record) isService() bool { return r.of == nil && r.Collection() == collection.ServiceEntry }

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

// pause retains a resource that its registry removed.
func (r *Registry) pause(c *Record, why *protect.Item) {
	r.db.book.Change(func() {
		c.mark(isPaused, true)
		r.guard.Set(claimName{c.kind.collection, c.Name(), c.of}, why)
	})
	r.guard.countPaused(c, 1)
}

// resume ends the retention of a resource that its registry has again or that
// is being removed.
func (r *Registry) resume(c *Record) {
	if !c.marked(isPaused) {
		return
	}
	r.db.book.Change(func() {
		c.mark(isPaused, false)
		r.guard.Drop(claimName{c.kind.collection, c.Name(), c.of})
	})
	r.guard.countPaused(c, -1)
}

// protectionChanged logs changes of the paused removals at the end of a batch.
func (r *Registry) protectionChanged(before, kept int) {
	g := &r.guard
	if g.Pending == 0 {
		if before > 0 {
			r.log.Info("the registry has everything again; no removal is paused any more")
		}
		if before > 0 || kept != g.Len() {
			g.Update()
		}
	} else if g.Tell(before, time.Now()) {
		p := g.Protection()
		r.log.Warn("a removal looks like an accident and is paused", "services", p.Services, "of", p.Of, "endpoints", p.Endpoints,
			"resources", p.Resources, "put_back", p.PutBack, "until", p.Until, "decide", "isthmus removals allow "+r.name+" or isthmus removals keep "+r.name)
	}
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
// returns their summary. The error is [protect.ErrNothingPaused].
func (r *Registry) Allow() (Protection, error) {
	r.db.apply.Lock()
	defer r.db.unlock()
	if r.guard.Len() == 0 {
		return Protection{}, protect.ErrNothingPaused
	}
	was := r.guard.Protection()
	if err := r.removePaused(r.guard.Keys()); err != nil {
		return was, err
	}
	r.log.Warn("an operator allowed the paused removal", "services", was.Services, "endpoints", was.Endpoints, "resources", was.Resources)
	return was, nil
}

// Keep retains the resources until the registry has them again or their removal
// is accepted. The error is [protect.ErrNothingPaused] or
// [protect.ErrAlreadyKept].
func (r *Registry) Keep() (p Protection, err error) {
	r.db.apply.Lock()
	defer r.db.unlock()
	if r.db.book.Change(func() { err = r.guard.Keep() }); err != nil {
		return p, err
	}
	for name := range r.guard.Keys() {
		name.forgetPeaks()
	}
	r.forgetRuns(false)
	was := r.guard.Protection()
	r.guard.Update()
	r.db.remark()
	r.log.Warn("an operator keeps what the registry removed, until it has that again", "services", was.Services, "endpoints", was.Endpoints, "resources", was.Resources)
	return was, nil
}

// forgetPeaks clears the endpoint peaks of the service.
func (c claimName) forgetPeaks() {
	if c.of != nil {
		c.of.counts.ForgetPeaks()
	}
}

// expire applies removals that have been paused for Protect.Hold, except
// while the registry is disconnected or a listing is in progress.
func (r *Registry) expire(now time.Time) {
	if r.status.Listing || r.status.Stale() {
		return
	}
	g := &r.guard
	due, ok := g.Due(now)
	if !ok {
		return
	}
	was := g.Protection()
	if r.removePaused(due) != nil {
		r.db.book.Change(func() { g.Restart(now) })
		return
	}
	r.log.Warn("nobody decided on the paused removal; it is carried out", "services", was.Services-g.Services, "endpoints", was.Endpoints-g.Endpoints,
		"resources", was.Resources-g.Resources, "after", g.Config.Hold)
}

// removePaused removes resources whose removal is paused. After an error all of
// them are served as before.
func (r *Registry) removePaused(names iter.Seq[claimName]) error {
	b, before := &batch{r: r, db: r.db}, maps.Collect(r.guard.All())
	err := r.db.attempt(b, aDecision, func() {
		for name := range names {
			if c := name.table.claim(name.name, r); c != nil {
				b.removeRecord(c) // with its instances
			}
			name.forgetPeaks()
		}
		b.commit()
		r.guard.ForgetPeaks()
		r.forgetRuns(false)
		r.guard.Update()
		r.db.remark()
		r.summarize(false)
	})
	if err != nil { // what is there again is paused as before
		for name, it := range before {
			if c := name.table.claim(name.name, r); c != nil && !c.marked(isPaused) {
				r.pause(c, it)
			}
		}
	}
	return err
}

// Removals yields the paused removals of one registry, or of all if the name is
// empty, in any order.
func (d *DB) Removals(registry string) iter.Seq[status.Removal] {
	return func(yield func(status.Removal) bool) {
		for _, st := range d.Registries() {
			if r := d.Registry(st.Registry); r != nil && (registry == "" || st.Registry == registry) {
				d.apply.Lock()
				all := r.removals(func(claimName) bool { return true })
				d.apply.Unlock()
				for _, k := range all {
					if !yield(k) {
						return
					}
				}
			}
		}
	}
}

// removals returns the paused removals that are chosen. The caller holds apply,
// or the book for reading.
func (r *Registry) removals(chosen func(claimName) bool) (out []status.Removal) {
	for name, it := range r.guard.All() {
		if !chosen(name) {
			continue
		}
		k := status.Removal{Registry: *r.shown.Load(), Collection: name.table.name, Name: name.name, Since: it.Since, Until: r.guard.Config.Until(it), Reason: it.Reason()}
		if name.of != nil && name.table.name != collection.ServiceEntry {
			k.Service = name.of.name
		}
		out = append(out, k)
	}
	return out
}
