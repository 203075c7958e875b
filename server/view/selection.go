package view

import (
	"context"
	"iter"
	"path"
	"slices"
	"strings"
	"sync"

	"github.com/isthmus-mesh/isthmus/plugin/collection"
	"github.com/isthmus-mesh/isthmus/plugin/shard"
	"github.com/isthmus-mesh/isthmus/server/changelog"
	"github.com/isthmus-mesh/isthmus/server/encode"
	"github.com/isthmus-mesh/isthmus/server/state"
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
func (f *Filter) selects(r *state.Record) bool {
	if len(f.Collections) > 0 && !slices.Contains(f.Collections, r.Collection()) {
		return false
	}
	return f.selectsService(r)
}

// selectsService is selects without regard to the collection.
func (f *Filter) selectsService(r *state.Record) bool {
	if len(f.Registries) > 0 && !slices.Contains(f.Registries, r.Registry()) ||
		len(f.Namespaces) > 0 && !slices.Contains(f.Namespaces, r.Namespace()) {
		return false
	}
	if len(f.Hosts) == 0 && f.Shards.All() {
		return true
	}
	hosts := allHosts(r)
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
func allHosts(r *state.Record) []string {
	switch r.Collection() {
	case collection.ServiceEntry, collection.DestinationRule, "networking.istio.io/VirtualService":
		return encode.Hosts(r.Spec())
	}
	return nil
}

// selection is the part of a [state.DB] that filters select, with logs and
// revisions of its own: its readers are not woken by changes of the rest, and
// do not read them. Each change of the state is examined once for all readers
// of the selection. Its methods are safe for concurrent use, and mean what
// those of DB mean.
//
// A selected name costs some 150 bytes.
type selection struct {
	db      *state.DB
	filters []Filter

	mu       sync.Mutex
	logs     map[Kind]*selected // followed kinds
	revision state.Revision
	changed  chan struct{}   // closed and replaced to wake readers
	opened   map[string]bool // collections that readers asked about: whether they were open
}

// newSelection returns the part of the state that all filters select. It
// follows the state while run runs, and whenever it is read.
func newSelection(db *state.DB, filters ...Filter) *selection {
	return &selection{
		db: db, filters: filters, logs: make(map[Kind]*selected), changed: make(chan struct{}), opened: make(map[string]bool),
	}
}

// run wakes readers when something selected has changed, until ctx ends. It
// calls followed after each change of the state.
func (s *selection) run(ctx context.Context, followed func()) {
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

func (s *selection) follow() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.followLocked()
}

// followLocked applies the changes of the state to all logs.
func (s *selection) followLocked() {
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
func (s *selection) logLocked(k Kind) *selected {
	if !s.db.Has(k.Collection) || !s.selectsCollection(k.Collection) {
		return nil
	}
	l := s.logs[k]
	if l == nil {
		l = &selected{kind: k, places: make(map[string]state.Revision)}
		s.logs[k] = l
		if k.Collection == collection.WorkloadEntry {
			entries := Kind{Collection: collection.ServiceEntry, Shape: k.Shape}
			if s.logs[entries] == nil {
				s.logs[entries] = &selected{kind: entries, places: make(map[string]state.Revision)}
			}
		}
	}
	return l
}

func (s *selection) selectsCollection(coll string) bool {
	for i := range s.filters {
		if f := &s.filters[i]; len(f.Collections) > 0 && !slices.Contains(f.Collections, coll) {
			return false
		}
	}
	return true
}

// readLocked applies the changes of the state to a log.
func (s *selection) readLocked(l *selected) {
	if l.cursor.HasBegun() {
		for c := range s.db.Changes(l.kind, &l.cursor) {
			s.applyLocked(l, &c)
		}
		if !l.cursor.Lost {
			return
		}
	}
	renamed := s.db.RenamedSince(l.cursor.Revision)
	l.cursor = state.Cursor{}
	gone := make(map[string]bool, l.log.Len())
	for _, n := range l.log.All() {
		gone[n.name] = true
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
func (s *selection) applyLocked(l *selected, c *state.Change) {
	is, was := !c.Removed && s.selectsLocked(l.kind, c.Record), l.get(c.Name) != nil
	if is {
		s.putLocked(l, c.Name, c.Record, c.Handed)
	} else if was {
		s.removeLocked(l, c.Name)
	}
	if is == was || c.Removed {
		return
	}
	// Instances come and go with their entry, without a change of their own.
	instances := s.logs[Kind{Collection: collection.WorkloadEntry, Shape: l.kind.Shape}]
	if instances == nil || l.kind.Shape != encode.Workload {
		return
	}
	for i := range c.Record.Instances() {
		if !is {
			if held := instances.get(i.Name()); held != nil && held.Service() == i.Service() && held.IsOfRegistry(i) {
				s.removeLocked(instances, i.Name())
			}
		} else if s.db.IsServed(i) {
			s.putLocked(instances, i.Name(), i, false)
		}
	}
}

// selectsLocked reports whether all filters select a record.
func (s *selection) selectsLocked(k Kind, r *state.Record) bool {
	if r.IsInstance() {
		entries := s.logs[Kind{Collection: collection.ServiceEntry, Shape: k.Shape}]
		return entries != nil && entries.get(r.Service()) != nil
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

func (s *selection) putLocked(l *selected, name string, r *state.Record, handed bool) {
	switch held := l.get(name); {
	case held == nil || held.Hash(l.kind.Shape) != r.Hash(l.kind.Shape):
		s.revision++
		l.put(s.revision, name, r)
	case handed || !held.IsOfRegistry(r):
		s.revision++
		l.hand(s.revision, name, r)
	case held != r:
		l.swap(name, r)
	}
}

func (s *selection) removeLocked(l *selected, name string) {
	s.revision++
	l.put(s.revision, name, nil)
	l.forget(s.db.Tombstones())
}

// Changes returns the changes of a kind after a cursor; see [state.DB.Changes].
func (s *selection) Changes(k Kind, c *state.Cursor) iter.Seq[state.Change] {
	return func(yield func(state.Change) bool) {
		s.mu.Lock()
		l := s.logLocked(k)
		s.mu.Unlock()
		if l == nil {
			*c = state.At(s.Revision())
			return
		}
		l.log.Follow((*following)(s), &s.revision, c, func(of changelog.Change[selectedName]) bool {
			return yield(state.Change{Name: of.Entry.name, Record: of.Entry.record, Revision: of.Revision, Removed: of.Removed, Handed: of.Handed})
		})
	}
}

// following is the lock of a selection whose holder reads the newest state.
type following selection

// Lock implements sync.Locker.
func (f *following) Lock() {
	f.mu.Lock()
	(*selection)(f).followLocked()
}

// Unlock implements sync.Locker.
func (f *following) Unlock() { f.mu.Unlock() }

// Get returns the record that sinks of a kind receive under a name.
func (s *selection) Get(k Kind, name string) (*state.Record, bool) {
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
func (s *selection) Len(k Kind) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	if l := s.logs[k]; l != nil {
		return l.log.Len()
	}
	return 0
}

// Revision returns the current revision of the selection.
func (s *selection) Revision() state.Revision {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.revision
}

// Changed returns a channel that is closed when something selected changes, or
// a collection opens that was asked about.
func (s *selection) Changed() <-chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.changed
}

// Initialized reports whether the registries that are selected have completed a
// first listing of a collection; see [state.DB.Initialized]. Where hosts are
// merged, an entry of one registry has endpoints of any other, so all have to.
func (s *selection) Initialized(coll string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	is := s.isOpen(coll)
	if s.db.Has(coll) { // any other, a name that a client chose, is always open
		s.opened[coll] = is
	}
	return is
}

func (s *selection) isOpen(coll string) bool {
	if !s.selectsCollection(coll) {
		return true
	}
	merged := s.db.Merges() && (coll == collection.ServiceEntry || coll == collection.WorkloadEntry)
	return !slices.ContainsFunc(s.db.Waiting(coll), func(registry string) bool {
		for i := range s.filters {
			if f := &s.filters[i]; !merged && len(f.Registries) > 0 && !slices.Contains(f.Registries, registry) {
				return false
			}
		}
		return true
	})
}

// selected is the log of a kind in a selection. selection.mu guards it.
type selected struct {
	kind   Kind
	cursor state.Cursor // in the log of the state
	log    changelog.Log[selectedName]
	places map[string]state.Revision // of each name in the log
}

// selectedName is a name with its record, nil if it is removed.
type selectedName struct {
	name   string
	record *state.Record
}

func (l *selected) get(name string) *state.Record {
	if at, ok := l.places[name]; ok {
		n, _ := l.log.Get(at)
		return n.record
	}
	return nil
}

// list lists a name at a place. Its memory is that of the newest record.
func (l *selected) list(name string, r *state.Record, at state.Revision) selectedName {
	if r != nil {
		name = r.Name()
	}
	delete(l.places, name) // so that the key is this memory, too
	l.places[name] = at
	return selectedName{name, r}
}

// swap replaces the record of a present name by another of the same content.
func (l *selected) swap(name string, r *state.Record) {
	at := l.places[name]
	l.log.Set(at, l.list(name, r, at))
}

// hand moves a present name to the end of the log, for a record of the same
// content whose registry has another name.
func (l *selected) hand(at state.Revision, name string, r *state.Record) {
	was := l.places[name]
	l.log.Hand(was, at, l.list(name, r, at))
}

// put moves a name to the end of the log; a nil record removes it.
func (l *selected) put(at state.Revision, name string, r *state.Record) {
	if was, ok := l.places[name]; ok {
		l.log.Leave(was)
	}
	l.log.Append(at, l.list(name, r, at), r == nil)
}

// forget evicts the oldest removals until at most limit are retained.
func (l *selected) forget(limit int) {
	l.log.Evict(limit, func(n selectedName) { delete(l.places, n.name) })
}
