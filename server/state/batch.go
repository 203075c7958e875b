package state

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/isthmus-mesh/isthmus/plugin/collection"
	"github.com/isthmus-mesh/isthmus/server/encode"
	"github.com/isthmus-mesh/isthmus/server/state/history"
	"github.com/isthmus-mesh/isthmus/server/state/message"
	"github.com/isthmus-mesh/isthmus/server/state/problems"
	"github.com/isthmus-mesh/isthmus/server/state/record"
	"github.com/isthmus-mesh/isthmus/server/state/shapes"
)

// ErrNotComposable is the refusal of a ServiceEntry that is composed of
// separate instances but has endpoints or a workloadSelector.
var ErrNotComposable = errors.New("a ServiceEntry whose instances are resources of their own must have neither endpoints nor workloadSelector")

// batch applies one message of a plugin to the state, or what an operator or
// the configuration changes. The caller holds DB.apply for all methods.
type batch struct {
	r  *Registry
	db *DB

	upserts  []message.Upsert
	idle     map[string]history.Idle // by names of removals that say why
	touched  []touch
	services []*service  // changed
	mergers  []*merger   // to compose
	loose    []*merger   // whose lead or member changed
	hosts    []string    // their addresses may have changed
	others   []*Registry // whose counts have changed
	fresh    []lineOfShadow
	news     []entryID // have a new verdict to log

	written bool // the claims are complete, and the logs are being written
}

// touch is a name whose claims or content the batch changed.
type touch struct {
	table  *table
	name   string
	before *Record // what was in the logs before the batch
}

// selector returns the value of the selector label for the instances of a
// service, and the label encoded as a field of a WorkloadEntry.
func (d *DB) selector(service string) (value string, label []byte) {
	_, short, _ := strings.Cut(service, "/")
	value = d.options.Selector(short)
	return value, encode.AppendLabel(nil, encode.SelectorLabel, value)
}

// upsert applies the upserts: entries before instances, so their order in the
// message does not matter.
func (b *batch) upsert() {
	for _, instances := range []bool{false, true} {
		for n := range b.upserts {
			u := &b.upserts[n]
			if u.IsInstance() != instances {
				continue
			}
			if u.Err == nil {
				u.Err = b.set(u)
			}
			b.r.note(u)
		}
	}
}

// kindOf returns the kind of the registry's resources with this body URL.
func (r *Registry) kindOf(t *table, url string) *kind {
	k := r.kinds[url]
	if k == nil {
		k = &kind{t, r, url}
		r.kinds[url] = k
	}
	return k
}

func (b *batch) touch(t *table, name string) {
	if current, first := t.Begin(name); first {
		b.touched = append(b.touched, touch{t, name, current})
	}
}

// claim adds a record to the claims on its name.
func (b *batch) claim(c *Record) {
	t := c.kind.collection
	b.touch(t, c.Name())
	c.Seen = b.r.listing
	old := t.claim(c.Name(), b.r)
	if old != nil {
		b.r.countClaim(old, -1)
		b.r.resume(old)
	}
	b.r.countClaim(c, 1)
	t.put(c)
	if t.name == collection.ServiceEntry {
		b.rehost(old, c)
	}
	if old == nil && (c.parts != nil || c.isService()) {
		b.r.noteService(&lostService{entry: c}, false)
	}
	if old == nil && c.isService() {
		b.r.guard.Live++
	}
}

// countClaim adds a claim to the counts of its registry, n times.
func (r *Registry) countClaim(c *Record, n int) {
	r.resources += n
	r.bytes += n * c.Size()
	if c.Collection() == collection.ServiceEntry {
		r.entries += n
	}
}

// disclaim removes a record from the claims on its name.
func (b *batch) disclaim(c *Record) {
	t := c.kind.collection
	b.touch(t, c.Name())
	b.r.resume(c)
	if c.isService() {
		b.r.guard.Live--
	}
	t.Drop(c)
	if t.name == collection.ServiceEntry {
		b.rehost(c, nil)
	}
	b.r.countClaim(c, -1)
	b.db.setServed(c, false)
	b.db.setShadowed(c, false)
}

