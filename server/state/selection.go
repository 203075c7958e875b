package state

import (
	"context"
	"iter"
	"path"
	"slices"
	"strings"
	"sync"

	"github.com/isthmus-mesh/isthmus/plugin/collection"
	"github.com/isthmus-mesh/isthmus/plugin/shard"
	"github.com/isthmus-mesh/isthmus/server/encode"
)

// Filter selects a part of the state. Fields that are empty select everything.
type Filter struct {
	// Registries are names of registries. A host that is merged from several
	// belongs to the first of them.
	Registries []string
	// Namespaces are those of the resources.
	Namespaces []string
	// Hosts are patterns as of [path.Match]. A resource that has hosts
	// (ServiceEntry, VirtualService, DestinationRule) is selected if one of
	// them fits, an instance with its ServiceEntry, and any other not.
	Hosts []string
	// Collections are collections as in package collection.
	Collections []string
	// Shards are selected by the first host of a resource, or by the resource's
	// name "namespace/name" if it has none. An instance is selected with its
	// ServiceEntry.
	Shards shard.Set
}

// selects reports whether a record that is not an instance is selected.
func (f *Filter) selects(r *Record) bool {
	if len(f.Collections) > 0 && !slices.Contains(f.Collections, r.Collection()) {
		return false
	}
	return f.selectsService(r)
}

// selectsService is selects without regard to the collection.
func (f *Filter) selectsService(r *Record) bool {
	if len(f.Registries) > 0 && !slices.Contains(f.Registries, *r.kind.registry.shown.Load()) ||
		len(f.Namespaces) > 0 && !slices.Contains(f.Namespaces, r.namespace()) {
		return false
	}
	if len(f.Hosts) == 0 && f.Shards.All() {
		return true
	}
	hosts := r.allHosts()
	if len(f.Hosts) > 0 && !slices.ContainsFunc(hosts, f.fits) {
		return false
	}
	if len(hosts) == 0 {
		return f.Shards.Has(r.Name())
	}
	return f.Shards.Has(hosts[0])
}

// fits reports whether a pattern fits a host.
func (f *Filter) fits(host string) bool {
	host = strings.ToLower(host)
	return slices.ContainsFunc(f.Hosts, func(pattern string) bool {
		ok, _ := path.Match(strings.ToLower(pattern), host) // validated
		return ok
	})
}

// allHosts returns the hosts of a resource of a kind that has any. They are
// field 1 of each of these kinds.
func (r *Record) allHosts() []string {
	switch r.Collection() {
	case collection.ServiceEntry, collection.DestinationRule, "networking.istio.io/VirtualService":
		return encode.Hosts(r.spec())
	}
	return nil
}

// Selection is the part of a [DB] that filters select, with logs and revisions
// of its own: its readers are not woken by changes of the rest, and do not read
// them. Each change of the state is examined once for all readers of the
// selection. Its methods are safe for concurrent use, and mean what those of DB
// mean.
//
// A selected name costs some 150 bytes.
type Selection struct {
	db      *DB
	filters []Filter

	mu       sync.Mutex
	logs     map[Kind]*selected // followed kinds
	revision Revision
	changed  chan struct{}   // closed and replaced to wake readers
	opened   map[string]bool // collections that readers asked about: whether they were open
}

// Select returns the part of the state that all filters select. It follows the
// state while [Selection.Run] runs, and whenever it is read.
func (d *DB) Select(filters ...Filter) *Selection {
	return &Selection{
		db: d, filters: filters, logs: make(map[Kind]*selected), changed: make(chan struct{}), opened: make(map[string]bool),
	}
}

// Run wakes readers when something selected has changed, until ctx ends. It
// calls followed after each change of the state.
func (s *Selection) Run(ctx context.Context, followed func()) {
	for {
		changed := s.db.Changed() // read before follow, so that no change is missed
		s.follow()
		followed()
		select {
		case <-changed:
		case <-ctx.Done():
			return
		}
	}
}

