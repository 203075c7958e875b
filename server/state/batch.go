package state

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/isthmus-mesh/isthmus/plugin/collection"
	pluginv1 "github.com/isthmus-mesh/isthmus/plugin/proto/isthmus/plugin/v1"
	"github.com/isthmus-mesh/isthmus/server/encode"
)

// ErrNotComposable is the reason for refusing a ServiceEntry that says that its
// instances are resources of their own and has endpoints or a workloadSelector
// all the same.
var ErrNotComposable = errors.New("a ServiceEntry whose instances are resources of their own must have neither endpoints nor workloadSelector")

// batch is one message of a plugin on its way into the state. The caller holds
// DB.apply for all but parse.
type batch struct {
	r  *Registry
	db *DB

	upserts  []upsert
	touched  []touch
	services []*service // that changed
	hosts    []string   // whose address may have changed
	others   []*Registry
	fresh    []lineOfShadow
}

// upsert is one resource of a message.
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

// parse takes the resources apart, which is the expensive part.
func (b *batch) parse(upserts []*pluginv1.Upsert) {
	b.upserts = make([]upsert, len(upserts))
	for n, u := range upserts {
		b.upserts[n].service = u.GetService()
		b.upserts[n].part, b.upserts[n].err = encode.Parse(u.GetResource(), b.db.options.Validate)
	}
}

// isInstance reports whether the resource is one of a service's instances, or
// would be.
func (u *upsert) isInstance() bool {
	return u.err == nil && u.service != "" && (u.part.Collection != collection.ServiceEntry || u.service != u.part.Name)
}

// upsert carries out the upserts. Entries go before instances, so that they may
// come in any order.
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

// id returns what the resource is called, as far as that can be read.
func (u *upsert) id() (coll, name string) {
	if invalid, ok := errors.AsType[*encode.Invalid](u.err); ok {
		return invalid.Collection, invalid.Name
	}
	return u.part.Collection, u.part.Name
}

// isNameless reports whether nothing tells which resource it is.
func (u *upsert) isNameless() bool {
	invalid, ok := errors.AsType[*encode.Invalid](u.err)
	return ok && invalid.Nameless()
}

func (b *batch) kind(p *encode.Part) *kind {
	k := b.db.kinds[p.BodyURL]
	if k == nil {
		k = &kind{b.db.tables[p.Collection], p.BodyURL}
		b.db.kinds[p.BodyURL] = k
	}
	return k
}

func (b *batch) touch(t *table, name string) {
	b.touched = append(b.touched, touch{t, name, t.current(name)})
}

// claim enters a record.
func (b *batch) claim(c *Record, isNew bool) {
	t := c.kind.collection
	b.touch(t, c.Name())
	c.seen = b.r.listing
	if old := t.claim(c.Name(), b.r.order); old != nil {
		b.r.bytes -= old.size()
	}
	b.r.bytes += c.size()
	t.put(c)
	if isNew {
		b.r.resources++
	}
}

// disclaim takes a record out.
func (b *batch) disclaim(c *Record) {
	t := c.kind.collection
	b.touch(t, c.Name())
	t.drop(c)
	b.r.resources--
	b.r.bytes -= c.size()
	b.db.setServed(c, false)
	b.db.setShadowed(c, false)
}

// limitError is why a resource is refused for which there is no room.
type limitError struct {
	field string // of the configuration
	value int
}

// Error implements error.
func (e *limitError) Error() string {
	return fmt.Sprintf("with it the registry would exceed %s (%d); raise that, or select less in the registry's config", e.field, e.value)
}

// limit returns a *limitError if there is no room for a resource in the place
// of c, which is nil for none, or not for what it has grown by.
func (b *batch) limit(c *Record, p *encode.Part) error {
	o := &b.db.options
	size, was := len(p.Metadata)+len(p.Spec), 0
	if c != nil {
		was = c.size()
	}
	switch {
	case c == nil && b.r.resources >= o.MaxResources:
		return &limitError{"limits.resources_per_registry", o.MaxResources}
	case size > was && b.r.bytes+size-was > o.MaxBytes:
		return &limitError{"limits.bytes_per_registry", o.MaxBytes}
	}
	return nil
}

// set sets a resource that is served as it is.
func (b *batch) set(p *encode.Part) error {
	k := b.kind(p)
	c := k.collection.claim(p.Name, b.r.order)
	if err := b.limit(c, p); err != nil {
		return err
	}
	switch {
	case c == nil:
	case c.of == nil:
		if c.seen = b.r.listing; c.hash == p.Hash {
			return nil
		}
	default: // of a service, to stand for itself from now on
		b.removeRecord(c)
		c = nil
	}
	b.claim(newRecord(k, p, b.r.order), c == nil)
	return nil
}

