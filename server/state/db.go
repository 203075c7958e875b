package state

import (
	"cmp"
	"context"
	"iter"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/protobuf/proto"

	"github.com/isthmus-mesh/isthmus/plugin/collection"
	"github.com/isthmus-mesh/isthmus/server/encode"
)

// Revision counts the changes that a DB has seen: one per name and shape. It
// starts at 0 and is meaningful within one process only; what lasts across
// restarts is a resource's version.
type Revision uint64

// Defaults of [Options].
const (
	DefaultMaxResources = 1_000_000
	DefaultMaxBytes     = 512 << 20
	DefaultTombstones   = 100_000
)

// Options tune a DB. The zero value works.
type Options struct {
	// MaxResources is the number of resources that one registry may have; what
	// comes beyond is refused and listed. 0 means [DefaultMaxResources].
	MaxResources int
	// MaxBytes is the number of bytes that the resources of one registry may
	// have together, metadata and bodies; as above. 0 means [DefaultMaxBytes].
	MaxBytes int
	// Tombstones is the number of removed names that each collection remembers
	// in each shape. 0 means [DefaultTombstones]. One takes some 200 bytes.
	Tombstones int
	// Selector returns the value of [encode.SelectorLabel] for the instances of
	// a ServiceEntry, given the name of the entry without its namespace. Nil
	// means the name itself.
	Selector func(name string) string
	// Validate says what istiod would reject in a body that decodes: istiod
	// itself tells nobody. Nil means that everything that decodes is served.
	Validate func(body proto.Message) error
}

// DB is the state. Its methods may be called from any goroutine.
type DB struct {
	options    Options
	log        *slog.Logger
	metrics    *metrics
	tables     map[string]*table // by collection; immutable
	kinds      map[string]*kind  // by body URL, guarded by apply
	registries []*Registry       // in the order of the configuration; immutable
	behind     atomic.Int64      // registries that lack a first listing

	// apply is held by whoever changes something, and by those who read what
	// it guards. It is taken before mu.
	apply   sync.Mutex
	hosts   map[netip.Addr][]claimant // the hosts that hash to an address
	history []Event                   // a ring
	next    int                       // where in history the next event goes

	// mu guards the logs, and is held for the moment in which a batch enters
	// them.
	mu       sync.RWMutex
	revision Revision
	changed  chan struct{} // closed and replaced when there is something to see
	waiting  map[string][]string
}

// table is the resources of one collection.
type table struct {
	name  string
	index map[string]*Record // the first claim on each name; guarded by DB.apply
	logs  [shapes]*changeLog // one and the same where shapes do not differ; guarded by DB.mu
}

// New returns the state of registries by name, in the order of the
// configuration. It registers its metrics.
func New(registries []string, o Options, log *slog.Logger, reg prometheus.Registerer) (*DB, error) {
	o.MaxResources = cmp.Or(o.MaxResources, DefaultMaxResources)
	o.MaxBytes = cmp.Or(o.MaxBytes, DefaultMaxBytes)
	o.Tombstones = cmp.Or(o.Tombstones, DefaultTombstones)
	if o.Validate == nil {
		o.Validate = func(proto.Message) error { return nil }
	}
	if o.Selector == nil {
		o.Selector = func(name string) string { return name }
	}
	d := &DB{
		options: o, log: log, tables: make(map[string]*table), kinds: make(map[string]*kind),
		hosts: make(map[netip.Addr][]claimant), changed: make(chan struct{}),
	}
	for _, name := range collection.All() {
		t := &table{name: name, index: make(map[string]*Record)}
		t.logs[encode.Inline] = &changeLog{shape: encode.Inline}
		t.logs[encode.Workload] = t.logs[encode.Inline]
		if name == collection.ServiceEntry || name == collection.WorkloadEntry {
			t.logs[encode.Workload] = &changeLog{shape: encode.Workload}
		}
		d.tables[name] = t
	}
	var err error
	if d.metrics, err = newMetrics(d, reg); err != nil {
		return nil, err
	}
	for n, name := range registries {
		d.registries = append(d.registries, newRegistry(d, name, uint16(n)))
	}
	d.behind.Store(int64(len(registries)))
	d.waiting = d.waitingNow()
	return d, nil
}

// tickEvery is how often [DB.Run] looks.
const tickEvery = 5 * time.Second

// Run says in the log, until ctx ends, what only time brings about: that a
// listing is still not complete, and what the bounds of the log kept back.
func (d *DB) Run(ctx context.Context) error {
	t := time.NewTicker(tickEvery)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-t.C:
		}
		d.apply.Lock()
		for _, r := range d.registries {
			r.tick()
		}
		d.apply.Unlock()
	}
}

// Registry returns the registry of that name, nil if there is none.
func (d *DB) Registry(name string) *Registry {
	for _, r := range d.registries {
		if r.name == name {
			return r
		}
	}
	return nil
}

