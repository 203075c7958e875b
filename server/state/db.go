package state

import (
	"cmp"
	"context"
	"iter"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/protobuf/proto"

	"github.com/isthmus-mesh/isthmus/plugin/collection"
	"github.com/isthmus-mesh/isthmus/server/changelog"
	"github.com/isthmus-mesh/isthmus/server/encode"
	"github.com/isthmus-mesh/isthmus/server/state/address"
	"github.com/isthmus-mesh/isthmus/server/state/book"
	"github.com/isthmus-mesh/isthmus/server/state/conflict"
	"github.com/isthmus-mesh/isthmus/server/state/history"
	"github.com/isthmus-mesh/isthmus/server/state/message"
	"github.com/isthmus-mesh/isthmus/server/state/names"
	"github.com/isthmus-mesh/isthmus/server/state/shapes"
	"github.com/isthmus-mesh/isthmus/server/state/status"
)

// Revision counts the changes of a DB, one per name and shape, from 0. It is
// valid within one process; a resource's version lasts across restarts.
type Revision = changelog.Revision

// Defaults of [Options].
const (
	DefaultMaxResources = 1_000_000
	DefaultMaxServices  = 250_000
	DefaultMaxBytes     = 512 << 20
	DefaultTombstones   = 100_000
)

// Options tune a DB. The zero value works.
type Options struct {
	// MaxResources limits the resources of one registry; further ones are
	// refused and listed as problems. 0 means [DefaultMaxResources].
	MaxResources int
	// MaxServices limits the ServiceEntries among them in the same way. 0 means
	// [DefaultMaxServices].
	MaxServices int
	// MaxBytes limits the bytes of metadata and bodies of one registry in the
	// same way. 0 means [DefaultMaxBytes].
	MaxBytes int
	// Tombstones limits the removed names that each collection retains per
	// shape, at some 200 bytes each. 0 means [DefaultTombstones].
	Tombstones int
	// Selector returns the value of [encode.SelectorLabel] for the instances of
	// a ServiceEntry, given its name without namespace. Nil means the name
	// itself.
	Selector func(name string) string
	// Conflicts are the rules for hosts of several registries; see
	// [DB.SetConflicts].
	Conflicts []ConflictRule
	// Validate returns the error with which istiod would reject a decoded body;
	// istiod does not report it. Nil accepts everything that decodes.
	Validate func(body proto.Message) error
	// Addresses is the network of the addresses of hosts; see
	// [encode.Addresses].
	Addresses netip.Prefix
	// Registries tune single registries, by name.
	Registries map[string]RegistryOptions
	// Applied is called with each new revision and the registry whose changes
	// led to it, before readers are woken. It must not block. Nil is allowed.
	Applied func(registry string, revision uint64)
}

// DB is the state of all registries. Its methods are safe for concurrent use.
type DB struct {
	options    Options
	reader     message.Reader
	log        *slog.Logger
	tables     map[string]*table // by collection; immutable
	behind     atomic.Int64      // registries whose first listing is awaited
	restored   atomic.Int64      // registries served from restored state
	remarkable atomic.Bool       // see [DB.Remarkable]
	merges     atomic.Bool       // a rule has the policy [Merge]

	// apply is held by writers, and by readers of what it guards. It is locked
	// before mu.
	apply      sync.Mutex
	writing    bool        // the writer holds mu
	registries []*Registry // in the order of the configuration; see public
	addresses  *address.Hosts
	history    history.History

	// book guards what readers read of the claims beside the logs. It is locked
	// last.
	book      book.Book
	hosts     *conflict.Hosts[entryID]
	contested map[Policy]int // hosts by policy; immutable
	// public are the registries, and in each its status, as the last change
	// left them; guarded by book.
	public []*Registry

	// mu guards the logs. A batch holds it only while it writes to them.
	mu       sync.RWMutex
	revision Revision
	renamed  Revision      // after the last change of a registry's name
	changed  chan struct{} // closed and replaced to wake readers
	waiting  map[string][]string
}

// table holds the resources of one collection.
type table struct {
	name string
	*names.Names[*Record]
	logs shapes.Logs[*Record] // guarded by DB.mu
	// asides lists the names that have a claim which is not what sinks receive
	// under the name: it is shadowed, or merged into another. Sinks see nothing
	// of it. A name whose claims have become what is served is removed from it.
	// DB.mu guards it.
	asides changelog.Index[Claims]
}

