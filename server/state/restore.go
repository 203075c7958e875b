package state

import (
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/isthmus-mesh/isthmus/plugin/collection"
	"github.com/isthmus-mesh/isthmus/server/encode"
	"github.com/isthmus-mesh/isthmus/server/state/record"
	"github.com/isthmus-mesh/isthmus/server/state/saved"
)

// SavedFormat is the version of the output of [Claims.AppendSaved].
const SavedFormat = saved.Format

// item returns the record as it is saved; the number identifies its registry.
func (r *Record) item(registry int, more bool) saved.Item {
	it := saved.Item{Registry: registry, More: more, Kind: saved.Plain, URL: r.kind.url}
	r.Save(&it)
	switch {
	case r.parts != nil:
		it.Kind = saved.Entry
	case r.of != nil:
		it.Kind, it.Service = saved.Instance, r.of.name
	}
	return it
}

// Saved is a parsed run of saved items.
type Saved struct{ items []savedItem }

type savedItem struct {
	record   *Record // nil for a removal
	registry int     // number
	more     bool    // does not replace the claims of other registries
	service  string  // of an instance
	host     string  // of a service that gets its address by host

	table *table // of a removal
	name  string // of a removal
}

// ParseSaved parses and copies a run of saved items. It is safe for concurrent
// use. Bytes not in this format are an error.
func (d *DB) ParseSaved(run []byte) (Saved, error) {
	var out Saved
	kinds := make(map[string]*kind)
	err := saved.Parse(run, func(s *saved.Item) error {
		it := savedItem{registry: s.Registry, more: s.More, service: s.Service}
		if s.Kind == saved.Removal {
			if it.table, it.name = d.tables[s.Collection], s.Name; it.table == nil {
				return saved.ErrMalformed
			}
			out.items = append(out.items, it)
			return nil
		}
		k := kinds[s.URL]
		if k == nil {
			t := d.tables[collection.OfBody(s.URL)]
			if t == nil {
				return saved.ErrMalformed
			}
			k = &kind{collection: t, url: s.URL}
			kinds[s.URL] = k
		}
		if s.Kind == saved.Entry && k.collection.name != collection.ServiceEntry || s.Kind == saved.Instance && k.collection.name != collection.WorkloadEntry {
			return saved.ErrMalformed
		}
		r := &Record{Content: record.Saved(s), kind: k}
		if s.Kind == saved.Entry {
			r.parts, it.host = &composition{}, r.addressed()
		}
		it.record = r
		out.items = append(out.items, it)
		return nil
	})
	if err != nil {
		return Saved{}, err
	}
	return out, nil
}

// SavedRegistry is the registry that a number in saved items identifies.
type SavedRegistry struct {
	// Name is the registry's name. Items of registries missing from the DB are
	// left out.
	Name string
	// AsOf is the last time at which the saved items were known to be current.
	AsOf time.Time
}

// Restored summarizes the items restored for a registry.
type Restored struct {
	Registry            string
	Services, Instances int
	Published           int // resources without a service
	LeftOut             int // beyond a limit, or instances without their service
}

// ErrNotEmpty is returned when restoring into a DB that is in use.
var ErrNotEmpty = errors.New("state: what was saved has to be restored before any registry is followed")

// DefectError is a panic while a registry's items were restored, which is a
// defect of the bridge. Nothing is restored.
type DefectError struct {
	Registry string // "" if it is of none in particular
	err      error
}

// Error implements error.
func (e *DefectError) Error() string { return e.err.Error() }

// Restore serves saved items until the registries are listed. Later items
// replace earlier ones of the same name, and conflicts are decided anew. Each
// registry in registries counts as having completed its first listing; its
// first own listing removes what it does not mention. The DB must be unused.
//
// A panic is a [*DefectError], which leaves the DB unused; the items are spent.
func (d *DB) Restore(items []Saved, registries []SavedRegistry) (out []Restored, err error) {
	d.apply.Lock()
	defer d.unlock()
	for _, t := range d.tables {
		if len(t.index) > 0 {
			return nil, ErrNotEmpty
		}
	}
	for _, r := range d.registries {
		if r.listing > 0 || r.status.Synced {
			return nil, ErrNotEmpty
		}
	}
	l := loader{d: d, items: items}
	defer func() {
		if p := recover(); p != nil {
			out, err = nil, l.defect(p)
		}
	}()
	for _, s := range registries {
		r := d.Registry(s.Name)
		l.registries = append(l.registries, r)
		if r != nil {
			r.status.Restored = s.AsOf
		}
	}
	d.book.ChangeAll(func() {
		if err = l.merge(); err != nil {
			for _, t := range d.tables {
				clear(t.index)
			}
			return
		}
		l.link()
		l.compose()
		l.contest()
	})
	if err != nil {
		for _, r := range d.registries {
			r.status.Restored = time.Time{}
		}
		return nil, err
	}
	l.enter()
	l.decide()
	for n, r := range l.registries {
		if r == nil {
			continue
		}
		r.status.Services, r.status.Instances = uint64(r.services), uint64(r.instances)
		d.metrics.setSizes(r)
		d.metrics.setBytes(r)
		d.metrics.setServed(r)
		d.metrics.setRestored(r)
		d.restored.Add(1)
		out = append(out, Restored{
			Registry: r.name, Services: r.services, Instances: r.instances, Published: r.resources - r.services - r.instances, LeftOut: l.leftOut[n],
		})
	}
	d.remark()
	d.wake()
	return out, nil
}

