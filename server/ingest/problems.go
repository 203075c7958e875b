package ingest

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/isthmus-mesh/isthmus/plugin/collection"
	"github.com/isthmus-mesh/isthmus/server/resource"
)

// Bounds of what the log says about the problems of one registry. Whatever is beyond them is listed all the same.
const (
	maxLines    = 20 // per linesWithin
	linesWithin = time.Minute
)

// limitQuiet is for how long nothing may have been refused because of a limit for the log to say so again.
const limitQuiet = time.Hour

// listingPatience is how long a listing may take before the log says so; it says so again whenever the time has doubled.
const listingPatience = time.Minute

// Bounds of what is kept of a plugin's words, in bytes.
const (
	maxID     = 1 << 10
	maxReason = 4 << 10
)

// refusal is why a resource was refused.
type refusal struct {
	reason string
	seen   uint64 // the listing that mentioned the resource last
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

// lineLocked says whether one more line about a problem may be logged.
func (r *Registry) lineLocked() bool { return r.lines.allow() }

// stateChangedLocked logs whether the registry can be followed, within the same bounds as problems.
func (r *Registry) stateChangedLocked() {
	if r.states.allow() {
		r.sayStateLocked()
	}
}

// sayStateLocked logs the present state, and how many changes were left out before it.
func (r *Registry) sayStateLocked() {
	var more []any
	if n := r.states.dropped; n > 0 {
		more, r.states.dropped = []any{"left_out", n}, 0
	}
	if r.status.Error != "" && r.status.Synced {
		r.log.Warn("the registry can not be followed; what is known is served", append(more, "err", r.status.Error)...)
	} else if r.status.Error != "" {
		r.log.Warn("the registry can not be followed; its types are held until its first listing is complete", append(more, "err", r.status.Error)...)
	} else {
		r.log.Info("the registry is followed again", more...)
	}
}

// tickLocked logs what only time brings about.
func (r *Registry) tickLocked() {
	r.summarizeLocked(false)
	if r.states.dropped > 0 && time.Since(r.states.since) >= linesWithin {
		r.stateChangedLocked()
	}
	if age := time.Since(r.status.ListingSince); r.status.Listing && age >= r.patience {
		r.log.Warn("the listing is still not complete; nothing is removed until it is", "for", age.Round(time.Second),
			"services", len(r.services), "instances", len(r.of))
		r.patience = 2 * age.Round(tickEvery)
	}
}

// summarizeLocked writes one line for those that were not written: at once for the first in a window, and at the end of a listing
// for all of it.
func (r *Registry) summarizeLocked(listed bool) {
	l := &r.lines
	switch {
	case l.dropped == 0:
	case listed, time.Since(l.since) >= linesWithin, !l.told && !r.status.Listing:
		r.log.Warn("more problems than are logged one by one", "problems", l.dropped, "all", r.status.Problems, "see", "/api/v1/registries")
		l.dropped, l.told = 0, true
	}
}

// refusalID is the id under which it is listed that a resource was refused. Without a collection its kind is unknown.
func refusalID(k key) string {
	if k.collection == "" {
		return "resource of unknown kind " + strconv.QuoteToASCII(clip(k.name, maxID))
	}
	return "resource " + k.collection + " " + clip(k.name, maxID)
}

// forgetRefusalLocked takes a resource off the list of what was refused.
func (r *Registry) forgetRefusalLocked(k key) {
	if len(r.own) > 0 {
		delete(r.own, refusalID(k))
		delete(r.own, refusalID(key{name: k.name}))
	}
}

// noteLocked lists what was refused, and takes what is accepted again off the list.
func (r *Registry) noteLocked(p *resource.Part, err error) {
	if err == nil {
		r.forgetRefusalLocked(key{p.Collection(), p.Name()})
		return
	}
	r.ingest.metrics.refused.WithLabelValues(r.name).Inc()
	text := clip(err.Error(), maxReason)
	var k key
	reason := text + "; refused, the last good one is kept"
	invalid, ok := errors.AsType[*resource.Invalid](err)
	if ok {
		k = key{invalid.Collection, invalid.Name}
	} else {
		k = key{p.Collection(), p.Name()}
	}
	if ok && invalid.Nameless() {
		r.nameless = r.listing
		reason = text + "; refused; as its name cannot be read, a listing with it removes nothing"
	} else {
		r.keepLocked(k)
	}
	l, isLimit := errors.AsType[*limitError](err)
	if isLimit {
		fresh := r.limit != l.field || time.Since(r.limitAt) >= limitQuiet
		r.limit, r.limitAt = l.field, time.Now()
		if fresh {
			r.log.Warn("the registry has reached a limit; what is beyond it is refused", "limit", l.field, "value", l.value)
		}
	}
	id := refusalID(k)
	have, listed := r.own[id]
	if !listed && len(r.own) >= maxProblems {
		r.unlisted++
		return
	}
	r.own[id] = refusal{reason, r.listing}
	if !isLimit && have.reason != reason && r.lineLocked() {
		r.log.Warn("resource refused", "id", id, "err", text)
	}
}

// keepLocked notes that a listing mentioned a resource, although in a form that was refused: its last good content stays. Without a
// collection every resource of the name stays, with an instance its service.
func (r *Registry) keepLocked(k key) {
	if k.collection == "" {
		for _, coll := range collection.All() {
			r.keepLocked(key{coll, k.name})
		}
		return
	}
	if pl := r.plain[k]; pl != nil {
		pl.seen = r.listing
	}
	switch k.collection {
	case collection.ServiceEntry:
		if s := r.services[k.name]; s != nil {
			s.seen = r.listing
		}
	case collection.WorkloadEntry:
		if s := r.of[k.name]; s != nil {
			s.seen = r.listing
			in := s.instances[k.name]
			in.seen = r.listing
			s.instances[k.name] = in
		}
	}
}

// problemLocked lists what the plugin says about something in the registry, and logs it if it is news.
func (r *Registry) problemLocked(id, reason string) {
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
	if before != reason && r.lineLocked() {
		r.log.Warn("problem in the registry", "id", id, "reason", reason)
	}
}

// forgetProblemsLocked empties the list before a new listing. What was on it is no news if it comes again.
func (r *Registry) forgetProblemsLocked() {
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

func (r *Registry) countProblemsLocked() {
	r.status.Problems = len(r.problems) + len(r.own) + len(r.shadowed) + min(r.unlisted, 1)
	r.ingest.metrics.problems.WithLabelValues(r.name).Set(float64(r.status.Problems))
}

// clip returns the beginning of a text that is too long.
func clip(text string, limit int) string {
	if len(text) <= limit {
		return text
	}
	return strings.ToValidUTF8(text[:limit], "") + "..."
}

// Problems returns what cannot be served as it is, by id.
func (r *Registry) Problems() []Problem {
	r.ingest.mu.Lock()
	defer r.ingest.mu.Unlock()
	out := make([]Problem, 0, len(r.problems)+len(r.own)+len(r.shadowed))
	for id, reason := range r.problems {
		out = append(out, Problem{id, reason})
	}
	for id, refused := range r.own {
		out = append(out, Problem{id, refused.reason})
	}
	if r.unlisted > 0 {
		out = append(out, Problem{"more", fmt.Sprintf("%d times since the listing began something was wrong that is not listed, "+
			"since there are %d problems of its kind already", r.unlisted, maxProblems)})
	}
	for k, owner := range r.shadowed {
		what, cure := "kept back", "Rename one of the two"
		switch {
		case k.collection == collection.WorkloadEntry && r.of[k.name] != nil:
			what = "kept back from sinks of the shape workload (inline, it is an endpoint of its service)"
			cure = "Give the service in one of the two another name (translate.name)"
		case k.collection == collection.ServiceEntry && r.services[k.name] != nil:
			cure = "If both are one service, one registry is enough; if not, give it another name and another host (translate.name, " +
				"translate.host); another namespace alone would show the mesh the host twice"
		}
		out = append(out, Problem{
			"resource " + k.collection + " " + k.name,
			fmt.Sprintf("registry %q, which comes first in the configuration, has a resource of the same name; %s. %s", owner, what, cure),
		})
	}
	slices.SortFunc(out, func(a, b Problem) int { return strings.Compare(a.ID, b.ID) })
	return out
}

// sweepRefusalsLocked takes off the list what the listing that is complete now did not mention.
func (r *Registry) sweepRefusalsLocked() {
	maps.DeleteFunc(r.own, func(_ string, refused refusal) bool { return refused.seen != r.listing })
}
