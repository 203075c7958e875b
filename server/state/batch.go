package state

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/isthmus-mesh/isthmus/plugin/collection"
	pluginv1 "github.com/isthmus-mesh/isthmus/plugin/proto/isthmus/plugin/v1"
	"github.com/isthmus-mesh/isthmus/server/encode"
	"github.com/isthmus-mesh/isthmus/server/state/history"
	"github.com/isthmus-mesh/isthmus/server/state/problems"
	"github.com/isthmus-mesh/isthmus/server/state/record"
)

// ErrNotComposable is the refusal of a ServiceEntry that is composed of
// separate instances but has endpoints or a workloadSelector.
var ErrNotComposable = errors.New("a ServiceEntry whose instances are resources of their own must have neither endpoints nor workloadSelector")

// batch applies one message of a plugin to the state. The caller holds DB.apply
// for all methods except parse.
type batch struct {
	r  *Registry
	db *DB

	upserts  []upsert
	idle     map[string]history.Idle // by names of removals that say why
	touched  []touch
	services []*service  // changed
	hosts    []string    // their addresses may have changed
	others   []*Registry // whose counts have changed
	fresh    []lineOfShadow

	// Conflicts of hosts between registries.

	marked      map[string]bool // hosts to decide on
	markedNames map[string]bool // ServiceEntries to decide on, by name
	decided     map[string]bool // hosts decided on
	loose       []*merger       // lost their lead or a member
	mergers     []*merger       // to compose
	news        []entryID       // have a new verdict to log

	written bool // the claims are complete, and the logs are being written
}

type upsert struct {
	service string
	part    *encode.Part
	err     error
}

// touch is a name whose claims or content the batch changed.
type touch struct {
	table  *table
	name   string
	before *Record // what was in the logs before the batch
}

// parse decodes and hashes the resources, which is the expensive part. The hash
// of an instance includes the selector label that is added if it is missing.
func (b *batch) parse(upserts []*pluginv1.Upsert) {
	b.upserts = make([]upsert, len(upserts))
	var service, selector string // of the previous upsert: instances of a service are adjacent
	var label []byte
	owner := *b.r.owns.Load()
	checks := []encode.Check{b.db.valid}
	if owner != nil {
		checks = append(checks, func(p *encode.Part, body proto.Message) error { return foreign(owner.Check(p, body)) })
	}
	for n, u := range upserts {
		b.upserts[n].service = u.GetService()
		b.upserts[n].part, b.upserts[n].err = encode.Parse(u.GetResource(), func(p *encode.Part) []byte {
			if u.GetService() == "" || p.Collection != collection.WorkloadEntry {
				return nil
			}
			if u.GetService() != service {
				service = u.GetService()
				selector, label = b.db.selector(service)
			}
			if p.Label(encode.SelectorLabel) == selector {
				return nil
			}
			return label
		}, checks...)
	}
}

// foreignError is the refusal of something that is not the registry's.
type foreignError struct{ error }

// Unwrap returns the reason.
func (e *foreignError) Unwrap() error { return e.error }

func foreign(err error) error {
	if err == nil {
		return nil
	}
	return &foreignError{err}
}

// selector returns the value of the selector label for the instances of a
// service, and the label encoded as a field of a WorkloadEntry.
func (d *DB) selector(service string) (value string, label []byte) {
	_, short, _ := strings.Cut(service, "/")
	value = d.options.Selector(short)
	return value, encode.AppendLabel(nil, encode.SelectorLabel, value)
}

// isInstance reports whether the resource is to be one of a service's
// instances.
func (u *upsert) isInstance() bool {
	return u.err == nil && u.service != "" && (u.part.Collection != collection.ServiceEntry || u.service != u.part.Name)
}

// upsert applies the upserts: entries before instances, so their order in the
// message does not matter.
func (b *batch) upsert() {
	for n := range b.upserts {
		u := &b.upserts[n]
		switch {
		case u.err != nil:
		case u.isInstance():
			continue
		case u.service == "":
			u.err = b.set(u.part)
		default:
			u.err = b.setEntry(u.part)
		}
		b.r.note(u)
	}
	for n := range b.upserts {
		if u := &b.upserts[n]; u.isInstance() {
			u.err = b.setInstance(u.part, u.service)
			b.r.note(u)
		}
	}
}