// loader implements Restore. The caller holds apply.
type loader struct {
	d          *DB
	items      []Saved
	registries []*Registry // by number; nil if not configured
	leftOut    []int       // by number
	services   []*savedItem
	several    []savedName // of several claims, more than once possibly
	batch      *batch      // decides on what may be in conflict
	at         *savedItem  // the item in hand, nil for none or for several
	whole      bool        // everything is within the limits
}

type savedName struct {
	table *table
	name  string
}

// merge keeps the last claims of each name and drops the others.
func (l *loader) merge() error {
	count := make(map[*table]int)
	for _, s := range l.items {
		for i := range s.items {
			if r := s.items[i].record; r != nil {
				count[r.kind.collection]++
			}
		}
	}
	for t, n := range count {
		t.index = make(map[string]*Record, n)
	}
	l.leftOut = make([]int, len(l.registries))
	seen := make(map[*Registry]bool)
	for _, r := range l.registries {
		if r != nil && seen[r] {
			return fmt.Errorf("registry %q is there twice", r.name)
		}
		seen[r] = true
	}
	for _, s := range l.items {
		for i := range s.items {
			it := &s.items[i]
			t, name := it.table, it.name
			if it.record != nil {
				t, name = it.record.kind.collection, it.record.Name()
			}
			if it.registry >= len(l.registries) && it.record != nil {
				return fmt.Errorf("there is no registry number %d", it.registry)
			}
			if !it.more {
				l.dropClaims(t, name)
			}
			if it.record == nil || l.registries[it.registry] == nil {
				it.record = nil
				continue
			}
			it.record.kind = l.registries[it.registry].kindOf(t, it.record.kind.url)
			if it.more {
				l.addClaim(it.record)
				continue
			}
			t.index[name] = it.record
		}
	}
	return nil
}

// dropClaims drops the claims on a name. Its key in the index, which retains
// a buffer, goes with them.
func (l *loader) dropClaims(t *table, name string) {
	old := t.index[name]
	if old == nil {
		return
	}
	for ; old != nil; old = old.next {
		old.kind = nil // dropped
	}
	delete(t.index, name)
}

// addClaim adds a claim to those of other registries on its name.
func (l *loader) addClaim(c *Record) {
	t, name := c.kind.collection, c.Name()
	claims := claimsOn(t.index[name])
	claims = slices.DeleteFunc(claims, func(old *Record) bool {
		same := old.kind.registry == c.kind.registry
		if same {
			old.kind = nil
		}
		return same
	})
	claims = append(claims, c)
	slices.SortFunc(claims, precedence)
	delete(t.index, name)
	t.relink(name, claims)
	if len(claims) > 1 {
		l.several = append(l.several, savedName{t, name})
	}
}

// each calls f with each item that was not dropped.
func (l *loader) each(f func(*savedItem)) {
	for _, s := range l.items {
		for i := range s.items {
			if it := &s.items[i]; it.record != nil && it.record.kind != nil {
				l.at = it
				f(it)
			}
		}
	}
	l.at = nil
}

// defect empties the DB after a panic.
func (l *loader) defect(p any) error {
	of := &DefectError{}
	if l.at != nil && l.registries[l.at.registry] != nil {
		of.Registry = l.registries[l.at.registry].name
	}
	of.err = l.d.defect(p, aRestore, of.Registry)
	l.d.rebuild(nil, nothing)
	for _, r := range l.d.registries {
		r.status.Restored = time.Time{}
	}
	return of
}