// setEntry sets the ServiceEntry of a service.
func (b *batch) setEntry(p *encode.Part) error {
	k := b.kind(p)
	if !p.Composable {
		return ErrNotComposable
	}
	c := k.collection.claim(p.Name, b.r.order)
	if err := b.limit(c, p); err != nil {
		return err
	}
	if c != nil && c.parts == nil {
		b.removeRecord(c) // the other way round
		c = nil
	}
	if c != nil {
		if c.seen = b.r.listing; c.hash == p.Hash {
			return nil
		}
	}
	e := newRecord(k, p, b.r.order)
	if c == nil {
		_, short, _ := strings.Cut(p.Name, "/")
		selector := b.db.options.Selector(short)
		e.of = &service{
			registry: b.r, name: e.Name(), selector: selector,
			label: encode.AppendLabel(nil, encode.SelectorLabel, selector),
		}
		e.parts = &composition{selector: selector}
		b.r.services++
	} else {
		e.of, e.parts = c.of, c.parts
		e.of.name = e.Name() // lest the buffer before is kept for it
	}
	b.claim(e, c == nil)
	b.change(e.of)
	host := ""
	if !p.OwnAddress {
		host = p.Hosts[0]
	}
	b.setHost(e.of, host)
	return nil
}

// setHost keeps the count of hosts by address.
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

// change notes that a service has to be composed again.
func (b *batch) change(s *service) {
	if !s.changed {
		s.changed = true
		b.services = append(b.services, s)
		b.touch(b.db.tables[collection.ServiceEntry], s.name)
	}
}

// entry returns the ServiceEntry of a service.
func (s *service) entry() *Record {
	return s.registry.db.tables[collection.ServiceEntry].claim(s.name, s.registry.order)
}

func (b *batch) setInstance(p *encode.Part, serviceName string) error {
	if p.Collection != collection.WorkloadEntry {
		return fmt.Errorf("a %s can not be an instance of service %s; only a WorkloadEntry can", p.Collection, serviceName)
	}
	k := b.kind(p)
	c := k.collection.claim(p.Name, b.r.order)
	if err := b.limit(c, p); err != nil {
		return err
	}
	e := b.db.tables[collection.ServiceEntry].claim(serviceName, b.r.order)
	if e == nil || e.parts == nil {
		if _, refused := b.r.refused[refusalID(collection.ServiceEntry, serviceName)]; refused {
			return fmt.Errorf("its service %q is not there, as its ServiceEntry was refused", serviceName)
		}
		return fmt.Errorf("its service %q is not there; its ServiceEntry has to come first, or in the same batch", serviceName)
	}
	s := e.of
	if ns := e.namespace(); ns != p.Namespace() {
		return fmt.Errorf("it is in namespace %s and its service in %s; a workloadSelector reaches its own namespace only", p.Namespace(), ns)
	}
	own := p.Label(encode.SelectorLabel) == s.selector
	hash := p.Hash
	if !own {
		hash = p.HashWith(s.label)
	}
	if c != nil && c.of == s && c.hash == hash {
		c.seen = b.r.listing
		return nil
	}
	switch {
	case c == nil:
	case c.of == s:
		s.leave(c)
		b.r.instances--
	default: // of another service, or one that stood for itself
		b.removeRecord(c)
		c = nil
	}
	i := newRecord(k, p, b.r.order)
	i.of, i.hash = s, hash
	i.set(ownLabel, own)
	b.claim(i, c == nil)
	b.r.instances++
	s.added = append(s.added, i)
	b.change(s)
	return nil
}

// leave notes that an instance is no longer one of the service.
func (s *service) leave(i *Record) {
	if n := slices.Index(s.added, i); n >= 0 { // of the same batch
		s.added = slices.Delete(s.added, n, n+1)
		return
	}
	s.removed = append(s.removed, i)
}

// each calls f with each instance of the service, those of the present batch
// included.
func (s *service) each(f func(*Record)) {
	removed := make(map[*Record]bool, len(s.removed))
	for _, i := range s.removed {
		removed[i] = true
	}
	for _, b := range s.entry().parts.blocks {
		for _, i := range b.records {
			if !removed[i] {
				f(i)
			}
		}
	}
	for _, i := range slices.Clone(s.added) {
		f(i)
	}
}

// remove removes what the registry has under a name, if anything.
func (b *batch) remove(coll, name string) {
	b.r.forgetRefusal(coll, name)
	if t := b.db.tables[coll]; t != nil {
		if c := t.claim(name, b.r.order); c != nil {
			b.removeRecord(c)
		}
	}
}

func (b *batch) removeRecord(c *Record) {
	s := c.of
	switch {
	case c.isInstance():
		s.leave(c)
		b.change(s)
		b.r.instances--
	case c.parts != nil:
		// Instances without their entry cannot be served.
		s.each(func(i *Record) {
			b.disclaim(i)
			b.r.instances--
		})
		s.added, s.removed = nil, nil
		b.setHost(s, "")
		b.r.services--
	}
	b.disclaim(c)
}

