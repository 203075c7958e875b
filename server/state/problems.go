package state

import (
	"errors"
	"time"

	"github.com/isthmus-mesh/isthmus/internal/clip"
	"github.com/isthmus-mesh/isthmus/plugin/collection"
	"github.com/isthmus-mesh/isthmus/server/state/message"
	"github.com/isthmus-mesh/isthmus/server/state/problems"
)

// Problem describes something that cannot be served.
type Problem = problems.Problem

// listingPatience is the duration of a listing after which it is logged, and
// again each time the duration has doubled.
const listingPatience = time.Minute

// Skipped returns what the plugin does not send although nothing is wrong with
// it, as the registry or the configuration intends that, ordered by id.
func (r *Registry) Skipped() []Problem {
	r.db.apply.Lock()
	defer r.db.apply.Unlock()
	return r.skipped.Skipped()
}

// line reports whether another line about a problem may be logged. The caller
// holds apply, as for all of this file.
func (r *Registry) line() bool { return r.lines.Allow() }

// stateChanged logs the connection state of the registry, rate-limited like
// problems.
func (r *Registry) stateChanged() {
	if r.states.Allow() {
		r.sayState()
	}
}

// sayState logs the current state and the number of changes not logged before
// it.
func (r *Registry) sayState() {
	var more []any
	if n := r.states.Take(); n > 0 {
		more = []any{"not_logged", n}
	}
	switch {
	case r.status.Error != "" && r.status.Listed():
		r.log.Warn("the registry cannot be followed; what is known is served", append(more, "err", r.status.Error)...)
	case r.status.Error != "" && r.released:
		r.log.Warn("the registry cannot be followed; its types are served without it", append(more, "err", r.status.Error)...)
	case r.status.Error != "":
		r.log.Warn("the registry cannot be followed; its types wait for its first listing",
			append(more, "err", r.status.Error, "waiting_since", r.begun, "waiting", r.waits())...)
	default:
		r.log.Info("the registry is followed again", more...)
	}
}

// tick handles everything that depends on time alone.
func (r *Registry) tick() {
	r.summarize(false)
	r.expire(time.Now())
	r.forgetRuns(true)
	r.release()
	if r.states.Dropped() && r.states.Over() {
		r.stateChanged()
	}
	if age := time.Since(r.status.ListingSince); r.status.Listing && age >= r.patience {
		r.log.Warn("the listing is still not complete; nothing is removed until it is", "for", age.Round(time.Second),
			"services", r.services, "instances", r.instances)
		r.patience = 2 * age.Round(tickEvery)
	}
}

// summarize logs the number of dropped lines: immediately for the first of a
// window, and at the end of a listing for all of them.
func (r *Registry) summarize(listed bool) {
	if n := r.lines.Summary(listed, r.status.Listing); n > 0 {
		r.log.Warn("more problems than are logged one by one", "problems", n, "all", r.problems(), "see", "/api/v1/registries")
	}
}

// forgetRejection removes a resource from the refused ones.
func (r *Registry) forgetRejection(coll, name string) {
	if len(r.rejected) > 0 {
		r.db.book.Change(func() { r.rejected.Forget(coll, name) })
	}
}

// note records a refused resource and removes an accepted one from the refused
// ones.
func (r *Registry) note(u *message.Upsert) {
	if u.Err == nil {
		r.forgetRejection(u.Part.Collection, u.Part.Name)
		return
	}
	r.status.Rejected++
	text := clip.Text(u.Err.Error(), problems.MaxReason)
	reason := text + "; rejected, the last good one is served"
	coll, name := u.ID()
	_, isForeign := errors.AsType[*message.ForeignError](u.Err)
	if isForeign {
		// One from before the rule goes with the next complete listing.
		reason = text + "; rejected"
	} else if u.IsNameless() {
		r.nameless = r.listing
		reason = text + "; rejected; as its name cannot be read, a listing with it removes nothing"
	} else {
		r.retain(coll, name)
	}
	id := problems.ResourceID(coll, name)
	l, isLimit := errors.AsType[*message.LimitError](u.Err)
	if isLimit && r.limit.Reached(l.Field) {
		r.log.Warn("the registry has reached a limit; what is beyond it is rejected", "limit", l.Field, "value", l.Value)
	}
	fresh, ok := false, false
	if r.db.book.Change(func() { fresh, ok = r.rejected.Set(id, reason, r.listing) }); !ok {
		r.reported.Beyond++
	} else if !isLimit && fresh && r.line() {
		r.log.Warn("resource rejected", "id", id, "err", text)
	}
}

// retainAll marks a resource that the plugin cannot send as listed, like
// retain. A service retains all its instances. Without a name, any resource may
// be meant.
func (r *Registry) retainAll(coll, name string) {
	if name == "" {
		r.nameless = r.listing
		return
	}
	r.retain(coll, name)
	if coll == "" || coll == collection.ServiceEntry {
		if c := r.db.tables[collection.ServiceEntry].claim(name, r); c != nil && c.parts != nil {
			c.of.retained = r.listing
			if c.of.counts.Paused > 0 {
				c.of.each(r.resume)
			}
		}
	}
}

// retain marks a resource as listed although its new content was refused: the
// last good content stays. Without a collection this applies to every resource
// of the name, and for an instance to its service.
func (r *Registry) retain(coll, name string) {
	if coll == "" {
		for coll := range r.db.tables {
			r.retain(coll, name)
		}
		return
	}
	t := r.db.tables[coll]
	if t == nil {
		return
	}
	if c := t.claim(name, r); c != nil {
		c.Seen = r.listing
		r.resume(c)
		if c.IsInstance() {
			e := c.of.entry()
			e.Seen = r.listing
			r.resume(e)
		}
	}
}

// problem lists a problem reported by the plugin, and logs it if it is new.
func (r *Registry) problem(id, reason string) {
	if r.reported.Set(id, reason) && r.line() {
		r.log.Warn("problem in the registry", "id", clip.Text(id, problems.MaxID), "reason", clip.Text(reason, problems.MaxReason))
	}
}

// problems returns the number of what [Registry.Problems] lists.
func (r *Registry) problems() int {
	return r.reported.Len() + len(r.rejected) + r.shadowed + r.disputed + r.unaddressed + min(r.reported.Beyond, 1)
}

// Problems returns what cannot be served, ordered by id.
func (r *Registry) Problems() []Problem {
	return problems.Sorted(r.unsortedProblems())
}

func (r *Registry) unsortedProblems() []Problem {
	d := r.db
	d.apply.Lock()
	defer d.apply.Unlock()
	out := r.reported.Problems(r.rejected)
	if r.shadowed+r.disputed > 0 {
		for id, v := range d.hosts.Verdicts() {
			if id.registry != r {
				continue
			}
			if reason := id.problem(v); reason != "" {
				out = append(out, problems.InConflict(id.name, reason))
			}
		}
	}
	if r.shadowed+r.unaddressed > 0 {
		r.claims(func(t *table, c *Record) {
			isEntry := t.name == collection.ServiceEntry
			switch {
			case !isEntry && c.marked(isShadowed):
				out = append(out, problems.Shadowed(t.name, c.Name(), t.Listed(c.Name()).kind.registry.name, c.IsInstance()))
			case isEntry && c.parts != nil && c.of.unaddressed:
				out = append(out, problems.Unaddressed(c.of.host))
			}
		})
	}
	return out
}