func (s *Selection) follow() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.followLocked()
}

// followLocked applies the changes of the state to all logs.
func (s *Selection) followLocked() {
	before, opened := s.revision, false
	// Entries come first: whether an instance is selected depends on them.
	for kind, l := range s.logs {
		if kind.Collection == collection.ServiceEntry {
			s.readLocked(l)
		}
	}
	for kind, l := range s.logs {
		if kind.Collection != collection.ServiceEntry {
			s.readLocked(l)
		}
	}
	for coll, was := range s.opened {
		if now := s.isOpen(coll); now != was {
			s.opened[coll], opened = now, true
		}
	}
	if opened || s.revision != before {
		close(s.changed)
		s.changed = make(chan struct{})
	}
}

// logLocked returns the log of a kind, which is followed from now on; nil if
// there is no such collection or the filters do not select it.
func (s *Selection) logLocked(k Kind) *selected {
	if s.db.logOf(k) == nil || !s.selectsCollection(k.Collection) {
		return nil
	}
	l := s.logs[k]
	if l == nil {
		l = &selected{kind: k, places: make(map[string]Revision)}
		s.logs[k] = l
		if k.Collection == collection.WorkloadEntry {
			entries := Kind{collection.ServiceEntry, k.Shape}
			if s.logs[entries] == nil {
				s.logs[entries] = &selected{kind: entries, places: make(map[string]Revision)}
			}
		}
	}
	return l
}

func (s *Selection) selectsCollection(coll string) bool {
	for i := range s.filters {
		if f := &s.filters[i]; len(f.Collections) > 0 && !slices.Contains(f.Collections, coll) {
			return false
		}
	}
	return true
}

// readLocked applies the changes of the state to a log.
func (s *Selection) readLocked(l *selected) {
	if l.cursor.begun {
		for c := range s.db.Changes(l.kind, &l.cursor) {
			s.applyLocked(l, &c)
		}
		if !l.cursor.Lost {
			return
		}
	}
	renamed := s.db.renamedSince(l.cursor.Revision)
	l.cursor = Cursor{}
	gone := make(map[string]bool, l.live)
	for i := range l.slots {
		if p := &l.slots[i]; p.record != nil {
			gone[p.name] = true
		}
	}
	for c := range s.db.Changes(l.kind, &l.cursor) {
		delete(gone, c.Name)
		c.Handed = renamed
		s.applyLocked(l, &c)
	}
	for name := range gone {
		s.removeLocked(l, name)
	}
}

// applyLocked applies one change of the state.
func (s *Selection) applyLocked(l *selected, c *Change) {
	is, was := !c.Removed && s.selectsLocked(l.kind, c.Record), l.get(c.Name) != nil
	if is {
		s.putLocked(l, c.Name, c.Record, c.Handed)
	} else if was {
		s.removeLocked(l, c.Name)
	}
	if is == was || c.Removed || c.Record.parts == nil {
		return
	}
	// Instances come and go with their entry, without a change of their own.
	instances := s.logs[Kind{collection.WorkloadEntry, l.kind.Shape}]
	if instances == nil || l.kind.Shape != encode.Workload {
		return
	}
	for _, b := range c.Record.parts.blocks {
		for _, i := range b.records {
			if !is {
				if held := instances.get(i.Name()); held != nil && held.of == i.of {
					s.removeLocked(instances, i.Name())
				}
			} else if s.db.isServed(i) {
				s.putLocked(instances, i.Name(), i, false)
			}
		}
	}
}

// isServed reports whether an instance is served under its name to sinks of the
// shape workload.
func (d *DB) isServed(i *Record) bool {
	d.mu.RLock()
	defer d.mu.RUnlock()
	return i.place[encode.Workload] != 0
}

