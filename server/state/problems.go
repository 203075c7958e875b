package state

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/isthmus-mesh/isthmus/plugin/collection"
)

// Bounds of what the log says about the problems of one registry. Whatever is
// beyond them is listed all the same.
const (
	maxLines    = 20 // per linesWithin
	linesWithin = time.Minute
)

// limitQuiet is for how long nothing may have been refused because of a limit
// for the log to say so again.
const limitQuiet = time.Hour

// listingPatience is how long a listing may take before the log says so; it
// says so again whenever the time has doubled.
const listingPatience = time.Minute

// Bounds of what is kept of a plugin's words.
const (
	maxProblems = 10_000  // per list
	maxID       = 1 << 10 // bytes
	maxReason   = 4 << 10 // bytes
)

// Problem is something that cannot be served as it is.
type Problem struct {
	ID     string `json:"id"`
	Reason string `json:"reason"`
}

// refusal is why a resource was refused.
type refusal struct {
	reason string
	seen   uint32 // the listing that mentioned the resource last
}

// lines counts what was logged about problems.
type lines struct {
	since   time.Time // when the present window began
	count   int       // lines in the window
	dropped int       // lines that were not written since the last summary
	told    bool      // a summary was written in the window
}

// allow reports whether one more line may be logged.
func (l *lines) allow() bool {
	if now := time.Now(); now.Sub(l.since) >= linesWithin {
		*l = lines{since: now, dropped: l.dropped}
	}
	if l.count >= maxLines {
		l.dropped++
		return false
	}
	l.count++
	return true
}

// line reports whether one more line about a problem may be logged. The caller
// holds apply, as for all of this file.
func (r *Registry) line() bool { return r.lines.allow() }

// stateChanged logs whether the registry can be followed, within the same
// bounds as problems.
func (r *Registry) stateChanged() {
	if r.states.allow() {
		r.sayState()
	}
}

// sayState logs the present state, and how many changes were left out before
// it.
func (r *Registry) sayState() {
	var more []any
	if n := r.states.dropped; n > 0 {
		more, r.states.dropped = []any{"left_out", n}, 0
	}
	switch {
	case r.status.Error != "" && r.status.Synced:
		r.log.Warn("the registry can not be followed; what is known is served", append(more, "err", r.status.Error)...)
	case r.status.Error != "":
		r.log.Warn("the registry can not be followed; its types are held until its first listing is complete", append(more, "err", r.status.Error)...)
	default:
		r.log.Info("the registry is followed again", more...)
	}
}

// tick logs what only time brings about.
func (r *Registry) tick() {
	r.summarize(false)
	if r.states.dropped > 0 && time.Since(r.states.since) >= linesWithin {
		r.stateChanged()
	}
	if age := time.Since(r.status.ListingSince); r.status.Listing && age >= r.patience {
		r.log.Warn("the listing is still not complete; nothing is removed until it is", "for", age.Round(time.Second),
			"services", r.services, "instances", r.instances)
		r.patience = 2 * age.Round(tickEvery)
	}
}

// summarize writes one line for those that were not written: at once for the
// first in a window, and at the end of a listing for all of it.
func (r *Registry) summarize(listed bool) {
	l := &r.lines
	switch {
	case l.dropped == 0:
	case listed, time.Since(l.since) >= linesWithin, !l.told && !r.status.Listing:
		r.log.Warn("more problems than are logged one by one", "problems", l.dropped, "all", r.status.Problems, "see", "/api/v1/registries")
		l.dropped, l.told = 0, true
	}
}

// refusalID is the id under which it is listed that a resource was refused.
// Without a collection its kind is unknown.
func refusalID(coll, name string) string {
	name = clip(name, maxID)
	if coll == "" {
		return "resource of unknown kind " + strconv.QuoteToASCII(name)
	}
	return "resource " + coll + " " + name
}

// forgetRefusal takes a resource off the list of what was refused.
func (r *Registry) forgetRefusal(coll, name string) {
	if len(r.refused) > 0 {
		delete(r.refused, refusalID(coll, name))
		delete(r.refused, refusalID("", name))
	}
}

// note lists what was refused, and takes what is accepted again off the list.
func (r *Registry) note(u *upsert) {
	if u.err == nil {
		r.forgetRefusal(u.part.Collection, u.part.Name)
		return
	}
	r.db.metrics.refused.WithLabelValues(r.name).Inc()
	text := clip(u.err.Error(), maxReason)
	reason := text + "; refused, the last good one is kept"
	coll, name := u.id()
	if u.isNameless() {
		r.nameless = r.listing
		reason = text + "; refused; as its name cannot be read, a listing with it removes nothing"
	} else {
		r.keep(coll, name)
	}
	id := refusalID(coll, name)
	l, isLimit := errors.AsType[*limitError](u.err)
	if isLimit {
		fresh := r.limit != l.field || time.Since(r.limitAt) >= limitQuiet
		r.limit, r.limitAt = l.field, time.Now()
		if fresh {
			r.log.Warn("the registry has reached a limit; what is beyond it is refused", "limit", l.field, "value", l.value)
		}
	}
	have, listed := r.refused[id]
	if !listed && len(r.refused) >= maxProblems {
		r.unlisted++
		return
	}
	r.refused[id] = refusal{reason, r.listing}
	if !isLimit && have.reason != reason && r.line() {
		r.log.Warn("resource refused", "id", id, "err", text)
	}
}

