package state

import (
	"log/slog"
	"maps"
	"slices"
	"sync/atomic"
	"time"

	"github.com/isthmus-mesh/isthmus/plugin/collection"
	pluginv1 "github.com/isthmus-mesh/isthmus/plugin/proto/isthmus/plugin/v1"
	"github.com/isthmus-mesh/isthmus/server/state/problems"
	"github.com/isthmus-mesh/isthmus/server/state/status"
)

// Registry holds the state last reported by one plugin. Its methods may be
// called from any goroutine; batches are applied one after the other.
type Registry struct {
	db *DB

	// All fields are guarded by DB.apply.

	name  string // written with DB.mu held too, so that either lock guards reading
	order int    // position in the configuration
	// shown is name, for readers without a lock.
	shown atomic.Pointer[string]
	log   *slog.Logger
	kinds map[string]*kind // by body URL

	status      Status
	collections []string        // declared by the plugin; nil before
	exempt      map[string]bool // collections open when the registry was added, which it does not hold
	listing     uint32          // number of the current listing
	nameless    uint32          // last listing with a resource that has no name
	changes     map[status.Change]*atomic.Uint64
	counts

	reported problems.List       // problems that the plugin reports
	skipped  problems.List       // what the plugin does not send although nothing is wrong with it
	rejected problems.Rejections // by the server
	lines    problems.Lines      // log lines about problems
	states   problems.Lines      // log lines about the connection state
	limit    problems.Limit      // that caused a refusal last
	patience time.Duration       // age of the listing at which it is logged next

	guard guard // state of the removal protection

	options  RegistryOptions
	owns     atomic.Pointer[Owner] // that of options, for parse
	begun    time.Time             // start of the first listing, from which its collections are held
	released bool                  // collections were opened without it
	overdue  bool                  // the SyncTimeout warning was logged

	// public is the status as the last change left it, for readers; guarded by
	// DB.book.
	public Status
}

// Status describes a registry to operators.
type Status = status.Registry

// counts are derived from the claims of a registry.
type counts struct {
	resources   int            // claims
	entries     int            // ServiceEntries among them
	bytes       int            // of all claims
	services    int            // services among them
	instances   int            // instances among them
	served      map[string]int // served claims by collection
	shadowed    int            // shadowed claims
	disputed    int            // served ServiceEntries that differ from those of another registry
	unaddressed int            // services whose host has no address
}

func newCounts() counts {
	return counts{served: map[string]int{collection.ServiceEntry: 0, collection.WorkloadEntry: 0}}
}

func newRegistry(d *DB, name string, order int) *Registry {
	r := &Registry{
		db: d, name: name, order: order, log: d.log.With("registry", name), kinds: make(map[string]*kind),
		counts:   newCounts(),
		changes:  make(map[status.Change]*atomic.Uint64),
		reported: problems.NewList(), skipped: problems.NewList(), rejected: make(problems.Rejections),
		status: Status{Registry: name, Since: time.Now()},
		begun:  time.Now(),
	}
	r.shown.Store(&name)
	r.setOptions(d.options.Registries[name])
	return r
}

// Begin starts a listing of a plugin. What the listing does not mention is
// removed when it completes. Collections are those that the plugin may publish
// to.
func (r *Registry) Begin(collections []string) {
	d := r.db
	d.apply.Lock()
	defer d.unlock()
	r.collections = append([]string{}, collections...)
	if collections == nil {
		r.collections = nil
	}
	r.listing++
	r.reported.Relist(r.status.Listing)
	r.skipped.Clear()
	if r.listing == 1 && r.resources > 0 {
		r.countRestored()
	}
	if !r.status.Listing {
		r.guard.Base = r.guard.Live
		r.status.Listing, r.status.ListingSince, r.patience = true, time.Now(), listingPatience
	}
	r.setState(func(s *Status) { s.Down, s.Error, s.Detail = "", "", "" })
	d.wake()
}

// Down records why no plugin is running. Resources are retained.
func (r *Registry) Down(err error) {
	r.db.apply.Lock()
	defer r.db.unlock()
	r.summarize(true)
	if r.states.Dropped() {
		r.sayState()
	}
	r.setState(func(s *Status) { s.Down = err.Error() })
}

// setState updates the status. The caller holds apply, as for all functions
// below.
func (r *Registry) setState(change func(*Status)) {
	before := r.status
	change(&r.status)
	if before.Down != r.status.Down || before.Error != r.status.Error || before.Detail != r.status.Detail {
		r.status.Since = time.Now()
	}
}

// Apply applies one message of the plugin as a whole. Resources that cannot be
// served are refused, counted and listed, and their last good content is
// retained. An error means that the message breaks the contract as such, see
// [message.Reader], and nothing of it is applied; or that the bridge has a
// defect, see [DB.attempt].
func (r *Registry) Apply(m *pluginv1.WatchResponse) error {
	upserts, err := r.read(m)
	if err != nil {
		return err
	}
	b := &batch{r: r, db: r.db, upserts: upserts}
	listed, log := []any(nil), (*slog.Logger)(nil)
	defer func() { // whoever reads the line finds the status
		if listed != nil {
			log.Info("listing complete", listed...)
		}
	}()
	r.db.apply.Lock()
	defer r.db.apply.Unlock()
	log = r.log
	return r.db.attempt(b, aMessage, func() {
		listed = r.apply(b, m)
		r.db.book.Change(func() {
			r.publishLocked()
			for _, other := range b.others {
				other.publishLocked()
			}
		})
	})
}

