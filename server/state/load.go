package state

import (
	"fmt"
	"runtime"
	"slices"
	"strings"
	"sync"

	"github.com/isthmus-mesh/isthmus/plugin/collection"
	"github.com/isthmus-mesh/isthmus/server/encode"
	"github.com/isthmus-mesh/isthmus/server/state/address"
	"github.com/isthmus-mesh/isthmus/server/state/record"
)

// item is a claim to load, or, with a tombstone, the removal of the claims
// before on its name.
type item struct {
	record   *Record // its kind is nil once it is dropped
	registry int     // number
	more     bool    // does not replace the claims of other registries
	service  string  // of an instance
}

// loader makes the state from the claims of registries: from those on disk when
// the bridge starts, and from those in the logs after a defect.
type loader struct {
	d          *DB
	items      []Saved
	registries []*Registry // by number; nil if not configured
	whole      bool        // everything is within the limits
	leftOut    []int       // by number

	at       *item // the item in hand, nil for none or for several
	services []*item
	several  []*Record // one of several claims on its name
	batch    batch     // decides on what may be in conflict
}

// replace calls f, which makes the state anew. Readers see its end.
func (d *DB) replace(f func()) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.writing = true
	defer func() { d.writing = false }()
	d.book.ChangeAll(f)
	d.wakeLocked()
}

// reset empties the state. Readers have to start over. The caller holds all
// locks, as for all functions below.
func (d *DB) reset() {
	d.revision++
	for _, t := range d.tables {
		t.Names = newNames(d)
		t.logs.Reset(d.revision)
		t.asides.Clear()
	}
	d.book.Reset()
	d.addresses, d.hosts, d.contested = address.In(d.addresses.Network()), newHosts(d, d.hosts.Rules), nil
	for _, r := range d.registries {
		r.counts = newCounts()
	}
}

// load makes the claims of an empty state, and serves them.
func (l *loader) load() error {
	if err := l.merge(); err != nil {
		return err
	}
	l.link()
	l.compose()
	l.contest()
	l.enter()
	l.each(func(it *item) { it.record.mark(isUndecided, false) })
	if l.batch.r != nil {
		// Nothing of it is in a log before, so that none is seen to be removed.
		l.d.commit(&l.batch)
	}
	return nil
}

// each calls f with each item that was not dropped.
func (l *loader) each(f func(*item)) {
	for _, s := range l.items {
		for i := range s.items {
			if it := &s.items[i]; it.record.kind != nil {
				l.at = it
				f(it)
			}
		}
	}
	l.at = nil
}

// merge keeps the last claims on each name and drops the others.
func (l *loader) merge() error {
	for n, r := range l.registries {
		if r != nil && slices.Contains(l.registries[:n], r) {
			return fmt.Errorf("registry %q is there twice", r.name)
		}
	}
	count := make(map[*table]int)
	l.each(func(it *item) { count[it.record.kind.collection]++ })
	for t, n := range count {
		t.Grow(n)
	}
	l.leftOut = make([]int, len(l.registries))
	var err error
	l.each(func(it *item) {
		c := it.record
		t, name := c.kind.collection, c.Name()
		if !it.more {
			t.Clear(name, func(old *Record) { old.kind = nil })
		}
		switch {
		case c.Is(record.Tombstone):
			c.kind = nil
			return
		case it.registry >= len(l.registries):
			err = fmt.Errorf("there is no registry number %d", it.registry)
			return
		case l.registries[it.registry] == nil:
			c.kind = nil
			return
		}
		r := l.registries[it.registry]
		c.kind = r.kindOf(t, c.kind.url)
		if old := t.Put(c); old != nil {
			old.kind = nil
		}
		if it.more {
			l.several = append(l.several, c)
		}
	})
	return err
}

// link applies the limits of the registries and builds their services.
func (l *loader) link() {
	d := l.d
	entries := d.tables[collection.ServiceEntry]
	take := func(it *item, fits bool) bool {
		r, c := l.registries[it.registry], it.record
		if !fits || !l.whole && r.exceeds(nil, c.kind.collection == entries, c.Size()) != nil {
			l.leftOut[it.registry]++
			c.kind.collection.Drop(c)
			c.kind = nil
			return false
		}
		r.countClaim(c, 1)
		return true
	}
	l.each(func(it *item) {
		c := it.record
		if c.parts == nil || !take(it, true) {
			return
		}
		c.kind.registry.newService(c)
		d.hosts.Add(c.id(), encode.Hosts(c.Spec()))
		c.of.host = strings.Clone(c.addressed())
		d.addresses.Count(c.of.host, 1)
		l.services = append(l.services, it)
	})
	var last *Record // the entry of the previous instance
	l.each(func(it *item) {
		c := it.record
		switch {
		case c.parts != nil:
			return
		case it.service == "":
			if take(it, true) && c.kind.collection == entries {
				d.hosts.Add(c.id(), encode.Hosts(c.Spec()))
			}
			return
		case last == nil || last.Name() != it.service || last.kind.registry != c.kind.registry:
			last = entries.claim(it.service, c.kind.registry)
		}
		if take(it, last != nil && last.parts != nil) {
			c.of = last.of
			c.of.registry.instances++
			c.of.added = append(c.of.added, c)
		}
	})
}

// compose adds the instances to their services, on all processors.
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
			for _, at = range part {
				s := at.record.of
				s.own = s.own.With(s.added, nil)
				s.own.Address = l.d.addresses.Of(s.host)
				at.record.parts, s.added = s.own, nil
			}
		})
	}
	group.Wait()
	if failed != nil {
		panic(failed)
	}
	for _, it := range l.services {
		s := it.record.of
		l.batch.setUnaddressed(s, s.host != "" && !it.record.parts.Address.IsValid())
	}
}

// contest marks what may be in conflict: names of several claims, and hosts of
// several registries with the instances of their services.
func (l *loader) contest() {
	d, b := l.d, &l.batch
	if len(d.registries) == 0 {
		return
	}
	b.r, b.db = d.registries[0], d
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
		if s.kind == nil {
			continue
		}
		isEntry := s.kind.collection == entries
		if isEntry {
			d.hosts.MarkName(s.Name())
		}
		for c := s.kind.collection.Head(s.Name()); c != nil; c = c.next {
			if isEntry {
				entry(c)
			} else {
				undecided(c)
			}
		}
	}
}

// enter appends the records that are not in conflict to the logs, in the order
// of the items.
func (l *loader) enter() {
	d := l.d
	for _, t := range d.tables {
		t.logs.Grow(t.Len())
	}
	l.each(func(it *item) {
		c := it.record
		if c.marked(isUndecided) {
			return
		}
		d.setServed(c, true)
		c.kind.collection.logs.Enter(c, &d.revision)
	})
}