// Kind is a collection as sinks of one shape see it. The collection need not
// exist.
type Kind struct {
	Collection string
	Shape      encode.Shape
}

func (d *DB) logOf(k Kind) *changeLog {
	if t := d.tables[k.Collection]; t != nil {
		return t.logs[k.Shape]
	}
	return nil
}

// Change is a name that changed: its newest record or, with Removed, the fact
// that it is gone.
type Change struct {
	Name     string
	Record   *Record // nil if it is gone
	Removed  bool
	Revision Revision
}

// Cursor is a reader's place. The zero Cursor is that of a reader that has seen
// nothing.
type Cursor struct {
	// Revision is up to where the reader has seen everything.
	Revision Revision
	// Begun is the revision at which the reader began with everything. What
	// was removed before is not shown.
	Begun Revision
	// Lost says that removals which the reader has not seen are no longer
	// remembered. It has to begin again with the zero Cursor.
	Lost bool

	begun bool // it is not the zero Cursor
}

// At returns the cursor of a reader that has seen everything up to a revision.
func At(r Revision) Cursor { return Cursor{Revision: r, begun: true} }

// chunk is the number of changes that are read at a time. No lock is held
// between two chunks.
const chunk = 256

// Changes returns what of a kind changed after a cursor, the oldest change
// first, and moves the cursor along. A name that changed several times is there
// once, with its newest state. From the zero Cursor it is everything.
//
// The sequence is read as it is ranged over: no copy is made, writers go on
// meanwhile, and what they change comes later in the same sequence. A reader
// that stops goes on from its cursor, behind the change that it saw last; one
// that does not stop has, at the end, seen everything up to the cursor.
func (d *DB) Changes(k Kind, c *Cursor) iter.Seq[Change] {
	return func(yield func(Change) bool) {
		l := d.logOf(k)
		if l == nil {
			*c = At(d.Revision())
			return
		}
		var buf [chunk]Change
		for {
			changes, now := d.read(l, c, buf[:0])
			if c.Lost {
				return
			}
			for i := range changes {
				c.Revision = changes[i].Revision
				if changes[i].Removed && c.Revision <= c.Begun {
					continue
				}
				if !yield(changes[i]) {
					return
				}
			}
			if len(changes) < chunk {
				c.Revision = max(c.Revision, now)
				return
			}
			// Somebody who reads everything keeps no record alive that he is
			// done with.
			clear(buf[:])
		}
	}
}

// read returns the next changes, and the revision up to which they are complete
// if there is room for more.
func (d *DB) read(l *changeLog, c *Cursor, buf []Change) (changes []Change, now Revision) {
	d.mu.RLock()
	defer d.mu.RUnlock()
	if !c.begun {
		c.begun, c.Begun = true, d.revision
	}
	if l.horizon > max(c.Revision, c.Begun) {
		c.Lost = true
		return nil, 0
	}
	for _, s := range l.slots[l.after(c.Revision):] {
		if s.record == nil {
			continue
		}
		change := Change{Name: s.record.Name(), Revision: s.revision, Removed: !s.record.visible(l.shape)}
		if !change.Removed {
			change.Record = s.record
		}
		if buf = append(buf, change); len(buf) == cap(buf) {
			break
		}
	}
	return buf, d.revision
}

// Get returns what sinks of a kind have under a name.
func (d *DB) Get(k Kind, name string) (*Record, bool) {
	t := d.tables[k.Collection]
	if t == nil {
		return nil, false
	}
	d.apply.Lock()
	defer d.apply.Unlock()
	if r := t.current(name); r.visible(k.Shape) {
		return r, true
	}
	return nil, false
}

// Len returns the number of names of a kind.
func (d *DB) Len(k Kind) int {
	d.mu.RLock()
	defer d.mu.RUnlock()
	if l := d.logOf(k); l != nil {
		return l.live
	}
	return 0
}

