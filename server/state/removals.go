package state

import (
	"time"

	"github.com/isthmus-mesh/isthmus/internal/clip"
	"github.com/isthmus-mesh/isthmus/plugin/collection"
	pluginv1 "github.com/isthmus-mesh/isthmus/plugin/proto/isthmus/plugin/v1"
	"github.com/isthmus-mesh/isthmus/server/state/history"
	"github.com/isthmus-mesh/isthmus/server/state/protect"
)

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
	case c.marked(isPaused):
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
		if u.Err != nil {
			continue
		}
		if u.IsInstance() {
			instances[u.Service]++
			continue
		}
		if u.Part.Collection != collection.ServiceEntry || names[u.Part.Name] {
			continue
		}
		names[u.Part.Name] = true
		if c := t.claim(u.Part.Name, b.r); c == nil || c.marked(isPaused) {
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
	if r.guard.IsHarmless(len(removals), r.status.Listing, time.Now()) {
		for _, rm := range removals {
			b.remove(rm.GetCollection(), rm.GetName())
		}
		return
	}
	var l losses
	for _, rm := range removals {
		r.forgetRejection(rm.GetCollection(), rm.GetName())
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
	accident, from, verdicts := g.Config.Decide(b.weigh(l, swept, complete, now), &g.Clock, now)
	why := protect.Item{Since: now, From: from, Listing: swept}
	first, of := accident && g.Mass == 0, b.r.high(now)+g.Services
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
				b.pause(i, hold)
			}
			b.putBackRun(s, hold)
			if of.entry != nil {
				b.pause(of.entry, hold)
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
			b.pause(c, why)
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
	var gain int
	var entries map[string]bool
	var instances map[string]int
	if !complete { // upserts of the batch are not applied yet
		gain, entries, instances = b.brings()
	}
	out := b.r.guard.Batch(gain, complete, b.r.status.Listing, now)
	for _, s := range l.order {
		of := l.services[s]
		out.Losses = append(out.Losses, s.counts.Loss(len(of.instances), instances[s.name], of.entry != nil, entries[s.name], swept, now))
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
		if g.Live+g.Services >= most || entries.claim(lost.entry.Name(), b.r) != nil {
			continue
		}
		e := b.claimAgain(lost.entry, nil)
		for _, i := range lost.instances {
			b.putBackOne(i, e.of, why)
		}
		why.Back = true
		b.pause(e, why)
	}
	for s := range g.runs {
		if s.counts.IsFew(&g.Config) {
			b.putBackRun(s, why)
		}
	}
}

// putBackRun puts back the endpoints that a service lost of late.
func (b *batch) putBackRun(s *service, why protect.Item) {
	for _, i := range s.counts.Take() {
		b.putBackOne(i, s, why)
	}
}

// putBackOne puts back an endpoint of a service and retains it, unless the name
// is taken.
func (b *batch) putBackOne(i *Record, s *service, why protect.Item) {
	if i.kind.collection.claim(i.Name(), b.r) == nil {
		why.Back = true
		b.pause(b.claimAgain(i, s), why)
	}
}

// claimAgain claims a removed resource again, an instance for a service.
func (b *batch) claimAgain(old *Record, s *service) *Record {
	c := old.copy()
	if c.of = s; s == nil && old.parts != nil {
		b.r.newService(c)
	}
	b.add(c, nil)
	return c
}

// pause retains a resource that its registry removed.
func (b *batch) pause(c *Record, why protect.Item) {
	if c.marked(isPaused) {
		return
	}
	b.r.guard.Begin(&why, b.r.status.Listing)
	b.r.pause(c, &why)
}