// keepAll notes that the registry has a resource that the plugin cannot send: as
// keep, and a service keeps its instances, whatever they are called. Without a
// name it may be any resource.
func (r *Registry) keepAll(coll, name string) {
	if name == "" {
		r.nameless = r.listing
		return
	}
	r.keep(coll, name)
	if coll == "" || coll == collection.ServiceEntry {
		if c := r.db.tables[collection.ServiceEntry].claim(name, r.order); c != nil && c.parts != nil {
			c.of.kept = r.listing
		}
	}
}

// keep notes that a listing mentioned a resource, although in a form that was
// refused: its last good content stays. Without a collection every resource of
// the name stays, with an instance its service.
func (r *Registry) keep(coll, name string) {
	if coll == "" {
		for coll := range r.db.tables {
			r.keep(coll, name)
		}
		return
	}
	t := r.db.tables[coll]
	if t == nil {
		return
	}
	if c := t.claim(name, r.order); c != nil {
		c.seen = r.listing
		if c.isInstance() {
			c.of.entry().seen = r.listing
		}
	}
}

// problem lists what the plugin says about something in the registry, and logs
// it if it is news.
func (r *Registry) problem(id, reason string) {
	id, reason = clip(id, maxID), clip(reason, maxReason)
	if reason == "" {
		delete(r.problems, id)
		delete(r.known, id)
		return
	}
	before, listed := r.problems[id]
	if !listed {
		if len(r.problems) >= maxProblems {
			r.unlisted++
			return
		}
		before = r.known[id]
	}
	r.problems[id] = reason
	if before != reason && r.line() {
		r.log.Warn("problem in the registry", "id", id, "reason", reason)
	}
}

// forgetProblems empties the list before a new listing. What was on it is no
// news if it comes again.
func (r *Registry) forgetProblems() {
	known := r.problems
	if r.status.Listing { // the last listing broke off, so what was known before it may be missing
		for id, reason := range r.known {
			if _, have := known[id]; !have && len(known) < maxProblems {
				known[id] = reason
			}
		}
	}
	r.known, r.problems, r.unlisted = known, make(map[string]string), 0
}

func (r *Registry) countProblems() {
	r.status.Problems = len(r.problems) + len(r.refused) + r.shadowed + min(r.unlisted, 1)
	r.db.metrics.setProblems(r)
}

// sweepRefusals takes off the list what the listing that is complete now did
// not mention.
func (r *Registry) sweepRefusals() {
	maps.DeleteFunc(r.refused, func(_ string, refused refusal) bool { return refused.seen != r.listing })
}

// Problems returns what cannot be served as it is, by id.
func (r *Registry) Problems() []Problem {
	d := r.db
	d.apply.Lock()
	defer d.apply.Unlock()
	out := make([]Problem, 0, len(r.problems)+len(r.refused)+r.shadowed)
	for id, reason := range r.problems {
		out = append(out, Problem{id, reason})
	}
	for id, refused := range r.refused {
		out = append(out, Problem{id, refused.reason})
	}
	if r.unlisted > 0 {
		out = append(out, Problem{"more", fmt.Sprintf("%d times since the listing began something was wrong that is not listed, "+
			"since there are %d problems of its kind already", r.unlisted, maxProblems)})
	}
	if r.shadowed > 0 {
		r.claims(func(t *table, c *Record) {
			if !c.marked(isShadowed) {
				return
			}
			what, cure := "kept back", "Rename one of the two"
			switch {
			case c.isInstance():
				what = "kept back from sinks of the shape workload (inline, it is an endpoint of its service)"
				cure = "Give the service in one of the two another name (translate.name)"
			case c.parts != nil:
				cure = "If both are one service, one registry is enough; if not, give it another name and another host (translate.name, " +
					"translate.host); another namespace alone would show the mesh the host twice"
			}
			out = append(out, Problem{
				"resource " + t.name + " " + c.Name(),
				fmt.Sprintf("registry %q, which comes first in the configuration, has a resource of the same name; %s. %s",
					d.registries[t.current(c.Name()).registry].name, what, cure),
			})
		})
	}
	slices.SortFunc(out, func(a, b Problem) int { return strings.Compare(a.ID, b.ID) })
	return out
}

// clip returns the beginning of a text that is too long.
func clip(text string, limit int) string {
	if len(text) <= limit {
		return text
	}
	return strings.ToValidUTF8(text[:limit], "") + "..."
}