// id returns the collection and name of the resource, as far as they are
// legible.
func (u *upsert) id() (coll, name string) {
	if invalid, ok := errors.AsType[*encode.Invalid](u.err); ok {
		return invalid.Collection, invalid.Name
	}
	return u.part.Collection, u.part.Name
}

// isNameless reports whether the resource cannot be identified.
func (u *upsert) isNameless() bool {
	invalid, ok := errors.AsType[*encode.Invalid](u.err)
	return ok && invalid.Nameless()
}

func (b *batch) kind(p *encode.Part) *kind {
	return b.r.kindOf(b.db.tables[p.Collection], p.BodyURL)
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
	if current, first := t.begin(name); first {
		b.touched = append(b.touched, touch{t, name, current})
	}
}

// claim adds a record to the claims on its name.
func (b *batch) claim(c *Record, isNew bool) {
	t := c.kind.collection
	b.touch(t, c.Name())
	c.Seen = b.r.listing
	old := t.claim(c.Name(), b.r)
	if old != nil {
		b.r.bytes -= old.Size()
		b.r.resume(old)
	}
	b.r.bytes += c.Size()
	t.put(c)
	if t.name == collection.ServiceEntry {
		b.rehost(old, c)
	}
	if isNew {
		b.r.resources++
		if t.name == collection.ServiceEntry {
			b.r.entries++
		}
		if c.isService() {
			b.r.guard.Live++
		}
		if c.parts != nil || c.isService() {
			b.r.noteService(&lostService{entry: c}, false)
		}
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
	t.drop(c)
	if t.name == collection.ServiceEntry {
		b.r.entries--
		b.rehost(c, nil)
	}
	b.r.resources--
	b.r.bytes -= c.Size()
	b.db.setServed(c, false)
	b.db.setShadowed(c, false)
}

// limitError is the refusal of a resource that would exceed a limit.
type limitError struct {
	field string // of the configuration
	value int
}

// Error implements error.
func (e *limitError) Error() string {
	return fmt.Sprintf("with it the registry would exceed %s (%d); raise that, or select less in the registry's config", e.field, e.value)
}

// limit returns a *limitError if p would exceed a limit of the registry. c is
// the record that p replaces, nil for none; a replacement that is no larger is
// always allowed.
func (b *batch) limit(c *Record, p *encode.Part) error {
	o := &b.db.options
	size, was := len(p.Metadata)+len(p.Spec), 0
	if c != nil {
		was = c.Size()
	}
	switch {
	case c == nil && b.r.resources >= o.MaxResources:
		return &limitError{"limits.resources_per_registry", o.MaxResources}
	case c == nil && p.Collection == collection.ServiceEntry && b.r.entries >= o.MaxServices:
		return &limitError{"limits.services_per_registry", o.MaxServices}
	case size > was && b.r.bytes+size-was > o.MaxBytes:
		return &limitError{"limits.bytes_per_registry", o.MaxBytes}
	}
	return nil
}

// set sets a resource that belongs to no service.
func (b *batch) set(p *encode.Part) error {
	k := b.kind(p)
	c := k.collection.claim(p.Name, b.r)
	if err := b.limit(c, p); err != nil {
		return err
	}
	switch {
	case c == nil:
	case c.of == nil:
		if c.Seen = b.r.listing; c.Sum() == p.Hash {
			b.r.resume(c)
			return nil
		}
	default: // it belonged to a service
		b.removeRecord(c)
		c = nil
	}
	b.claim(newRecord(k, p), c == nil)
	return nil
}

func (b *batch) setEntry(p *encode.Part) error {
	k := b.kind(p)
	if !p.Composable {
		return ErrNotComposable
	}
	c := k.collection.claim(p.Name, b.r)
	if err := b.limit(c, p); err != nil {
		return err
	}
	if c != nil && c.parts == nil {
		b.removeRecord(c) // it belonged to no service
		c = nil
	}
	if c != nil {
		if c.Seen = b.r.listing; c.Sum() == p.Hash {
			b.r.resume(c)
			return nil
		}
	}
	e := newRecord(k, p)
	if c == nil {
		selector, label := b.db.selector(p.Name)
		e.of = &service{registry: b.r, name: p.Name, selector: selector, label: label}
		e.parts = &composition{Selector: selector}
		b.r.services++
	} else {
		e.of, e.parts = c.of, c.parts
	}
	b.claim(e, c == nil)
	e.of.counts.Recount(&b.r.guard.Guard)
	b.change(e.of)
	host := ""
	if !p.OwnAddress {
		host = p.Hosts[0]
	}
	b.setHost(e.of, host)
	return nil
}

// setHost sets the host of a service and updates the hosts by address.
func (b *batch) setHost(s *service, host string) {
	if host == s.host {
		return
	}
	if s.host != "" {
		b.hosts = append(b.hosts, b.db.countHost(s.host, -1)...)
	}
	if s.host = strings.Clone(host); host != "" {
		b.hosts = append(b.hosts, b.db.countHost(s.host, 1)...)
	}
}

// change schedules a service for composition.
func (b *batch) change(s *service) {
	if !s.changed {
		s.changed = true
		b.services = append(b.services, s)
		b.touch(b.db.tables[collection.ServiceEntry], s.name)
	}
}

func (s *service) entry() *Record {
	return s.registry.db.tables[collection.ServiceEntry].claim(s.name, s.registry)
}

func (b *batch) setInstance(p *encode.Part, serviceName string) error {
	if p.Collection != collection.WorkloadEntry {
		return fmt.Errorf("a %s cannot be an instance of service %s; only a WorkloadEntry can", p.Collection, serviceName)
	}
	k := b.kind(p)
	c := k.collection.claim(p.Name, b.r)
	if err := b.limit(c, p); err != nil {
		return err
	}
	e := b.db.tables[collection.ServiceEntry].claim(serviceName, b.r)
	if e == nil || e.parts == nil {
		if _, refused := b.r.rejected[problems.ResourceID(collection.ServiceEntry, serviceName)]; refused {
			return fmt.Errorf("its service %q is not there, as its ServiceEntry was refused", serviceName)
		}
		return fmt.Errorf("its service %q is not there; its ServiceEntry has to come first, or in the same batch", serviceName)
	}
	s := e.of
	if ns := e.Namespace(); ns != p.Namespace() {
		return fmt.Errorf("it is in namespace %s and its service in %s; a workloadSelector reaches its own namespace only", p.Namespace(), ns)
	}
	if c != nil && c.of == s && c.Sum() == p.Hash {
		c.Seen = b.r.listing
		b.r.resume(c)
		return nil
	}
	switch {
	case c == nil:
	case c.of == s:
		s.leave(c)
		b.r.instances--
	default: // it belonged to another service or to none
		b.removeRecord(c)
		c = nil
	}
	i := newRecord(k, p)
	i.of = s
	i.Set(record.OwnLabel, p.Label(encode.SelectorLabel) == s.selector)
	b.claim(i, c == nil)
	if c == nil {
		s.counts.Add(&b.r.guard.Guard, 1, time.Now())
		s.noteEndpoint(i, false)
	}
	b.r.instances++
	s.added = append(s.added, i)
	b.change(s)
	return nil
}

// leave removes an instance from the service.
func (s *service) leave(i *Record) {
	if n := slices.Index(s.added, i); n >= 0 { // added by this batch
		s.added = slices.Delete(s.added, n, n+1)
		return
	}
	s.removed = append(s.removed, i)
}

// each calls f with each instance of the service, with the changes of the
// current batch.
func (s *service) each(f func(*Record)) {
	removed := make(map[*Record]bool, len(s.removed))
	for _, i := range s.removed {
		removed[i] = true
	}
	for i := range s.instances().All() {
		if !removed[i] {
			f(i)
		}
	}
	for _, i := range slices.Clone(s.added) {
		f(i)
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
		if u.isNameless() {
			b.r.nameless = b.r.listing
		}
		b.r.retain(u.id())
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
	r.db.book.change(func() { r.rejected.Sweep(r.listing) })
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
	if len(b.hosts) > 0 {
		for _, head := range b.db.tables[collection.ServiceEntry].index {
			for c := head; c != nil; c = c.next {
				if c.parts != nil && slices.Contains(b.hosts, c.of.host) {
					b.change(c.of)
				}
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
		own := s.instances().With(s.added, s.removed)
		if m := s.merger; m != nil {
			m.note(s.added, s.removed)
			if m.lead == s {
				m.own = own
			}
		}
		s.added, s.removed = nil, nil
		e := *c
		e.place = [shapes]Revision{}
		e.parts = own
		e.parts.Address = b.db.addressOf(s.host)
		b.setUnaddressed(s, s.host != "" && !e.parts.Address.IsValid())
		e.kind.collection.put(&e)
	}
	for _, m := range b.mergers {
		if m.changed = false; m.lead.merger == m { // not dissolved
			e := m.lead.entry() // put above, and in no log yet
			parts := *m.compose(b)
			parts.Address = e.parts.Address
			e.parts = &parts
		}
	}
}

// commit decides the owners of the touched names, composes the changed services
// and writes all changes to the logs at once.
func (b *batch) commit() {
	d := b.db
	b.settleHosts()
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
	changed := make([]shapeSet, len(b.touched))
	var before, revision Revision
	b.written = true
	d.write(func() {
		before = d.revision
		for n := range b.touched {
			changed[n] = d.moveLocked(&b.touched[n])
		}
		for _, t := range b.touched {
			d.updateAsidesLocked(t.table, t.name)
			d.boundLocked(t.table)
		}
		if revision = d.revision; revision != before {
			if d.options.Applied != nil {
				d.options.Applied(b.r.name, uint64(revision))
			}
			d.wakeLocked()
		}
		d.book.commit(func() { d.committedRules = d.rules })
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

// shapeSet is a set of shapes, as bits.
type shapeSet uint8

// moveLocked updates the logs to what is served under a name, and returns the
// shapes in which that is a change.
func (d *DB) moveLocked(t *touch) (changed shapeSet) {
	old := t.before
	now := t.table.current(t.name)
	if now.isGone() {
		now = nil
	}
	var tomb *Record // holds the place of a removed name
	holder := func() *Record {
		if now != nil {
			return now
		}
		if tomb == nil {
			if tomb = old; !old.Is(record.Tombstone) {
				tomb = newTombstone(old.kind, t.name)
			}
		}
		return tomb
	}
	for _, s := range shapesOf(t.table) {
		l := t.table.logs[s]
		was, is := old.visible(l.shape), now.visible(l.shape)
		switch {
		case !is && (old == nil || old.place[l.shape] == 0):
		case was && is && old.Hash(s) == now.Hash(s) && old.kind.registry != now.kind.registry:
			d.revision++
			l.hand(old, now, d.revision)
			changed |= 1 << s
		case !was && !is, was && is && old.Hash(s) == now.Hash(s):
			l.swap(old, holder())
		default:
			l.leave(old)
			d.revision++
			l.enter(holder(), d.revision)
			changed |= 1 << s
		}
	}
	switch {
	case now != nil && old != nil && old.Is(record.Tombstone):
		t.table.drop(old)
	case tomb != nil && tomb != old:
		t.table.bury(tomb)
	}
	return changed
}

func (r *Record) isGone() bool { return r == nil || r.Is(record.Tombstone) }

// boundLocked evicts the oldest removals beyond the bound.
func (d *DB) boundLocked(t *table) {
	for _, s := range shapesOf(t) {
		t.logs[s].forget(d.options.Tombstones, func(r *Record) {
			if r.Is(record.Tombstone) && r.place == ([shapes]Revision{}) {
				t.drop(r)
			}
		})
	}
}

// shapesOf returns the shapes in which a collection has separate logs.
func shapesOf(t *table) []encode.Shape {
	if t.logs[encode.Inline] == t.logs[encode.Workload] {
		return bothShapes[:1]
	}
	return bothShapes
}

var bothShapes = []encode.Shape{encode.Inline, encode.Workload}