// exceeds returns a [*message.LimitError] if the registry would exceed a limit
// by a resource of a size, in place of c, which may be nil.
func (r *Registry) exceeds(c *Record, isEntry bool, size int) error {
	o, was := &r.db.options, -1
	if c != nil {
		was = c.Size()
	}
	limits := message.Limits{Resources: o.MaxResources, Services: o.MaxServices, Bytes: o.MaxBytes}
	return limits.Check(message.Limits{Resources: r.resources, Services: r.entries, Bytes: r.bytes}, isEntry, size, was)
}

// set sets a resource, and makes it an instance of its service if it has one.
func (b *batch) set(u *message.Upsert) error {
	p := u.Part
	k := b.r.kindOf(b.db.tables[p.Collection], p.BodyURL)
	isEntry := u.Service != "" && !u.IsInstance()
	c := k.collection.claim(p.Name, b.r)
	if isEntry && !p.Composable {
		return ErrNotComposable
	}
	if u.IsInstance() && p.Collection != collection.WorkloadEntry {
		return fmt.Errorf("a %s cannot be an instance of service %s; only a WorkloadEntry can", p.Collection, u.Service)
	}
	if err := b.r.exceeds(c, p.Collection == collection.ServiceEntry, len(p.Metadata)+len(p.Spec)); err != nil {
		return err
	}
	var s *service
	switch {
	case u.IsInstance():
		var err error
		if s, err = b.serviceOf(u); err != nil {
			return err
		}
	case isEntry && c != nil && c.parts != nil:
		s = c.of
	}
	if c != nil && (c.of != s || isEntry && s == nil) { // it belonged to another service or to none
		b.removeRecord(c)
		c = nil
	}
	if c != nil && c.Sum() == p.Hash {
		c.Seen = b.r.listing
		b.r.resume(c)
		return nil
	}
	now := newRecord(k, p)
	switch now.of = s; {
	case isEntry && s == nil:
		b.r.newService(now)
	case isEntry:
		now.parts = s.own
	case s != nil:
		now.Set(record.OwnLabel, p.Label(encode.SelectorLabel) == s.selector)
	}
	b.add(now, c)
	if now.IsInstance() && c == nil {
		s.noteEndpoint(now, false)
	}
	return nil
}

// add adds a record that is new, or takes the place of one of the same kind.
func (b *batch) add(c, old *Record) {
	s := c.of
	if c.IsInstance() && old != nil {
		s.leave(old)
		b.r.instances--
	}
	b.claim(c)
	switch {
	case s == nil:
		return
	case c.IsInstance():
		if old == nil {
			s.counts.Add(&b.r.guard.Guard, 1, time.Now())
		}
		b.r.instances++
		s.added = append(s.added, c)
	default:
		s.counts.Recount(&b.r.guard.Guard)
		if host := c.addressed(); host != s.host {
			b.setHost(s, host)
		}
	}
	b.change(s)
}

// serviceOf returns the service of an instance.
func (b *batch) serviceOf(u *message.Upsert) (*service, error) {
	e := b.db.tables[collection.ServiceEntry].claim(u.Service, b.r)
	if e == nil || e.parts == nil {
		if _, refused := b.r.rejected[problems.ResourceID(collection.ServiceEntry, u.Service)]; refused {
			return nil, fmt.Errorf("its service %q is not there, as its ServiceEntry was refused", u.Service)
		}
		return nil, fmt.Errorf("its service %q is not there; its ServiceEntry has to come first, or in the same batch", u.Service)
	}
	if ns := e.Namespace(); ns != u.Part.Namespace() {
		return nil, fmt.Errorf("it is in namespace %s and its service in %s; a workloadSelector reaches its own namespace only", u.Part.Namespace(), ns)
	}
	return e.of, nil
}