// link applies the limits of the registries and builds their services.
func (l *loader) link() {
	d := l.d
	take := func(it *savedItem, fits bool) bool {
		r, c := l.registries[it.registry], it.record
		isEntry := c.Collection() == collection.ServiceEntry
		if !fits || !l.whole && (isEntry && r.entries >= d.options.MaxServices || r.resources >= d.options.MaxResources || r.bytes+c.Size() > d.options.MaxBytes) {
			l.leftOut[it.registry]++
			c.kind.collection.drop(c)
			it.record = nil
			return false
		}
		r.resources++
		if isEntry {
			r.entries++
		}
		r.bytes += c.Size()
		return true
	}
	l.each(func(it *savedItem) {
		c := it.record
		if c.parts == nil || !take(it, true) {
			return
		}
		l.registries[it.registry].newService(c)
		d.hosts.Add(c.id(), encode.Hosts(c.Spec()))
		c.of.host = strings.Clone(it.host)
		d.addresses.Count(c.of.host, 1)
		l.services = append(l.services, it)
	})
	entries := d.tables[collection.ServiceEntry]
	var last *Record // the entry of the previous instance
	l.each(func(it *savedItem) {
		c := it.record
		if c.parts != nil {
			return
		}
		if it.service == "" {
			if take(it, true) && c.Collection() == collection.ServiceEntry {
				d.hosts.Add(c.id(), encode.Hosts(c.Spec()))
			}
			return
		}
		if last == nil || last.Name() != it.service || last.kind.registry != c.kind.registry {
			last = entries.claim(it.service, c.kind.registry)
		}
		e := last
		if !take(it, e != nil && e.parts != nil) {
			return
		}
		c.of = e.of
		c.of.registry.instances++
		c.of.added = append(c.of.added, c)
	})
}

// compose adds the instances to their services.
func (l *loader) compose() {
	var group sync.WaitGroup
	var once sync.Once
	var failed any // a panic
	for part := range slices.Chunk(l.services, max(1, len(l.services)/runtime.GOMAXPROCS(0)+1)) {
		group.Go(func() {
			at := part[0]
			defer func() {
				if p := recover(); p != nil {
					once.Do(func() { failed, l.at = p, at })
				}
			}()
			for _, it := range part {
				at = it
				s := it.record.of
				s.own = s.own.With(s.added, nil)
				s.own.Address = l.d.addresses.Of(s.host)
				it.record.parts, s.added = s.own, nil
			}
		})
	}
	group.Wait()
	if failed != nil {
		panic(failed)
	}
	for _, it := range l.services {
		if s := it.record.of; s.host != "" && !it.record.parts.Address.IsValid() {
			s.unaddressed = true
			s.registry.unaddressed++
		}
	}
}

// contest marks what may be in conflict: names of several claims, and hosts of
// several registries with the instances of their services.
func (l *loader) contest() {
	d := l.d
	if len(d.registries) == 0 {
		return
	}
	b := &batch{r: d.registries[0], db: d}
	l.batch = b
	entries := d.tables[collection.ServiceEntry]
	undecided := func(c *Record) {
		c.mark(isUndecided, true)
		b.touch(c.kind.collection, c.Name())
	}
	entry := func(c *Record) {
		if c == nil || c.marked(isUndecided) {
			return
		}
		undecided(c)
		if c.parts != nil {
			c.of.each(undecided)
		}
	}
	d.hosts.MarkAll()
	for id := range d.hosts.Marked() {
		entry(id.record())
	}
	for _, s := range l.several {
		if s.table == entries {
			d.hosts.MarkName(s.name)
		}
		for c := s.table.index[s.name]; c != nil; c = c.next {
			if s.table == entries {
				entry(c)
			} else {
				undecided(c)
			}
		}
	}
}

// decide serves what may be in conflict as the rules have it. Nothing of it is
// in a log before, so that none of it is seen to be removed.
func (l *loader) decide() {
	l.d.book.ChangeAll(func() { l.each(func(it *savedItem) { it.record.mark(isUndecided, false) }) })
	if l.batch != nil {
		l.d.commit(l.batch)
	}
	for _, r := range l.registries {
		if r != nil {
			r.status.Revision = l.d.revision
		}
	}
}

// enter appends the records that are not in conflict to the logs, in the order
// of the items.
func (l *loader) enter() {
	l.d.write(func() { l.d.book.ChangeAll(l.enterLocked) })
}

func (l *loader) enterLocked() {
	d := l.d
	for _, t := range d.tables {
		for _, s := range shapesOf(t) {
			t.logs[s].Grow(len(t.index))
		}
	}
	l.each(func(it *savedItem) {
		c := it.record
		if c.marked(isUndecided) {
			return
		}
		d.setServed(c, true)
		t := c.kind.collection
		for _, s := range shapesOf(t) {
			if log := t.logs[s]; c.visible(log.shape) {
				d.revision++
				log.enter(c, d.revision)
			}
		}
	})
}
