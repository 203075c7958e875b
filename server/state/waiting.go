package state

import (
	"maps"
	"slices"
	"time"

	"github.com/isthmus-mesh/isthmus/server/state/message"
	"github.com/isthmus-mesh/isthmus/server/state/status"
)

// RegistryOptions tune one registry. The zero value works.
type RegistryOptions struct {
	// Optional opens collections without the registry if it cannot be reached:
	// if its plugin reports an error, or if no listing completes within
	// SyncTimeout.
	Optional bool
	// SyncTimeout bounds the first listing. After it an optional registry is no
	// longer waited for; for any other a warning is logged. 0 means
	// [DefaultSyncTimeout].
	SyncTimeout time.Duration
	// Protect selects the removals to pause.
	Protect Protect
	// Owns refuses what the registry may not say; nil refuses nothing.
	Owns Owner
}

// Owner decides what a registry may say.
type Owner = message.Owner

// DefaultSyncTimeout is the default of [RegistryOptions.SyncTimeout].
const DefaultSyncTimeout = time.Minute

// Waits returns the registries that collections wait for, in the order of the
// configuration.
func (d *DB) Waits() []status.Wait {
	if d.Synced() {
		return nil
	}
	var out []status.Wait
	for _, s := range d.Registries() {
		if len(s.Waits) > 0 {
			out = append(out, status.Wait{Registry: s.Registry, Collections: s.Waits, Since: s.WaitingSince})
		}
	}
	return out
}

// Remarkable reports whether any removal is paused or an optional registry
// was skipped. It takes no lock.
func (d *DB) Remarkable() bool { return d.remarkable.Load() }

// remark updates the value of [DB.Remarkable].
func (d *DB) remark() {
	d.remarkable.Store(slices.ContainsFunc(d.registries, func(r *Registry) bool {
		return r.guard.Len() > 0 || r.released && !r.status.Listed()
	}))
}

// waits returns the collections that wait for the registry, sorted: all of them
// until its plugin has declared its collections. The caller holds apply, as for
// all functions below.
func (r *Registry) waits() (names []string) {
	switch {
	case !r.waitedFor():
		return nil
	case r.collections == nil:
		names = slices.Sorted(maps.Keys(r.db.tables))
	default:
		names = slices.Sorted(slices.Values(r.collections))
	}
	return slices.DeleteFunc(names, func(coll string) bool { return r.exempt[coll] })
}

// waitedFor reports whether the registry may hold collections.
func (r *Registry) waitedFor() bool { return !r.status.Listed() && !r.released && !r.status.Late }

// release opens the collections of an optional registry that cannot be reached.
// It is permanent: an open collection never waits again, and later resources
// of the registry are added.
func (r *Registry) release() {
	waited := time.Since(r.begun)
	late := waited >= r.options.SyncTimeout
	switch {
	case !r.waitedFor():
		return
	case r.options.Optional && (late || r.status.Error != ""):
		why := r.status.Error
		if why == "" {
			why = r.status.Down
		}
		r.log.Warn("the registry is optional and its first listing is not complete; its types are served without it", "after", waited.Round(time.Millisecond), "err", why)
		r.released = true
		r.db.remark()
		r.db.wake()
	case late && !r.overdue && len(r.waits()) > 0:
		r.overdue = true
		r.log.Warn("types wait for a required registry; sinks that connect get nothing of them", "waiting_since", r.begun, "waiting", r.waits())
	}
}