// setHost sets the host of a service and updates the hosts by address.
func (b *batch) setHost(s *service, host string) {
	b.hosts = append(b.hosts, b.db.addresses.Count(s.host, -1)...)
	s.host = strings.Clone(host)
	b.hosts = append(b.hosts, b.db.addresses.Count(s.host, 1)...)
}

// setUnaddressed updates the count of services whose host has no address, as
// others have both that it hashes to.
func (b *batch) setUnaddressed(s *service, on bool) {
	if s.unaddressed == on {
		return
	}
	s.unaddressed = on
	if on {
		s.registry.unaddressed++
	} else {
		s.registry.unaddressed--
	}
	b.concern(s.registry)
}

// change schedules a service for composition.
func (b *batch) change(s *service) {
	if !s.changed {
		s.changed = true
		b.services = append(b.services, s)
		b.touch(b.db.tables[collection.ServiceEntry], s.name)
	}
}

// remove removes the registry's resource of that name, if any.
func (b *batch) remove(coll, name string) {
	b.r.forgetRejection(coll, name)
	if t := b.db.tables[coll]; t != nil {
		if c := t.claim(name, b.r); c != nil {
			b.removeRecord(c)
		}
	}
}

func (b *batch) removeRecord(c *Record) {
	s := c.of
	was := c.marked(isPaused)
	b.r.resume(c)
	var instances []*Record
	switch {
	case c.IsInstance():
		s.leave(c)
		b.change(s)
		b.r.instances--
		s.counts.Add(&b.r.guard.Guard, -1, time.Now())
		if !was {
			s.noteEndpoint(c, true)
		}
	case c.parts != nil:
		// Instances cannot be served without their entry.
		s.each(func(i *Record) {
			if !i.marked(isPaused) {
				instances = append(instances, i)
			}
			b.disclaim(i)
			b.r.instances--
		})
		instances = append(instances, s.counts.Take()...)
		delete(b.r.guard.runs, s)
		s.added, s.removed = nil, nil
		b.setHost(s, "")
		b.setUnaddressed(s, false)
		b.r.services--
		s.counts.Leave(&b.r.guard.Guard)
	}
	b.disclaim(c)
	if !was && (c.parts != nil || c.isService()) {
		b.r.noteService(&lostService{c, instances}, true)
	}
}

// relist handles services that the current listing retained as a whole and that
// are complete now: it removes their instances that the listing does not
// mention. It precedes the upserts to make room for them.
func (b *batch) relist(services []string) {
	if len(services) == 0 {
		return
	}
	for n := range b.upserts {
		u := &b.upserts[n]
		if u.IsNameless() {
			b.r.nameless = b.r.listing
		}
		b.r.retain(u.ID())
	}
	if b.r.nameless == b.r.listing {
		return
	}
	var gone losses
	for _, name := range services {
		c := b.db.tables[collection.ServiceEntry].claim(name, b.r)
		if c == nil || c.parts == nil || c.of.retained != b.r.listing {
			continue
		}
		c.of.retained = 0
		c.of.each(func(i *Record) {
			if i.Seen != b.r.listing {
				gone.add(i)
			}
		})
	}
	b.lose(&gone, true, false)
}

// sweep removes what the completed listing does not mention. An unidentified
// resource could be any of them: then everything is retained until a listing
// completes without one.
func (b *batch) sweep() {
	r := b.r
	if !r.status.Listing {
		return
	}
	if r.nameless == r.listing {
		r.log.Warn("the listing removes nothing, as the name of something in it is not known", "see", "/api/v1/registries")
		return
	}
	r.db.book.Change(func() { r.rejected.Sweep(r.listing) })
	var gone losses
	r.claims(func(_ *table, c *Record) {
		if c.Seen != r.listing && (!c.IsInstance() || c.of.retained != r.listing) {
			gone.add(c)
		}
	})
	before := r.resources
	b.lose(&gone, true, true)
	if n := before - r.resources; n > 0 {
		r.log.Info("a complete new listing removed what it did not mention", "resources", n)
	}
}