// relist removes what the present listing did not mention of services that it
// kept and that are complete now. It comes before the upserts: what goes makes
// room for them.
func (b *batch) relist(services []string) {
	if len(services) == 0 {
		return
	}
	for n := range b.upserts {
		u := &b.upserts[n]
		if u.isNameless() {
			b.r.nameless = b.r.listing
		}
		b.r.keep(u.id())
	}
	if b.r.nameless == b.r.listing {
		return
	}
	for _, name := range services {
		c := b.db.tables[collection.ServiceEntry].claim(name, b.r.order)
		if c == nil || c.parts == nil || c.of.kept != b.r.listing {
			continue
		}
		c.of.kept = 0
		var gone []*Record
		c.of.each(func(i *Record) {
			if i.seen != b.r.listing {
				gone = append(gone, i)
			}
		})
		for _, i := range gone {
			b.removeRecord(i)
		}
	}
}

// sweep removes what the listing that is complete now did not mention. What has
// no legible name may be any of these: then all of it stays, until a later
// listing is complete without such a thing.
func (b *batch) sweep() {
	r := b.r
	if !r.status.Listing {
		return
	}
	if r.nameless == r.listing {
		r.log.Warn("the listing removes nothing, as something in it cannot be named", "see", "/api/v1/registries")
		return
	}
	r.sweepRefusals()
	var gone []*Record
	r.claims(func(_ *table, c *Record) {
		if c.seen != r.listing && (!c.isInstance() || c.of.kept != r.listing) {
			gone = append(gone, c)
		}
	})
	for _, c := range gone {
		// The removal of an entry takes its instances along.
		if c.kind.collection.claim(c.Name(), r.order) == c {
			b.removeRecord(c)
		}
	}
	if len(gone) > 0 {
		r.log.Info("a complete new listing removed what it did not mention", "resources", len(gone))
	}
}

// compose makes the ServiceEntries of the services that changed, each once.
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
	for _, s := range b.services {
		s.changed = false
		c := s.entry()
		if c == nil || c.of != s { // it is gone
			continue
		}
		e := *c
		e.place = [shapes]Revision{}
		e.parts = c.parts.with(s.added, s.removed)
		e.parts.address = b.db.addressOf(s.host)
		s.added, s.removed = nil, nil
		e.kind.collection.put(&e)
	}
}

// commit settles who owns the names that were touched, composes what changed
// and enters everything into the logs as one.
func (b *batch) commit() {
	d := b.db
	b.compose()
	// Services first: what becomes of them decides what their instances claim.
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
	changed := make([]bool, len(b.touched))
	d.mu.Lock()
	before := d.revision
	for n := range b.touched {
		changed[n] = d.moveLocked(&b.touched[n])
	}
	for _, t := range b.touched {
		d.boundLocked(t.table)
	}
	revision := d.revision
	if revision != before {
		d.wakeLocked()
	}
	d.mu.Unlock()
	if revision != before {
		b.r.status.Revision = revision
		for n := range b.touched {
			if changed[n] {
				d.record(&b.touched[n], b.r, revision)
			}
		}
	}
	b.tellShadowed()
}

// sort orders the names that were touched, each once.
func (b *batch) sort() {
	slices.SortStableFunc(b.touched, func(x, y touch) int {
		return cmp.Or(strings.Compare(x.table.name, y.table.name), strings.Compare(x.name, y.name))
	})
	b.touched = slices.CompactFunc(b.touched, func(x, y touch) bool { return x.table == y.table && x.name == y.name })
}

// moveLocked brings the logs up to what is served under a name, and reports
// whether that is a change.
func (d *DB) moveLocked(t *touch) (changed bool) {
	old := t.before
	now := t.table.current(t.name)
	if now.isGone() {
		now = nil
	}
	var tomb *Record // the place of a name that is gone
	holder := func() *Record {
		if now != nil {
			return now
		}
		if tomb == nil {
			if tomb = old; !old.is(isTombstone) {
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
		case !was && !is, was && is && old.Hash(s) == now.Hash(s):
			l.swap(old, holder())
		default:
			l.leave(old)
			d.revision++
			l.enter(holder(), d.revision)
			changed = true
		}
	}
	switch {
	case now != nil && old != nil && old.is(isTombstone):
		t.table.drop(old)
	case tomb != nil && tomb != old:
		t.table.bury(tomb)
	}
	if head, there := t.table.index[t.name]; there && head == nil {
		delete(t.table.index, t.name)
	}
	return changed
}

func (r *Record) isGone() bool { return r == nil || r.is(isTombstone) }

// boundLocked forgets the oldest removals beyond the bound.
func (d *DB) boundLocked(t *table) {
	for _, s := range shapesOf(t) {
		t.logs[s].forget(d.options.Tombstones, func(r *Record) {
			if r.is(isTombstone) && r.place == ([shapes]Revision{}) {
				t.drop(r)
				if t.index[r.Name()] == nil {
					delete(t.index, r.Name())
				}
			}
		})
	}
}

// shapesOf returns the shapes in which a collection differs.
func shapesOf(t *table) []encode.Shape {
	if t.logs[encode.Inline] == t.logs[encode.Workload] {
		return bothShapes[:1]
	}
	return bothShapes
}

var bothShapes = []encode.Shape{encode.Inline, encode.Workload}