// selectsLocked reports whether all filters select a record.
func (s *Selection) selectsLocked(k Kind, r *Record) bool {
	if r.isInstance() {
		entries := s.logs[Kind{collection.ServiceEntry, k.Shape}]
		return entries != nil && entries.get(r.of.name) != nil
	}
	for i := range s.filters {
		f := &s.filters[i]
		if k.Collection == collection.ServiceEntry {
			// The log of entries says which instances are selected, even if the
			// entries themselves are not.
			if !f.selectsService(r) {
				return false
			}
		} else if !f.selects(r) {
			return false
		}
	}
	return true
}

func (s *Selection) putLocked(l *selected, name string, r *Record, handed bool) {
	switch held := l.get(name); {
	case held == nil || held.Hash(l.kind.Shape) != r.Hash(l.kind.Shape):
		s.revision++
		l.put(s.revision, name, r)
	case handed || held.kind.registry != r.kind.registry:
		s.revision++
		l.hand(s.revision, name, r)
	case held != r:
		l.swap(name, r)
	}
}

// renamedSince reports whether a registry got another name after a revision.
func (d *DB) renamedSince(r Revision) bool {
	d.mu.RLock()
	defer d.mu.RUnlock()
	return d.renamed > r
}

func (s *Selection) removeLocked(l *selected, name string) {
	s.revision++
	l.put(s.revision, name, nil)
	l.forget(s.db.options.Tombstones)
}

// Changes returns the changes of a kind after a cursor; see [DB.Changes].
func (s *Selection) Changes(k Kind, c *Cursor) iter.Seq[Change] {
	return func(yield func(Change) bool) {
		var first [few]Change
		var more *[chunk]Change
		defer func() { giveBack(more) }()
		for buf := first[:0]; ; buf = more[:0] {
			changes, now, ok := s.read(k, c, buf)
			if !ok {
				*c = At(now)
				return
			}
			if c.Lost || !c.each(changes, yield) {
				return
			}
			if len(changes) < cap(buf) {
				c.end(now)
				return
			}
			// Release the records that the reader has handled.
			if clear(changes); more == nil {
				more = chunks.Get().(*[chunk]Change)
			}
		}
	}
}

// read returns the next changes, as many as fit in buf, and the current
// revision. ok is false if the kind is not selected.
func (s *Selection) read(k Kind, c *Cursor, buf []Change) (changes []Change, now Revision, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	l := s.logLocked(k)
	if l == nil {
		return nil, s.revision, false
	}
	s.followLocked()
	if !c.begun {
		c.begun, c.Begun = true, s.revision
	}
	if l.horizon > max(c.Revision, c.Begun) {
		c.Lost = true
		return nil, 0, true
	}
	for _, p := range l.slots[l.after(c.Revision):] {
		if p.name == "" {
			continue
		}
		change := Change{Name: p.name, Revision: p.revision, Record: p.record, Removed: p.record == nil}
		content, handed := l.handed[p.name]
		change.Handed = handed && content <= c.whole
		if buf = append(buf, change); len(buf) == cap(buf) {
			break
		}
	}
	return buf, s.revision, true
}

// Get returns the record that sinks of a kind receive under a name.
func (s *Selection) Get(k Kind, name string) (*Record, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	l := s.logLocked(k)
	if l == nil {
		return nil, false
	}
	s.followLocked()
	r := l.get(name)
	return r, r != nil
}

// Len returns the number of names of a kind that is read.
func (s *Selection) Len(k Kind) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	if l := s.logs[k]; l != nil {
		return l.live
	}
	return 0
}

// Revision returns the current revision of the selection.
func (s *Selection) Revision() Revision {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.revision
}

// Changed returns a channel that is closed when something selected changes, or
// a collection opens that was asked about.
func (s *Selection) Changed() <-chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.changed
}

// Initialized reports whether the registries that are selected have completed a
// first listing of a collection; see [DB.Initialized]. Where hosts are merged,
// an entry of one registry has endpoints of any other, so all have to.
func (s *Selection) Initialized(coll string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	is := s.isOpen(coll)
	if s.db.tables[coll] != nil { // any other, a name that a client chose, is always open
		s.opened[coll] = is
	}
	return is
}