// compose composes the ServiceEntry of each changed service once.
func (b *batch) compose() {
	entries := b.db.tables[collection.ServiceEntry]
	if len(b.hosts) > 0 {
		for c := range entries.services() {
			if slices.Contains(b.hosts, c.of.host) {
				b.change(c.of)
			}
		}
	}
	for _, s := range b.services[:len(b.services):len(b.services)] {
		if s.merger != nil {
			b.changeMerger(s.merger)
		}
	}
	for _, s := range b.services {
		s.changed = false
		c := s.entry()
		if c == nil || c.of != s { // removed
			continue
		}
		if s.merger != nil {
			s.merger.Note(s.added, s.removed)
		}
		s.own = s.own.With(s.added, s.removed)
		s.added, s.removed = nil, nil
		s.own.Address = b.db.addresses.Of(s.host)
		b.setUnaddressed(s, s.host != "" && !s.own.Address.IsValid())
		e := *c
		e.place = shapes.Places{}
		e.parts = s.own
		entries.put(&e)
	}
	for _, m := range b.mergers {
		b.composeMerger(m)
	}
}

// commit decides the owners of the touched names, composes the changed services
// and writes all changes to the logs at once.
func (b *batch) commit() {
	d := b.db
	b.decide()
	b.compose()
	// Services first: whether they are served decides what their instances
	// claim.
	b.sort()
	for _, t := range b.touched[:len(b.touched):len(b.touched)] {
		if t.table.name == collection.ServiceEntry {
			b.settle(t.table, t.name)
		}
	}
	b.sort()
	for _, t := range b.touched {
		if t.table.name != collection.ServiceEntry {
			b.settle(t.table, t.name)
		}
	}
	changed := make([]shapes.Set, len(b.touched))
	var before, revision Revision
	b.written = true
	d.write(func() {
		before = d.revision
		for n := range b.touched {
			changed[n] = d.moveLocked(&b.touched[n])
		}
		for _, t := range b.touched {
			d.updateAsidesLocked(t.table, t.name)
			t.table.logs.Evict(d.options.Tombstones, func(r *Record) {
				if r.Is(record.Tombstone) {
					t.table.Drop(r)
				}
			})
		}
		if revision = d.revision; revision != before {
			if d.options.Applied != nil {
				d.options.Applied(b.r.name, uint64(revision))
			}
			d.wakeLocked()
		}
		d.book.Commit()
	})
	if revision != before {
		b.r.status.Revision = revision
		b.record(changed, revision)
	}
	b.tellShadowed()
}

// write calls f, which writes to the logs, with mu held.
func (d *DB) write(f func()) {
	if !d.writing {
		d.mu.Lock()
		defer d.mu.Unlock()
	}
	f()
}

// sort sorts the touched names.
func (b *batch) sort() {
	slices.SortFunc(b.touched, func(x, y touch) int {
		return cmp.Or(strings.Compare(x.table.name, y.table.name), strings.Compare(x.name, y.name))
	})
}

// moveLocked updates the logs to what is served under a name, and returns the
// shapes in which that is a change.
func (d *DB) moveLocked(t *touch) shapes.Set {
	old, now := t.before, t.table.Listed(t.name)
	if now.isGone() {
		now = nil
	}
	var tomb *Record // holds the place of a removed name
	changed := t.table.logs.Move(old, now, &d.revision, func() *Record {
		if tomb == nil {
			if tomb = old; !old.Is(record.Tombstone) {
				tomb = newTombstone(old.kind, t.name)
			}
		}
		return tomb
	})
	switch {
	case now != nil && old != nil && old.Is(record.Tombstone):
		t.table.Drop(old)
	case tomb != nil && tomb != old:
		t.table.put(tomb)
	}
	return changed
}

func (r *Record) isGone() bool { return r == nil || r.Is(record.Tombstone) }
