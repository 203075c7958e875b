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
	"github.com/isthmus-mesh/isthmus/server/state/history"
	"github.com/isthmus-mesh/isthmus/server/state/protect"
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
	ErrNothingKept = errors.New("nothing is held back: the registry has everything that is served of it")
	// ErrAlreadyRefused is returned if no removal awaits a decision.
	ErrAlreadyRefused = errors.New("everything that is held back has been refused already; accept is still possible")
)

// Protection summarizes the removals held back for a registry.
type Protection struct {
	// Pending reports whether removals await Until or a decision. It is false
	// once all were refused.
	Pending   bool      `json:"pending"`
	Services  int       `json:"services"`       // to be removed or left without endpoints
	Of        int       `json:"of"`             // services before the removals
	Endpoints int       `json:"endpoints"`      // to be removed
	Resources int       `json:"resources"`      // others to be removed
	Since     time.Time `json:"since,omitzero"` // of the first removal
	Until     time.Time `json:"until,omitzero"` // time of the removal; zero if refused
}

// String returns the counts in words.
func (p Protection) String() string {
	s := fmt.Sprintf("would remove %d of %d services, %d endpoints", p.Services, p.Of, p.Endpoints)
	if p.Resources > 0 {
		s += fmt.Sprintf(", %d other resources", p.Resources)
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

	kept      map[keptName]*protect.Item // nil until first used
	services  int                        // retained, or with only retained endpoints
	endpoints int                        // retained
	resources int                        // retained, neither services nor endpoints
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

// suspicious reports whether a decrease to left services is treated as
// accidental.
func (r *Registry) suspicious(left int, complete bool, now time.Time) bool {
	return r.guard.protect.Suspicious(left, r.high(now), complete)
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
			c.of.live = c.of.instances().count
			if c.of.counted = !c.of.emptied; c.of.counted {
				r.guard.live++
			}
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
// ServiceEntries, and the services that it has instances of.
func (b *batch) brings() (gain int, names, instances map[string]bool) {
	t := b.db.tables[collection.ServiceEntry]
	names, instances = make(map[string]bool), make(map[string]bool)
	for n := range b.upserts {
		u := &b.upserts[n]
		if u.err != nil {
			continue
		}
		if u.isInstance() {
			instances[u.service] = true
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
		!r.suspicious(g.live-len(removals), false, time.Now()) {
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

// lose removes resources, or retains them if the removal is treated as
// accidental. Swept means that a listing lacks them, complete that the listing
// was complete.
//
// The registry-wide rule does not apply to endpoints of a service that still
// has others.
func (b *batch) lose(l *losses, swept, complete bool) {
	r := b.r
	g := &r.guard
	now := time.Now()
	var gain int
	var entries, instances map[string]bool
	if !complete { // upserts of the batch are not applied yet
		gain, entries, instances = b.brings()
	}
	isLost := func(s *service, of *loss) bool {
		if of.entry != nil {
			return !entries[s.name]
		}
		return len(of.instances) >= s.live && !instances[s.name]
	}
	left := g.live + gain
	for _, s := range l.order {
		if s.counted && isLost(s, l.services[s]) {
			left--
		}
	}
	for _, c := range l.plain {
		if c.isService() && !entries[c.Name()] {
			left--
		}
	}
	accident := g.protect.MinShare > 0 && g.mass > 0 || r.suspicious(left, complete, now)
	var massFrom time.Time
	if accident {
		massFrom = g.clock.From(left, g.live+gain, g.protect.MinShare, g.pending, now)
	}
	why := protect.Item{Since: now, Listing: swept}
	for _, s := range l.order {
		of := l.services[s]
		lost := isLost(s, of)
		why.Service, why.From = false, massFrom
		hold := accident && lost
		if p := &g.protect.Service; !hold && p.MinShare > 0 {
			stay := s.live - len(of.instances)
			if of.entry != nil {
				stay = 0
			}
			// At least as many additions, in the batch or the listing, make it
			// a replacement.
			replaced := swept && stay >= len(of.instances) || !lost && instances[s.name]
			hold = !replaced && p.Suspicious(stay, s.peaks.Max(s.live, now))
			if why.Service = hold; hold {
				why.From = g.clock.From(stay, s.live, p.MinShare, g.pending, now)
			}
		}
		switch {
		case hold && of.entry != nil:
			s.each(func(i *Record) { b.keepBack(i, why) })
			b.keepBack(of.entry, why)
		case hold:
			for _, i := range of.instances {
				b.keepBack(i, why)
			}
		case of.entry != nil:
			b.removeRecord(of.entry) // removes the instances too
		default:
			for _, i := range of.instances {
				b.removeRecord(i)
			}
		}
	}
	why.Service, why.From = false, massFrom
	for _, c := range l.plain {
		if accident {
			b.keepBack(c, why)
		} else {
			b.removeRecord(c)
		}
	}
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
	if item := g.kept[keptName{c.kind.collection, c.Name()}]; !item.Refused {
		g.pending--
		if !item.Service {
			g.mass--
		}
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
		r.log.Info("the registry has everything again whose removal was held back")
		r.endProtection()
	case before == 0, g.pending > before && time.Since(g.told) >= linesWithin:
		g.told = time.Now()
		p := r.protection()
		r.log.Warn("a removal looks like an accident and is held back", "services", p.Services, "of", p.Of, "endpoints", p.Endpoints,
			"resources", p.Resources, "until", p.Until, "decide", "isthmus accept "+r.name+" or isthmus refuse "+r.name)
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
		Pending: g.pending > 0, Services: g.services, Of: g.of, Endpoints: g.endpoints, Resources: g.resources,
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
	r.log.Warn("an operator accepted what was held back; it is removed", "services", was.Services, "endpoints", was.Endpoints, "resources", was.Resources)
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
	was := r.protection()
	r.endProtection()
	r.log.Warn("an operator refused what was held back; it is kept until the registry has it again", "services", was.Services, "endpoints", was.Endpoints, "resources", was.Resources)
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
	r.log.Warn("nobody decided on what was held back; it is removed", "services", was.Services-g.services, "endpoints", was.Endpoints-g.endpoints,
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