func (s *Selection) isOpen(coll string) bool {
	if !s.selectsCollection(coll) {
		return true
	}
	merged := s.db.merges.Load() && (coll == collection.ServiceEntry || coll == collection.WorkloadEntry)
	return !slices.ContainsFunc(s.db.Waiting(coll), func(registry string) bool {
		for i := range s.filters {
			if f := &s.filters[i]; !merged && len(f.Registries) > 0 && !slices.Contains(f.Registries, registry) {
				return false
			}
		}
		return true
	})
}

// selected is the log of a kind in a selection; see [changeLog]. Selection.mu
// guards it.
type selected struct {
	kind    Kind
	cursor  Cursor // in the log of the state
	slots   []place
	places  map[string]Revision // of each name in slots
	live    int                 // present names
	dead    int                 // removed names that are retained
	horizon Revision            // of the newest evicted removal
	oldest  int                 // no removal is before it
	handed  map[string]Revision // see changeLog
}

// place is a name's place in the log. A removed name has no record, an empty
// place no name.
type place struct {
	revision Revision
	name     string
	record   *Record
}

// after returns the index of the first place with a greater revision.
func (l *selected) after(r Revision) int {
	n, found := slices.BinarySearchFunc(l.slots, r, func(p place, r Revision) int {
		switch {
		case p.revision < r:
			return -1
		case p.revision > r:
			return 1
		}
		return 0
	})
	if found {
		n++
	}
	return n
}

func (l *selected) get(name string) *Record {
	at, ok := l.places[name]
	if !ok {
		return nil
	}
	return l.slots[l.after(at)-1].record
}

// swap replaces the record of a present name by another of the same content.
func (l *selected) swap(name string, r *Record) {
	p := &l.slots[l.after(l.places[name])-1]
	delete(l.places, name) // so that the key is the new record's memory, too
	p.name, p.record = r.Name(), r
	l.places[p.name] = p.revision
}

// hand moves a present name to the end of the log, for a record of the same
// content whose registry has another name.
func (l *selected) hand(at Revision, name string, r *Record) {
	content, again := l.handed[name]
	if !again {
		content = l.places[name]
	}
	l.put(at, name, r)
	if l.handed == nil {
		l.handed = make(map[string]Revision)
	}
	l.handed[r.Name()] = content
}

// put moves a name to the end of the log; a nil record removes it.
func (l *selected) put(at Revision, name string, r *Record) {
	delete(l.handed, name)
	if was, ok := l.places[name]; ok {
		p := &l.slots[l.after(was)-1]
		l.count(p, -1)
		*p = place{revision: was}
	}
	if len(l.slots) > 2*(l.live+l.dead)+64 {
		l.compact()
	}
	if r != nil {
		name = r.Name() // shares the record's memory
	}
	delete(l.places, name) // so that the key is this name's memory, too
	l.places[name] = at
	l.slots = append(l.slots, place{at, name, r})
	l.count(&l.slots[len(l.slots)-1], 1)
}

func (l *selected) count(p *place, n int) {
	if p.record != nil {
		l.live += n
	} else {
		l.dead += n
	}
}

// compact drops the empty places.
func (l *selected) compact() {
	kept := make([]place, 0, l.live+l.dead+(l.live+l.dead)/4+64)
	oldest := 0
	for i, p := range l.slots {
		if i == l.oldest {
			oldest = len(kept)
		}
		if p.name != "" {
			kept = append(kept, p)
		}
	}
	l.slots, l.oldest = kept, min(oldest, len(kept))
}

// forget evicts the oldest removals until at most limit are retained.
func (l *selected) forget(limit int) {
	for ; l.dead > limit; l.oldest++ {
		p := &l.slots[l.oldest]
		if p.name != "" && p.record == nil {
			l.horizon = p.revision
			l.dead--
			delete(l.places, p.name)
			*p = place{revision: p.revision}
		}
	}
}