// New returns the state of the named registries, in the order of the
// configuration. It registers its metrics, once per registerer.
func New(registries []string, o Options, log *slog.Logger, reg prometheus.Registerer) *DB {
	o.MaxResources = cmp.Or(o.MaxResources, DefaultMaxResources)
	o.MaxServices = cmp.Or(o.MaxServices, DefaultMaxServices)
	o.MaxBytes = cmp.Or(o.MaxBytes, DefaultMaxBytes)
	o.Tombstones = cmp.Or(o.Tombstones, DefaultTombstones)
	if o.Validate == nil {
		o.Validate = func(proto.Message) error { return nil }
	}
	if o.Selector == nil {
		o.Selector = func(name string) string { return name }
	}
	d := &DB{
		options: o, log: log, tables: make(map[string]*table), addresses: address.In(o.Addresses), changed: make(chan struct{}),
	}
	d.reader = message.Reader{Valid: func(_ *encode.Part, body proto.Message) error { return o.Validate(body) }, Selector: d.selector}
	for _, name := range collection.All() {
		perShape := name == collection.ServiceEntry || name == collection.WorkloadEntry
		d.tables[name] = &table{name: name, Names: newNames(d), logs: shapes.New[*Record](perShape)}
	}
	d.hosts = newHosts(d, nil)
	d.setRules(o.Conflicts)
	for n, name := range registries {
		d.registries = append(d.registries, newRegistry(d, name, n))
	}
	d.waiting = d.waitingNow()
	d.publish()
	reg.MustRegister(status.Metrics{Source: d})
	return d
}

// tickEvery is the interval of [DB.Run].
const tickEvery = 5 * time.Second

// Run handles, until ctx ends, what depends on time: it logs listings that
// remain incomplete and the lines that the log limit suppressed, opens
// collections that waited long enough, and removes resources that were held
// back long enough.
func (d *DB) Run(ctx context.Context) error {
	t := time.NewTicker(tickEvery)
	defer t.Stop()
	d.apply.Lock()
	d.history.AddSample(d.sizeNow(), int(time.Hour/tickEvery))
	d.apply.Unlock()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-t.C:
		}
		d.tick()
	}
}

func (d *DB) tick() {
	d.apply.Lock()
	defer d.unlock()
	for _, r := range d.registries {
		r.tick()
	}
	d.history.AddSample(d.sizeNow(), int(time.Hour/tickEvery))
}

// unlock unlocks apply after a change of any registry.
func (d *DB) unlock() {
	d.publish()
	d.apply.Unlock()
}

// publish lets readers see the registries and their statuses. The caller holds
// apply.
func (d *DB) publish() {
	d.book.Change(func() {
		d.public = d.registries
		for _, r := range d.public {
			r.publishLocked()
		}
	})
}

// Registry returns the registry of that name, nil if there is none. It does not
// wait for a change in progress.
func (d *DB) Registry(name string) *Registry {
	d.book.RLock()
	defer d.book.RUnlock()
	for _, r := range d.public {
		if r.public.Registry == name {
			return r
		}
	}
	return nil
}

// Kind is a collection in the shape of some sinks. The collection need not
// exist.
type Kind struct {
	Collection string
	Shape      encode.Shape
}

// Has reports whether there is such a collection.
func (d *DB) Has(coll string) bool { return d.tables[coll] != nil }

// Tombstones returns [Options.Tombstones].
func (d *DB) Tombstones() int { return d.options.Tombstones }

// Merges reports whether a rule of conflicts has the policy [Merge]. It takes
// no lock.
func (d *DB) Merges() bool { return d.merges.Load() }

// RenamedSince reports whether a registry got another name after a revision.
func (d *DB) RenamedSince(r Revision) bool {
	d.mu.RLock()
	defer d.mu.RUnlock()
	return d.renamed > r
}

// IsServed reports whether an instance is served under its name to sinks of the
// shape workload.
func (d *DB) IsServed(i *Record) bool {
	d.mu.RLock()
	defer d.mu.RUnlock()
	return i.place[encode.Workload] != 0
}

func (d *DB) logOf(k Kind) *shapes.Log[*Record] {
	if t := d.tables[k.Collection]; t != nil {
		return t.logs.In(k.Shape)
	}
	return nil
}

// Change is the newest record of a name, or its removal.
type Change struct {
	Name     string
	Record   *Record // nil if removed
	Removed  bool
	Revision Revision
	// Handed reports that the reader has read this content under the name
	// before: only the registry of the name, or its name, is another. It
	// concerns readers who select by registry, or print it.
	Handed bool
}

// Cursor is a reader's position in the changes of a kind.
type Cursor = changelog.Cursor

// At returns the cursor of a reader that has read everything up to a revision.
func At(r Revision) Cursor { return changelog.At(r) }

// Changes returns the changes of a kind after a cursor, oldest first, and
// advances the cursor; see [changelog.Log.Follow]. The sequence is read while
// it is ranged over, without a copy.
func (d *DB) Changes(k Kind, c *Cursor) iter.Seq[Change] {
	return func(yield func(Change) bool) {
		l := d.logOf(k)
		if l == nil {
			*c = At(d.Revision())
			return
		}
		l.Follow(d.mu.RLocker(), &d.revision, c, func(of changelog.Change[*Record]) bool {
			change := Change{Name: of.Entry.Name(), Revision: of.Revision, Removed: of.Removed, Handed: of.Handed}
			if !of.Removed {
				change.Record = of.Entry
			}
			return yield(change)
		})
	}
}