// Collections returns the names of all collections that are not empty, sorted.
func (d *DB) Collections() []string {
	d.mu.RLock()
	defer d.mu.RUnlock()
	var names []string
	for name, t := range d.tables {
		if t.logs[encode.Inline].live+t.logs[encode.Workload].live > 0 {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names
}

// Revision returns the present revision.
func (d *DB) Revision() Revision {
	d.mu.RLock()
	defer d.mu.RUnlock()
	return d.revision
}

// Changed returns a channel that is closed when something changed in any
// collection, or a collection was opened. Take the channel first and look
// second.
func (d *DB) Changed() <-chan struct{} {
	d.mu.RLock()
	defer d.mu.RUnlock()
	return d.changed
}

func (d *DB) wakeLocked() {
	close(d.changed)
	d.changed = make(chan struct{})
}

// Initialized reports whether the collection is open: no registry that may
// publish to it lacks its first listing.
func (d *DB) Initialized(coll string) bool { return len(d.Waiting(coll)) == 0 }

// Synced reports whether every registry has completed a first listing. It takes
// no lock.
func (d *DB) Synced() bool { return d.behind.Load() == 0 }

// Waiting returns the registries that hold a collection back.
func (d *DB) Waiting(coll string) []string {
	d.mu.RLock()
	defer d.mu.RUnlock()
	return d.waiting[coll]
}

// waitingNow returns the registries that hold collections back. The caller
// holds apply.
func (d *DB) waitingNow() map[string][]string {
	out := make(map[string][]string)
	for _, r := range d.registries {
		if r.status.Synced {
			continue
		}
		collections := r.collections
		if collections == nil {
			collections = slices.Collect(maps.Keys(d.tables))
		}
		for _, coll := range collections {
			out[coll] = append(out[coll], r.name)
		}
	}
	return out
}

// wake publishes what holds collections back, and wakes all readers. The caller
// holds apply.
func (d *DB) wake() {
	waiting := d.waitingNow()
	d.mu.Lock()
	defer d.mu.Unlock()
	d.waiting = waiting
	d.wakeLocked()
}

// claim returns the claim of a registry on a name, nil if it has none.
func (t *table) claim(name string, registry uint16) *Record {
	r := t.index[name]
	for r != nil && (r.registry != registry || r.is(isTombstone)) {
		r = r.next
	}
	return r
}

// current returns the record that is in the logs under a name: the one that is
// served, a tombstone, or nil.
func (t *table) current(name string) *Record {
	r := t.index[name]
	for r != nil && !r.marked(isServed) && !r.is(isTombstone) {
		r = r.next
	}
	return r
}

// put enters a claim. It takes the place of one of the same registry.
func (t *table) put(c *Record) {
	name := c.Name()
	head := t.index[name]
	var before *Record
	r := head
	for r != nil && (r.registry < c.registry) {
		before, r = r, r.next
	}
	c.next = r
	if r != nil && r.registry == c.registry && !r.is(isTombstone) {
		c.next = r.next
		c.mark(isServed, r.marked(isServed))
		c.mark(isShadowed, r.marked(isShadowed))
	}
	if before == nil {
		t.index[name] = c
	} else {
		before.next = c
	}
}

// drop takes a record out of the claims on its name.
func (t *table) drop(c *Record) {
	name := c.Name()
	if t.index[name] == c {
		if t.index[name] = c.next; c.next != nil {
			t.index[c.next.Name()] = c.next // lest the key keeps c's buffer
		}
		return
	}
	for r := t.index[name]; r != nil; r = r.next {
		if r.next == c {
			r.next = c.next
			return
		}
	}
}

// bury ends with a tombstone the claims on a name of which nothing is served,
// if one has a place in a log.
func (t *table) bury(tomb *Record) {
	name := tomb.Name()
	if t.index[name] == nil {
		t.index[name] = tomb
		return
	}
	r := t.index[name]
	for r.next != nil {
		r = r.next
	}
	r.next = tomb
}

// ServiceStatus is a service as people want to see it.
type ServiceStatus struct {
	Registry  string   `json:"registry"`
	Name      string   `json:"name"` // of its ServiceEntry
	Hosts     []string `json:"hosts"`
	Endpoints int      `json:"endpoints"`
	Version   string   `json:"version"`
	// ShadowedBy is the registry that owns the name; the service is kept back
	// then. It is empty if the service is served.
	ShadowedBy string `json:"shadowed_by,omitempty"`
}

// Services returns the services of all registries, by registry and name.
func (d *DB) Services() iter.Seq[ServiceStatus] {
	type item struct {
		record *Record
		owner  string
	}
	t := d.tables[collection.ServiceEntry]
	d.apply.Lock()
	items := make([]item, 0, len(t.index))
	for _, head := range t.index {
		for r := head; r != nil; r = r.next {
			if r.parts == nil {
				continue
			}
			it := item{record: r}
			if r.marked(isShadowed) {
				it.owner = d.registries[t.current(r.Name()).registry].name
			}
			items = append(items, it)
		}
	}
	d.apply.Unlock()
	slices.SortFunc(items, func(a, b item) int {
		return cmp.Or(cmp.Compare(a.record.registry, b.record.registry), strings.Compare(a.record.Name(), b.record.Name()))
	})
	return func(yield func(ServiceStatus) bool) {
		for _, it := range items {
			r := it.record
			if !yield(ServiceStatus{
				Registry: d.registries[r.registry].name, Name: r.Name(), Hosts: r.Hosts(), Endpoints: r.Endpoints(),
				Version: r.Hash(encode.Inline).String(), ShadowedBy: it.owner,
			}) {
				return
			}
		}
	}
}

// RegistryOf returns the name of the registry that a record is of.
func (d *DB) RegistryOf(r *Record) string { return d.registries[r.registry].name }

// Registries returns the state of all registries, in the order of the
// configuration.
func (d *DB) Registries() []Status {
	out := make([]Status, 0, len(d.registries))
	for _, r := range d.registries {
		out = append(out, r.Status())
	}
	return out
}
