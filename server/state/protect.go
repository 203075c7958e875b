package state

import (
	"errors"
	"fmt"
	"iter"
	"slices"
	"time"

	"github.com/isthmus-mesh/isthmus/internal/clip"
	"github.com/isthmus-mesh/isthmus/plugin/collection"
	pluginv1 "github.com/isthmus-mesh/isthmus/plugin/proto/isthmus/plugin/v1"
	"github.com/isthmus-mesh/isthmus/server/encode"
	"github.com/isthmus-mesh/isthmus/server/state/history"
	"github.com/isthmus-mesh/isthmus/server/state/problems"
	"github.com/isthmus-mesh/isthmus/server/state/protect"
	"github.com/isthmus-mesh/isthmus/server/state/record"
)

// Protect says which removals are treated as accidental and held back.
type Protect = protect.Config

// ProtectService says which endpoint removals of a service are held back.
type ProtectService = protect.Service

// ProtectWindow is how far back counts are compared with.
const ProtectWindow = protect.Window

// Errors of [Registry.Accept] and [Registry.Refuse].
var (
	// ErrNothingKept is returned if no removal is held back.
	ErrNothingKept = errors.New("no removal is paused: the registry has everything that is served of it")
	// ErrAlreadyRefused is returned if no removal awaits a decision.
	ErrAlreadyRefused = errors.New("everything whose removal is paused is kept already; isthmus removals allow is still possible")
)