// Get returns the record that sinks of a kind receive under a name. It does not
// wait for a batch in progress.
func (d *DB) Get(k Kind, name string) (*Record, bool) {
	t := d.tables[k.Collection]
	if t == nil {
		return nil, false
	}
	d.book.RLock()
	defer d.book.RUnlock()
	if r := t.ListedShared(name); r.Shows(k.Shape) {
		return r, true
	}
	return nil, false
}

// Len returns the number of names of a kind.
func (d *DB) Len(k Kind) int {
	d.mu.RLock()
	defer d.mu.RUnlock()
	if l := d.logOf(k); l != nil {
		return l.Len()
	}
	return 0
}

// Collections returns the names of all collections that are not empty, sorted.
func (d *DB) Collections() []string {
	d.mu.RLock()
	defer d.mu.RUnlock()
	var names []string
	for name, t := range d.tables {
		if t.logs.Len() > 0 {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names
}

// Revision returns the current revision.
func (d *DB) Revision() Revision {
	d.mu.RLock()
	defer d.mu.RUnlock()
	return d.revision
}

// Changed returns a channel that is closed when any collection changes or
// opens. Get the channel before reading the state.
func (d *DB) Changed() <-chan struct{} {
	d.mu.RLock()
	defer d.mu.RUnlock()
	return d.changed
}

func (d *DB) wakeLocked() {
	close(d.changed)
	d.changed = make(chan struct{})
}

// Initialized reports whether the collection is open: every registry that may
// publish to it has completed a first listing, except optional ones that cannot
// be reached.
func (d *DB) Initialized(coll string) bool { return len(d.Waiting(coll)) == 0 }

// Synced reports whether every registry has completed a first listing or was
// restored, except optional ones that cannot be reached. It takes no lock.
func (d *DB) Synced() bool { return d.behind.Load() == 0 }

// Restored reports whether a registry is served from restored state. It takes
// no lock.
func (d *DB) Restored() bool { return d.restored.Load() > 0 }

// Waiting returns the registries that hold a collection back.
func (d *DB) Waiting(coll string) []string {
	d.mu.RLock()
	defer d.mu.RUnlock()
	return d.waiting[coll]
}

// waitingNow returns the registries that each collection waits for, and counts
// them. The caller holds apply.
func (d *DB) waitingNow() map[string][]string {
	out := make(map[string][]string)
	behind := 0
	defer func() { d.behind.Store(int64(behind)) }()
	for _, r := range d.registries {
		names := r.waits()
		for _, coll := range names {
			out[coll] = append(out[coll], r.name)
		}
		if len(names) > 0 || r.waitedFor() && r.collections != nil && len(r.collections) == 0 {
			behind++
		}
	}
	return out
}

// wake publishes which collections wait, and wakes all readers. The
// caller holds apply.
func (d *DB) wake() {
	waiting := d.waitingNow()
	d.mu.Lock()
	defer d.mu.Unlock()
	d.waiting = waiting
	d.wakeLocked()
}

// Services returns the services of all registries, by registry and name.
func (d *DB) Services() iter.Seq[status.Service] {
	type item struct {
		record                  *Record
		order                   int
		registry, owner, beside string
		merged                  []string
	}
	d.apply.Lock()
	var items []item
	for r := range d.tables[collection.ServiceEntry].services() {
		it := item{record: r, order: r.kind.registry.order, registry: r.kind.registry.name}
		if v := d.verdictOf(r); v != nil {
			switch v.Outcome {
			case conflict.Shadowed:
				it.owner = v.By.seenFrom(r)
			case conflict.Beside:
				it.beside = v.By.seenFrom(r)
			}
		}
		if m := r.of.merger; m != nil {
			for _, of := range m.Members() {
				if of != r.of {
					it.merged = append(it.merged, entryID{of.registry, of.name}.seenFrom(r))
				}
			}
		}
		items = append(items, it)
	}
	d.apply.Unlock()
	slices.SortFunc(items, func(a, b item) int {
		return cmp.Or(cmp.Compare(a.order, b.order), strings.Compare(a.record.Name(), b.record.Name()))
	})
	return func(yield func(status.Service) bool) {
		for _, it := range items {
			r := it.record
			if !yield(status.Service{
				Registry: it.registry, Name: r.Name(), Hosts: r.Hosts(), Endpoints: r.Endpoints(),
				Version: r.Version().String(), ShadowedBy: it.owner, MergedWith: it.merged, Beside: it.beside,
			}) {
				return
			}
		}
	}
}

// Contested returns the number of contested hosts by policy, which must not be
// changed.
func (d *DB) Contested() map[Policy]int {
	d.book.RLock()
	defer d.book.RUnlock()
	return d.contested
}

// Registries returns the state of all registries, in the order of the
// configuration. It does not wait for a change in progress.
func (d *DB) Registries() []Status {
	d.book.RLock()
	defer d.book.RUnlock()
	out := make([]Status, 0, len(d.public))
	for _, r := range d.public {
		out = append(out, r.publicLocked())
	}
	return out
}