// apply applies a parsed message, and returns what to log of a listing that it
// completes. The caller holds apply.
func (r *Registry) apply(b *batch, m *pluginv1.WatchResponse) (complete []any) {
	d := r.db
	live, pending, kept := r.guard.Live, r.guard.Pending, r.guard.Len()
	if r.status.Listing {
		live = r.guard.Base
	}
	b.removals(m.GetRemovals())
	for _, k := range m.GetKept() {
		r.retainAll(k.GetCollection(), k.GetName())
	}
	b.relist(m.GetRelisted())
	b.upsert()
	for _, p := range m.GetProblems() {
		r.problem(p.GetId(), p.GetReason())
	}
	for _, p := range m.GetLeftOut() {
		r.skipped.Set(p.GetId(), p.GetReason())
	}
	opened, listed := false, false
	if m.GetSynced() {
		b.sweep()
		opened = r.waitedFor()
		listed = !r.status.Synced || r.status.Listing
		if !r.status.Restored.IsZero() {
			d.restored.Add(-1)
		}
		r.status.Synced, r.status.Listing, r.status.ListingSince, r.status.Restored = true, false, time.Time{}, time.Time{}
		d.remark()
	}
	b.commit()
	if !r.status.Listing {
		r.guard.NoteLive(live, time.Now())
	}
	if listed {
		complete = []any{"services", r.services, "instances", r.instances}
		if others := r.resources - r.services - r.instances; others > 0 {
			complete = append(complete, "other_resources", others)
		}
	}
	if st := m.GetStatus(); st != nil {
		was := r.status.Error
		r.setState(func(s *Status) { s.Error, s.Detail = st.GetError(), st.GetDetail() })
		r.release()
		if (was == "") != (st.GetError() == "") {
			r.stateChanged()
		}
	}
	r.protectionChanged(pending, kept)
	if m.GetServices() != 0 || m.GetInstances() != 0 || m.GetSynced() || len(m.GetRemovals()) > 0 {
		r.status.Services, r.status.Instances = m.GetServices(), m.GetInstances()
	}
	r.summarize(m.GetSynced())
	if opened {
		d.wake()
	}
	return complete
}

// Status returns the registry's state. It does not wait for a change in
// progress.
func (r *Registry) Status() Status {
	r.db.book.RLock()
	defer r.db.book.RUnlock()
	return r.publicLocked()
}

// publicLocked returns a copy of public. The caller holds the book for reading.
func (r *Registry) publicLocked() Status {
	s := r.public
	s.Resources = maps.Clone(s.Resources)
	return s
}

// publishLocked lets readers see the status. The caller holds apply and the
// book.
func (r *Registry) publishLocked() {
	s, was := r.status, &r.public
	r.reported.By[problems.OfRejection] = len(r.rejected)
	r.reported.By[problems.OfNetwork] = r.unaddressed
	r.reported.By[problems.OfShadow] = r.shadowed + r.disputed
	s.Reasons, s.Skips = snapshot(was.Reasons, r.reported.By), snapshot(was.Skips, r.skipped.By)
	if s.Resources, s.Changes = was.Resources, snapshot(was.Changes, r.changes); s.Resources == nil {
		s.Resources = make(map[string]int)
	}
	maps.Copy(s.Resources, r.served) // not a new map for each message
	s.ProblemCount, s.SkippedCount, s.Bytes = r.problems(), r.skipped.Len(), r.bytes
	s.Required, s.Released = !r.options.Optional, r.released && !s.Listed()
	if s.Waits = r.waits(); len(s.Waits) > 0 {
		s.WaitingSince = r.begun
	}
	if s.Removals = r.guard.Len(); s.Removals > 0 {
		s.Protection = new(r.guard.Protection())
	}
	s.SetOldNames()
	r.public = s
}

// count counts a change.
func (r *Registry) count(of status.Change) {
	n := r.changes[of]
	if n == nil {
		n = new(atomic.Uint64)
		r.changes[of] = n
	}
	n.Add(1)
}

// snapshot returns a copy of a map for readers: the one before if it is equal.
func snapshot[M ~map[K]V, K, V comparable](before, now M) M {
	if before != nil && maps.Equal(before, now) {
		return before
	}
	return maps.Clone(now)
}

// claims calls f with each claim of the registry, ordered by collection.
func (r *Registry) claims(f func(*table, *Record)) {
	for _, name := range slices.Sorted(maps.Keys(r.db.tables)) {
		t := r.db.tables[name]
		for c := range t.All() {
			if c.isOf(r) {
				f(t, c)
			}
		}
	}
}