// Protection summarizes the removals held back for a registry.
type Protection struct {
	// Pending reports whether removals await Until or a decision. It is false
	// once all were refused.
	Pending   bool `json:"pending"`
	Services  int  `json:"services"`  // to be removed or left without endpoints
	Of        int  `json:"of"`        // services before the removals
	Endpoints int  `json:"endpoints"` // to be removed
	Resources int  `json:"resources"` // others to be removed
	// PutBack is how many of all these had gone before the removals looked like
	// an accident, and were put back then.
	PutBack int       `json:"put_back,omitempty"`
	Since   time.Time `json:"since,omitzero"` // of the first removal
	Until   time.Time `json:"until,omitzero"` // time of the removal; zero if refused
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

// Kept is a resource that is still served after its registry removed it.
type Kept struct {
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
	protect Protect
	live    int           // services, except those whose endpoints were all removed
	base    int           // live at the start of the current listing
	peaks   protect.Peaks // past values of live
	// missing is what the services of live have lost with endpoints, in parts
	// of [protect.Whole]; runs are those that lost or got any of late.
	missing int
	runs    map[*service]struct{}
	run     protect.Run[*lostService]

	kept      map[keptName]*protect.Item // nil until first used
	services  int                        // retained, or with only retained endpoints
	endpoints int                        // retained
	resources int                        // retained, neither services nor endpoints
	putBack   int                        // retained after it was gone
	pending   int                        // retained, awaiting a decision
	mass      int                        // of pending, those due to [Protect.MinShare]
	of        int                        // services before, including those already retained
	since     time.Time                  // the earliest time from which the hold of a pending one counts
	clock     protect.Clock              // from when on the time of a further one counts
	told      time.Time                  // time of the last log line
}

type keptName struct {
	table *table
	name  string
}

// high returns the peak number of services in the window. Additions count once
// their listing is complete: before that, renamed services would count twice.
func (r *Registry) high(now time.Time) int {
	count := r.guard.live
	if r.status.Listing {
		count = r.guard.base
	}
	return r.guard.peaks.Max(count, now)
}

// noteLive records a decrease in the number of services.
func (r *Registry) noteLive(before int) {
	if g := &r.guard; g.protect.MinShare > 0 && g.live < before && !r.status.Listing {
		g.peaks.Note(before, time.Now())
	}
}

// recount updates the service's contribution to the counts of its guard.
func (s *service) recount() {
	g := &s.registry.guard
	if live := !s.isKept && !s.emptied; live != s.counted {
		s.counted = live
		g.live += one(live)
	}
	if lost := s.isKept || s.live == 0 && s.keptCount > 0; lost != s.lost {
		s.lost = lost
		g.services += one(lost)
	}
	s.weigh()
}

// weigh updates what the registry misses of the service.
func (s *service) weigh() {
	missing := 0
	if s.counted {
		missing = protect.Missing(s.live, s.run.Len(0))
	}
	s.registry.guard.missing += missing - s.missing
	s.missing = missing
}

// noteEndpoint notes an endpoint that the service lost, or got. What a first
// listing brings replaces nothing.
func (s *service) noteEndpoint(i *Record, lost bool) {
	r := s.registry
	if r.guard.protect.Enabled() && (lost || r.status.Listed()) {
		if s.run == nil {
			s.run = new(protect.Run[*Record])
		}
		if r.guard.runs == nil {
			r.guard.runs = make(map[*service]struct{})
		}
		r.guard.runs[s] = struct{}{}
		if lost {
			s.run.Remove(i, time.Now())
		} else {
			s.run.Add(func(old *Record) bool { return old.Name() == i.Name() }, time.Now())
		}
	}
	s.weigh()
}

// lostService is a service that was removed, with the endpoints that it had.
type lostService struct {
	entry     *Record
	instances []*Record
}

// noteService notes a service that the registry lost, or got.
func (r *Registry) noteService(l *lostService, lost bool) {
	switch g := &r.guard; {
	case g.protect.MinShare <= 0 || !lost && !r.status.Listed():
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
		if !keep || !s.run.Expire(now) {
			s.run = nil
			delete(g.runs, s)
		}
		s.weigh()
	}
	if !keep {
		g.run = protect.Run[*lostService]{}
	}
	g.run.Expire(now)
}

func one(up bool) int {
	if up {
		return 1
	}
	return -1
}

// countLive adds n to the endpoints of the service.
func (s *service) countLive(n int) {
	if s.registry.guard.protect.Service.MinShare > 0 && n < 0 {
		s.peaks.Note(s.live, time.Now())
	}
	s.live += n
	if empty := s.live == 0; empty != s.emptied {
		s.emptied = empty
		s.recount()
	}
}

// countRestored counts restored claims, which are not applied in batches.
func (r *Registry) countRestored() {
	t := r.db.tables[collection.ServiceEntry]
	r.guard.live = 0
	for name := range t.index {
		switch c := t.claim(name, r); {
		case c == nil:
		case c.parts != nil:
			c.of.live = c.of.instances().Len()
			if c.of.counted = !c.of.emptied; c.of.counted {
				r.guard.live++
			}
			c.of.weigh()
		default:
			r.guard.live++
		}
	}
}

// isService reports whether the record is a ServiceEntry published unchanged.
func (r *Record) isService() bool { return r.of == nil && r.Collection() == collection.ServiceEntry }

// loss is what a batch removes from one service.
type loss struct {
	entry     *Record // nil if it stays
	instances []*Record
}

// losses are the removals of a batch, except of resources already retained.
type losses struct {
	services map[*service]*loss
	order    []*service
	plain    []*Record // resources that belong to no service
}

func (l *losses) of(s *service) *loss {
	if l.services == nil {
		l.services = make(map[*service]*loss)
	}
	if l.services[s] == nil {
		l.services[s] = new(loss)
		l.order = append(l.order, s)
	}
	return l.services[s]
}

func (l *losses) add(c *Record) {
	switch {
	case c.marked(isKept):
	case c.IsInstance():
		of := l.of(c.of)
		of.instances = append(of.instances, c)
	case c.parts != nil:
		l.of(c.of).entry = c
	default:
		l.plain = append(l.plain, c)
	}
}

// brings returns the number of services that the batch adds, the names of its
// ServiceEntries, and how many instances it has of each service.
func (b *batch) brings() (gain int, names map[string]bool, instances map[string]int) {
	t := b.db.tables[collection.ServiceEntry]
	names, instances = make(map[string]bool), make(map[string]int)
	for n := range b.upserts {
		u := &b.upserts[n]
		if u.err != nil {
			continue
		}
		if u.isInstance() {
			instances[u.service]++
			continue
		}
		if u.part.Collection != collection.ServiceEntry || names[u.part.Name] {
			continue
		}
		names[u.part.Name] = true
		if c := t.claim(u.part.Name, b.r); c == nil || c.marked(isKept) {
			gain++
		}
	}
	return gain, names, instances
}

// removals applies the removals of a message.
func (b *batch) removals(removals []*pluginv1.Removal) {
	if len(removals) == 0 {
		return
	}
	for _, rm := range removals {
		if rm.GetReason() != "" {
			if b.idle == nil {
				b.idle = make(map[string]history.Idle)
			}
			b.idle[rm.GetName()] = history.Idle{Health: clip.Text(rm.GetHealth(), maxHealth), Reason: clip.Text(rm.GetReason(), maxIdle)}
		}
	}
	r := b.r
	g := &r.guard
	if !g.protect.Enabled() || g.protect.Service.MinShare <= 0 && g.mass == 0 &&
		!g.protect.Suspicious(g.live-len(removals), g.missing, r.high(time.Now()), false) {
		// Each removal removes at most one service.
		for _, rm := range removals {
			b.remove(rm.GetCollection(), rm.GetName())
		}
		return
	}
	var l losses
	for _, rm := range removals {
		r.forgetRefusal(rm.GetCollection(), rm.GetName())
		if t := b.db.tables[rm.GetCollection()]; t != nil {
			if c := t.claim(rm.GetName(), r); c != nil {
				l.add(c)
			}
		}
	}
	b.lose(&l, false, false)
}

// lose removes resources, or retains them if the removal looks like an
// accident. Swept means that a listing lacks them, complete that the listing
// was complete.
func (b *batch) lose(l *losses, swept, complete bool) {
	g, now := &b.r.guard, time.Now()
	accident, from, verdicts := g.protect.Decide(b.weigh(l, swept, complete, now), &g.clock, now)
	why := protect.Item{Since: now, From: from, Listing: swept}
	first, of := accident && g.mass == 0, b.r.high(now)+g.services
	for n, s := range l.order {
		of, v := l.services[s], verdicts[n]
		hold := protect.Item{Since: now, From: v.From, Listing: swept, Service: v.Service}
		switch {
		case v.Hold:
			if of.entry != nil {
				of.instances = nil
				s.each(func(i *Record) { of.instances = append(of.instances, i) })
			}
			for _, i := range of.instances {
				b.keepBack(i, hold)
			}
			b.putBackRun(s, hold)
			if of.entry != nil {
				b.keepBack(of.entry, hold)
			}
		case of.entry != nil:
			b.removeRecord(of.entry) // removes the instances too
		default:
			for _, i := range of.instances {
				b.removeRecord(i)
			}
		}
	}
	for _, c := range l.plain {
		if accident {
			b.keepBack(c, why)
		} else {
			b.removeRecord(c)
		}
	}
	if first {
		b.putBack(of, why)
	}
}

// weigh returns what the rules look at.
func (b *batch) weigh(l *losses, swept, complete bool, now time.Time) *protect.Batch {
	g := &b.r.guard
	var gain int
	var entries map[string]bool
	var instances map[string]int
	if !complete { // upserts of the batch are not applied yet
		gain, entries, instances = b.brings()
	}
	out := &protect.Batch{
		Services: g.live + gain, Missing: g.missing, Peak: b.r.high(now), Complete: complete, Pending: g.pending, Mass: g.mass > 0,
		Losses: make([]protect.Loss, 0, len(l.order)),
	}
	for _, s := range l.order {
		of, comes := l.services[s], instances[s.name]
		loss := protect.Loss{Counted: s.counted, Live: s.live, Goes: len(of.instances), Less: s.run.Len(0), Peak: s.peaks.Max(s.live, now)}
		if loss.Whole = loss.Goes >= s.live && comes == 0; of.entry != nil {
			loss.Goes, loss.Whole = s.live, !entries[s.name]
		}
		loss.Net = min(s.live, s.run.Len(max(0, loss.Goes-comes))-s.run.Len(0))
		stay := s.live - loss.Goes
		loss.Replaced = swept && stay >= loss.Goes || !loss.Whole && comes > 0
		out.Losses = append(out.Losses, loss)
	}
	for _, c := range l.plain {
		if c.isService() && !entries[c.Name()] {
			out.Plain++
		}
	}
	return out
}

// putBack puts back what the registry lost before its removals looked like an
// accident, as far as nothing has taken its place: up to as many services.
func (b *batch) putBack(most int, why protect.Item) {
	g := &b.r.guard
	entries := b.db.tables[collection.ServiceEntry]
	for _, lost := range g.run.Take() {
		if g.live+g.services >= most || entries.claim(lost.entry.Name(), b.r) != nil {
			continue
		}
		e := b.claimAgain(lost.entry, nil)
		for _, i := range lost.instances {
			b.keepAgain(i, e.of, why)
		}
		why.Back = true
		b.keepBack(e, why)
	}
	for s := range g.runs {
		if g.protect.Few(s.live, s.run.Len(0)) {
			b.putBackRun(s, why)
		}
	}
}

// putBackRun puts back the endpoints that a service lost of late.
func (b *batch) putBackRun(s *service, why protect.Item) {
	if s.run == nil {
		return
	}
	for _, i := range s.run.Take() {
		b.keepAgain(i, s, why)
	}
}

// keepAgain puts back an endpoint of a service and retains it, unless the name
// is taken.
func (b *batch) keepAgain(i *Record, s *service, why protect.Item) {
	if i.kind.collection.claim(i.Name(), b.r) == nil {
		why.Back = true
		b.keepBack(b.claimAgain(i, s), why)
	}
}

// claimAgain claims a removed resource again, an instance for a service.
func (b *batch) claimAgain(old *Record, s *service) *Record {
	c := old.copy()
	switch {
	case s != nil:
		c.of = s
		b.r.instances++
		s.added = append(s.added, c)
	case old.parts != nil:
		c.of = &service{registry: b.r, name: old.of.name, selector: old.of.selector, label: old.of.label}
		c.parts = &composition{Selector: old.of.selector}
		b.r.services++
	}
	b.claim(c, true)
	if c.of == nil {
		return c
	}
	b.change(c.of)
	if s != nil {
		s.countLive(1)
		return c
	}
	c.of.recount()
	if hosts := encode.Hosts(c.Spec()); !c.Is(record.OwnAddress) && len(hosts) > 0 {
		b.setHost(c.of, hosts[0])
	}
	return c
}

// keepBack retains a resource that its registry removed.
func (b *batch) keepBack(c *Record, why protect.Item) {
	if c.marked(isKept) {
		return
	}
	g := &b.r.guard
	if g.pending == 0 {
		g.since, g.of = why.From, b.r.high(why.Since)+g.services
	}
	b.r.setKept(c, &why)
	g.pending++
	if !why.Service {
		g.mass++
	}
	if why.Back {
		g.putBack++
	}
	g.countKept(c, 1)
}

// setKept marks a resource as retained, for readers too; nil ends that.
func (r *Registry) setKept(c *Record, why *protect.Item) {
	g, name := &r.guard, keptName{c.kind.collection, c.Name()}
	r.db.book.change(func() {
		c.mark(isKept, why != nil)
		if why == nil {
			delete(g.kept, name)
			return
		}
		if g.kept == nil {
			g.kept = make(map[keptName]*protect.Item)
		}
		g.kept[name] = why
	})
}

// countKept adds n to the counts that include the retained resource.
func (g *guard) countKept(c *Record, n int) {
	switch {
	case c.IsInstance():
		g.endpoints += n
		c.of.keptCount += n
		c.of.countLive(-n)
		c.of.recount()
	case c.parts != nil:
		c.of.isKept = n > 0
		c.of.recount()
	case c.isService():
		g.services += n
		g.live -= n
	default:
		g.resources += n
	}
}

// unkeep ends the retention of a resource that its registry has again or that
// is being removed.
func (r *Registry) unkeep(c *Record) {
	if !c.marked(isKept) {
		return
	}
	g := &r.guard
	item := g.kept[keptName{c.kind.collection, c.Name()}]
	if !item.Refused {
		g.pending--
		if !item.Service {
			g.mass--
		}
	}
	if item.Back {
		g.putBack--
	}
	r.setKept(c, nil)
	g.countKept(c, -1)
}

// protectionChanged logs changes of the removals held back at the end of a
// batch.
func (r *Registry) protectionChanged(before, kept int) {
	g := &r.guard
	switch {
	case before == 0 && g.pending == 0:
		if kept == len(g.kept) {
			return
		}
	case g.pending == 0:
		r.log.Info("the registry has everything again whose removal was paused")
		r.endProtection()
	case before == 0, g.pending > before && time.Since(g.told) >= problems.Within:
		g.told = time.Now()
		p := r.protection()
		r.log.Warn("a removal looks like an accident and is paused", "services", p.Services, "of", p.Of, "endpoints", p.Endpoints,
			"resources", p.Resources, "put_back", p.PutBack, "until", p.Until, "decide", "isthmus removals allow "+r.name+" or isthmus removals keep "+r.name)
	}
	r.db.metrics.setProtected(r)
	r.db.remark()
}

// endProtection resets the state once no removal is pending.
func (r *Registry) endProtection() {
	g := &r.guard
	g.since, g.told = time.Time{}, time.Time{}
	if len(g.kept) == 0 {
		r.db.book.change(func() { g.kept = nil })
		g.of = 0
	}
	r.db.metrics.setProtected(r)
	r.db.remark()
}

// protection summarizes the removals held back. The caller holds apply.
func (r *Registry) protection() Protection {
	g := &r.guard
	p := Protection{
		Pending: g.pending > 0, Services: g.services, Of: g.of, Endpoints: g.endpoints, Resources: g.resources, PutBack: g.putBack,
	}
	if p.Pending {
		p.Since, p.Until = g.since, g.since.Add(g.protect.Hold)
	}
	return p
}

// Protection summarizes the removals held back; ok is false if there are none.
func (r *Registry) Protection() (p Protection, ok bool) {
	if now := r.Status().Protection; now != nil {
		return *now, true
	}
	return p, false
}

// Accept applies all removals that are held back, including refused ones, and
// returns their summary. The error is [ErrNothingKept].
func (r *Registry) Accept() (Protection, error) {
	r.db.apply.Lock()
	defer r.db.unlock()
	if len(r.guard.kept) == 0 {
		return Protection{}, ErrNothingKept
	}
	was := r.protection()
	if err := r.removeKept(func(*protect.Item) bool { return true }); err != nil {
		return was, err
	}
	r.log.Warn("an operator allowed the paused removal", "services", was.Services, "endpoints", was.Endpoints, "resources", was.Resources)
	return was, nil
}

// Refuse retains the resources until the registry has them again or their
// removal is accepted. The error is [ErrNothingKept] or [ErrAlreadyRefused].
func (r *Registry) Refuse() (Protection, error) {
	r.db.apply.Lock()
	defer r.db.unlock()
	g := &r.guard
	if len(g.kept) == 0 {
		return Protection{}, ErrNothingKept
	}
	if g.pending == 0 {
		return Protection{}, ErrAlreadyRefused
	}
	for name, k := range g.kept {
		r.db.book.change(func() { k.Refused = true })
		name.table.claim(name.name, r).forgetPeaks()
	}
	g.pending, g.mass = 0, 0
	g.peaks = nil // later removals are compared with what remains
	r.forgetRuns(false)
	was := r.protection()
	r.endProtection()
	r.log.Warn("an operator keeps what the registry removed, until it has that again", "services", was.Services, "endpoints", was.Endpoints, "resources", was.Resources)
	return was, nil
}

// forgetPeaks clears the endpoint peaks of the record's service.
func (r *Record) forgetPeaks() {
	if r.of != nil {
		r.of.peaks = nil
	}
}

// expire applies removals that have been held back for Protect.Hold, except
// while the registry is disconnected or a listing is in progress.
func (r *Registry) expire(now time.Time) {
	g := &r.guard
	if g.pending == 0 || now.Sub(g.since) < g.protect.Hold || r.status.Listing || r.status.Stale() {
		return
	}
	if g.since = g.earliest(); now.Sub(g.since) < g.protect.Hold {
		return // those before are there again
	}
	was := r.protection()
	if r.removeKept(func(k *protect.Item) bool { return !k.Refused && now.Sub(k.From) >= g.protect.Hold }) != nil {
		r.db.book.change(func() {
			for _, k := range g.kept {
				k.From = now // until another hold is over
			}
		})
		g.since = now
		return
	}
	r.log.Warn("nobody decided on the paused removal; it is carried out", "services", was.Services-g.services, "endpoints", was.Endpoints-g.endpoints,
		"resources", was.Resources-g.resources, "after", g.protect.Hold)
}

// earliest returns the time from which the hold of the first pending resource
// counts; there is one.
func (g *guard) earliest() (first time.Time) {
	for _, k := range g.kept {
		if !k.Refused && (first.IsZero() || k.From.Before(first)) {
			first = k.From
		}
	}
	return first
}

// removeKept removes the retained resources that chosen selects. After an error
// all of them are retained as before.
func (r *Registry) removeKept(chosen func(*protect.Item) bool) error {
	b := &batch{r: r, db: r.db}
	return r.db.attempt(b, aDecision, func() { r.removeChosen(b, chosen) })
}

func (r *Registry) removeChosen(b *batch, chosen func(*protect.Item) bool) {
	var gone []*Record
	for name, k := range r.guard.kept {
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
	r.guard.peaks = nil // later removals are compared with what remains
	r.forgetRuns(false)
	if r.guard.pending == 0 {
		r.endProtection()
	} else {
		r.guard.since = r.guard.earliest()
		r.db.metrics.setProtected(r)
	}
	r.db.metrics.setBytes(r)
	r.countProblems()
	r.summarize(false)
}

// Kept yields the retained resources of one registry, or of all if the name is
// empty, in any order.
func (d *DB) Kept(registry string) iter.Seq[Kept] {
	return func(yield func(Kept) bool) {
		d.apply.Lock()
		registries := slices.Clone(d.registries)
		d.apply.Unlock()
		for _, r := range registries {
			if registry != "" && r.name != registry {
				continue
			}
			for _, k := range r.keptNow() {
				if !yield(k) {
					return
				}
			}
		}
	}
}

func (r *Registry) keptNow() []Kept {
	r.db.apply.Lock()
	defer r.db.apply.Unlock()
	g := &r.guard
	out := make([]Kept, 0, len(g.kept))
	for name, item := range g.kept {
		k := Kept{Registry: r.name, Collection: name.table.name, Name: name.name, Since: item.Since, Reason: item.Reason()}
		if c := name.table.claim(name.name, r); c.IsInstance() {
			k.Service = c.of.name
		}
		if !item.Refused {
			k.Until = item.From.Add(g.protect.Hold)
		}
		out = append(out, k)
	}
	return out
}
