package state

import (
	"log/slog"
	"maps"
	"slices"
	"time"

	"github.com/isthmus-mesh/isthmus/plugin/collection"
	pluginv1 "github.com/isthmus-mesh/isthmus/plugin/proto/isthmus/plugin/v1"
)

// Registry holds the state last reported by one plugin. Its methods may be
// called from any goroutine; batches are applied one after the other.
type Registry struct {
	db    *DB
	name  string
	order uint16
	log   *slog.Logger

	// All guarded by DB.apply.

	status      Status
	collections []string       // that the plugin may publish to; nil until it said so
	listing     uint32         // number of the present listing
	nameless    uint32         // the last listing with something in it that cannot be named
	resources   int            // claims
	bytes       int            // of all claims
	services    int            // services among them
	instances   int            // instances among them
	served      map[string]int // claims by collection that are not kept back
	shadowed    int            // claims that are kept back

	problems map[string]string  // that the plugin listed
	known    map[string]string  // that it listed before the present listing
	refused  map[string]refusal // that the host found
	unlisted int                // of both, what there was no room for
	lines    lines              // that were logged about all of these
	states   lines              // that were logged about what the plugin can do
	limit    string             // for which something was refused last
	limitAt  time.Time          // when that was
	patience time.Duration      // age of the listing at which the log says so
}

// Status is a registry as people want to see it.
type Status struct {
	Registry     string         `json:"registry"`
	Synced       bool           `json:"synced"`                 // a first listing is complete
	Listing      bool           `json:"listing"`                // a new listing is coming in
	ListingSince time.Time      `json:"listing_since,omitzero"` // of the first of those that are not complete yet
	Down         string         `json:"down,omitempty"`         // why there is no plugin
	Error        string         `json:"error,omitempty"`        // why the plugin cannot follow its registry
	Detail       string         `json:"detail,omitempty"`
	Since        time.Time      `json:"since"`     // of the above
	Services     uint64         `json:"services"`  // that the plugin knows of
	Instances    uint64         `json:"instances"` // the same
	Resources    map[string]int `json:"resources"` // served, by collection
	Bytes        int            `json:"bytes"`     // of all resources, as [Options.MaxBytes] counts
	Problems     int            `json:"problems"`
	Revision     Revision       `json:"revision"` // after the last change
}

// Stale reports whether what is served may be older than what the registry
// holds.
func (s Status) Stale() bool { return s.Down != "" || s.Error != "" }

func newRegistry(d *DB, name string, order uint16) *Registry {
	r := &Registry{
		db: d, name: name, order: order, log: d.log.With("registry", name),
		served:   map[string]int{collection.ServiceEntry: 0, collection.WorkloadEntry: 0},
		problems: make(map[string]string), refused: make(map[string]refusal),
		status: Status{Registry: name, Since: time.Now()},
	}
	d.metrics.begin(r)
	return r
}

// Begin says that a plugin begins a listing. What it does not mention until it
// is synced will be removed then. The collections are those that it may publish
// to.
func (r *Registry) Begin(collections []string) {
	d := r.db
	d.apply.Lock()
	defer d.apply.Unlock()
	r.collections = append([]string{}, collections...)
	if collections == nil {
		r.collections = nil
	}
	r.listing++
	r.forgetProblems()
	if !r.status.Listing {
		r.status.Listing, r.status.ListingSince, r.patience = true, time.Now(), listingPatience
		d.metrics.setListing(r)
	}
	r.setState(func(s *Status) { s.Down, s.Error, s.Detail = "", "", "" })
	r.countProblems()
	d.wake()
}

// Down says that there is no plugin, and why. Everything stays as it is.
func (r *Registry) Down(err error) {
	r.db.apply.Lock()
	defer r.db.apply.Unlock()
	r.summarize(true)
	if r.states.dropped > 0 {
		r.sayState()
	}
	r.setState(func(s *Status) { s.Down = err.Error() })
}

// setState changes what is said of the registry. The caller holds apply, as for
// all that follows.
func (r *Registry) setState(change func(*Status)) {
	before := r.status
	change(&r.status)
	if before.Down != r.status.Down || before.Error != r.status.Error || before.Detail != r.status.Detail {
		r.status.Since = time.Now()
	}
	r.db.metrics.setStale(r)
}

// Apply carries out one message of the plugin. Nothing that the message holds
// can make it fail: what cannot be served is refused, counted and listed, and
// the last good one is kept.
func (r *Registry) Apply(m *pluginv1.WatchResponse) {
	b := &batch{r: r, db: r.db}
	b.parse(m.GetUpserts())

	d := r.db
	d.apply.Lock()
	defer d.apply.Unlock()
	for _, rm := range m.GetRemovals() {
		b.remove(rm.GetCollection(), rm.GetName())
	}
	for _, k := range m.GetKept() {
		r.keepAll(k.GetCollection(), k.GetName())
	}
	b.relist(m.GetRelisted())
	b.upsert()
	for _, p := range m.GetProblems() {
		r.problem(p.GetId(), p.GetReason())
	}
	opened, listed := false, false
	if m.GetSynced() {
		b.sweep()
		opened = !r.status.Synced
		listed = opened || r.status.Listing
		r.status.Synced, r.status.Listing, r.status.ListingSince = true, false, time.Time{}
		d.metrics.setListing(r)
		d.metrics.setSynced(r)
	}
	b.commit()
	if listed {
		published := r.resources - r.services - r.instances
		r.log.Info("listing complete", "services", r.services, "instances", r.instances, "published", published)
	}
	if st := m.GetStatus(); st != nil {
		was := r.status.Error
		r.setState(func(s *Status) { s.Error, s.Detail = st.GetError(), st.GetDetail() })
		if (was == "") != (st.GetError() == "") {
			r.stateChanged()
		}
	}
	if m.GetServices() != 0 || m.GetInstances() != 0 || m.GetSynced() || len(m.GetRemovals()) > 0 {
		r.status.Services, r.status.Instances = m.GetServices(), m.GetInstances()
		d.metrics.setSizes(r)
	}
	d.metrics.setBytes(r)
	r.countProblems()
	r.summarize(m.GetSynced())
	if opened {
		d.behind.Add(-1)
		d.wake()
	}
}

// Status returns the registry's state.
func (r *Registry) Status() Status {
	r.db.apply.Lock()
	defer r.db.apply.Unlock()
	s := r.status
	s.Resources, s.Bytes = maps.Clone(r.served), r.bytes
	return s
}

// claims calls f with each claim of the registry, by collection and name.
func (r *Registry) claims(f func(*table, *Record)) {
	for _, name := range slices.Sorted(maps.Keys(r.db.tables)) {
		t := r.db.tables[name]
		for name := range t.index {
			if c := t.claim(name, r.order); c != nil {
				f(t, c)
			}
		}
	}
}
