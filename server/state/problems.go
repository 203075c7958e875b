package state

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/isthmus-mesh/isthmus/internal/clip"
	"github.com/isthmus-mesh/isthmus/plugin/collection"
)

// Bounds on log lines about the problems of one registry. All problems are
// listed regardless.
const (
	maxLines    = 20 // per linesWithin
	linesWithin = time.Minute
)

// limitQuiet is the time without refusals by a limit after which the next one
// is logged again.
const limitQuiet = time.Hour

// listingPatience is the duration of a listing after which it is logged, and
// again each time the duration has doubled.
const listingPatience = time.Minute

// Bounds on what a plugin can make the server store.
const (
	maxProblems = 10_000  // per list
	maxID       = 1 << 10 // bytes
	maxReason   = 4 << 10 // bytes
)

// Problem describes something that cannot be served.
type Problem struct {
	ID     string `json:"id"`
	Reason string `json:"reason"`
	// Field is the configuration field, as named in the reason, that resolves
	// the problem: "translate.host". Empty if only the registry can.
	Field string `json:"field,omitempty"`
}

// fieldInReason matches the fields that a reason names.
var fieldInReason = regexp.MustCompile(`\b(?:translate|config|limits|owns)(?:\.[a-z_]+(?:\[[0-9]+\])?)+`)

// fieldOf returns the last field that a reason names, without list indexes, or
// "".
func fieldOf(reason string) string {
	all := fieldInReason.FindAllString(reason, -1)
	if len(all) == 0 {
		return ""
	}
	return placeInList.ReplaceAllString(all[len(all)-1], "")
}

var placeInList = regexp.MustCompile(`\[[0-9]+\]`)

// Kinds of problems other than configuration fields.
const (
	ofRegistry = "registry" // resolved only in the registry
	ofOthers   = "others"   // fields beyond maxFields
	ofRefusal  = "refused"
	ofShadow   = "name taken"
	ofNetwork  = "addresses.cidr"
)

// maxFields bounds the fields by which the problems of one registry are
// counted.
const maxFields = 100

// kinds counts what a plugin reports by kind.
type kinds map[string]int

// count adds delta to the number of the kind of a reason; an empty one is none.
func (k kinds) count(reason string, delta int) {
	if reason == "" {
		return
	}
	kind := cmp.Or(fieldOf(reason), ofRegistry)
	if _, known := k[kind]; !known && len(k) >= maxFields {
		kind = ofOthers
	}
	k[kind] += delta
}

// reset sets all numbers to 0, so that their series remain.
func (k kinds) reset() {
	for kind := range k {
		k[kind] = 0
	}
}

// leftOut is what a plugin does not send although nothing is wrong with it.
type leftOut struct {
	list map[string]string // reason by id, at most maxProblems
	by   kinds
	more bool // something was beyond the limit
}

func newLeftOut() leftOut { return leftOut{list: make(map[string]string), by: make(kinds)} }

// set lists an id, or removes it if the reason is empty.
func (l *leftOut) set(id, reason string) {
	id, reason = clip.Text(id, maxID), clip.Text(reason, maxReason)
	before, listed := l.list[id]
	if !listed && reason != "" && len(l.list) >= maxProblems {
		l.more = true
		return
	}
	l.by.count(before, -1)
	l.by.count(reason, 1)
	if l.list[id] = reason; reason == "" {
		delete(l.list, id)
	}
}

// forget clears the list before a new listing.
func (l *leftOut) forget() {
	clear(l.list)
	l.by.reset()
	l.more = false
}

// Skipped returns what the plugin does not send although nothing is wrong with
// it, as the registry or the configuration intends that, ordered by id.
func (r *Registry) Skipped() []Problem {
	r.db.apply.Lock()
	defer r.db.apply.Unlock()
	out := make([]Problem, 0, len(r.leftOut.list))
	for id, reason := range r.leftOut.list {
		out = append(out, Problem{ID: id, Reason: reason, Field: fieldOf(reason)})
	}
	if r.leftOut.more {
		out = append(out, Problem{ID: "more", Reason: fmt.Sprintf("more is skipped than the %d that are listed", maxProblems)})
	}
	slices.SortFunc(out, func(a, b Problem) int { return strings.Compare(a.ID, b.ID) })
	return out
}

// refusal records why a resource was refused.
type refusal struct {
	reason string
	seen   uint32 // last listing with the resource
}

// lines limits and counts log lines.
type lines struct {
	since   time.Time // start of the window
	count   int       // lines in the window
	dropped int       // since the last summary
	told    bool      // summary logged in the window
}

// allow reports whether another line may be logged.
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

// line reports whether another line about a problem may be logged. The caller
// holds apply, as for all of this file.
func (r *Registry) line() bool { return r.lines.allow() }

// stateChanged logs the connection state of the registry, rate-limited like
// problems.
func (r *Registry) stateChanged() {
	if r.states.allow() {
		r.sayState()
	}
}

// sayState logs the current state and the number of changes not logged before
// it.
func (r *Registry) sayState() {
	var more []any
	if n := r.states.dropped; n > 0 {
		more, r.states.dropped = []any{"not_logged", n}, 0
	}
	switch {
	case r.status.Error != "" && r.status.Listed():
		r.log.Warn("the registry can not be followed; what is known is served", append(more, "err", r.status.Error)...)
	case r.status.Error != "" && r.released:
		r.log.Warn("the registry can not be followed; its types are served without it", append(more, "err", r.status.Error)...)
	case r.status.Error != "":
		r.log.Warn("the registry can not be followed; its types wait for its first listing",
			append(more, "err", r.status.Error, "waiting_since", r.begun, "waiting", r.holds())...)
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
	if r.states.dropped > 0 && time.Since(r.states.since) >= linesWithin {
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
	l := &r.lines
	switch {
	case l.dropped == 0:
	case listed, time.Since(l.since) >= linesWithin, !l.told && !r.status.Listing:
		r.log.Warn("more problems than are logged one by one", "problems", l.dropped, "all", r.status.ProblemCount, "see", "/api/v1/registries")
		l.dropped, l.told = 0, true
	}
}

// refusalID returns the id of a refused resource in the list of problems. An
// empty collection means that the kind is unknown.
func refusalID(coll, name string) string {
	name = clip.Text(name, maxID)
	if coll == "" {
		return "resource of unknown kind " + strconv.QuoteToASCII(name)
	}
	return "resource " + coll + " " + name
}

// forgetRefusal removes a resource from the refused ones.
func (r *Registry) forgetRefusal(coll, name string) {
	if len(r.refused) > 0 {
		r.db.book.change(func() {
			delete(r.refused, refusalID(coll, name))
			delete(r.refused, refusalID("", name))
		})
	}
}

// note records a refused resource and removes an accepted one from the refused
// ones.
func (r *Registry) note(u *upsert) {
	if u.err == nil {
		r.forgetRefusal(u.part.Collection, u.part.Name)
		return
	}
	r.db.metrics.refused.WithLabelValues(r.name).Inc()
	text := clip.Text(u.err.Error(), maxReason)
	reason := text + "; rejected, the last good one is served"
	coll, name := u.id()
	_, isForeign := errors.AsType[*foreignError](u.err)
	if isForeign {
		// One from before the rule goes with the next complete listing.
		reason = text + "; rejected"
	} else if u.isNameless() {
		r.nameless = r.listing
		reason = text + "; rejected; as its name cannot be read, a listing with it removes nothing"
	} else {
		r.keep(coll, name)
	}
	id := refusalID(coll, name)
	l, isLimit := errors.AsType[*limitError](u.err)
	if isLimit {
		fresh := r.limit != l.field || time.Since(r.limitAt) >= limitQuiet
		r.limit, r.limitAt = l.field, time.Now()
		if fresh {
			r.log.Warn("the registry has reached a limit; what is beyond it is rejected", "limit", l.field, "value", l.value)
		}
	}
	have, listed := r.refused[id]
	if !listed && len(r.refused) >= maxProblems {
		r.unlisted++
		return
	}
	r.db.book.change(func() { r.refused[id] = refusal{reason, r.listing} })
	if !isLimit && have.reason != reason && r.line() {
		r.log.Warn("resource rejected", "id", id, "err", text)
	}
}

// keepAll marks a resource that the plugin cannot send as listed, like keep. A
// service retains all its instances. Without a name, any resource may be meant.
func (r *Registry) keepAll(coll, name string) {
	if name == "" {
		r.nameless = r.listing
		return
	}
	r.keep(coll, name)
	if coll == "" || coll == collection.ServiceEntry {
		if c := r.db.tables[collection.ServiceEntry].claim(name, r); c != nil && c.parts != nil {
			c.of.kept = r.listing
			if c.of.keptCount > 0 {
				c.of.each(r.unkeep)
			}
		}
	}
}

// keep marks a resource as listed although its new content was refused: the
// last good content stays. Without a collection this applies to every resource
// of the name, and for an instance to its service.
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
	if c := t.claim(name, r); c != nil {
		c.seen = r.listing
		r.unkeep(c)
		if c.IsInstance() {
			e := c.of.entry()
			e.seen = r.listing
			r.unkeep(e)
		}
	}
}

// problem lists a problem reported by the plugin, and logs it if it is new.
func (r *Registry) problem(id, reason string) {
	id, reason = clip.Text(id, maxID), clip.Text(reason, maxReason)
	if reason == "" {
		r.reasons.count(r.problems[id], -1)
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
	r.reasons.count(r.problems[id], -1)
	r.reasons.count(reason, 1)
	r.problems[id] = reason
	if before != reason && r.line() {
		r.log.Warn("problem in the registry", "id", id, "reason", reason)
	}
}

// forgetProblems clears the list before a new listing. Problems that were
// listed before are not logged again.
func (r *Registry) forgetProblems() {
	known := r.problems
	if r.status.Listing { // the last listing was incomplete and may lack earlier problems
		for id, reason := range r.known {
			if _, have := known[id]; !have && len(known) < maxProblems {
				known[id] = reason
			}
		}
	}
	r.known, r.problems, r.unlisted = known, make(map[string]string), 0
	r.reasons.reset()
	r.leftOut.forget()
}

func (r *Registry) countProblems() {
	r.status.ProblemCount = len(r.problems) + len(r.refused) + r.shadowed + r.disputed + r.unaddressed + min(r.unlisted, 1)
	r.status.SkippedCount = len(r.leftOut.list)
	r.db.metrics.setProblems(r)
}

// sweepRefusals removes the refusals that the completed listing did not
// mention.
func (r *Registry) sweepRefusals() {
	r.db.book.change(func() {
		maps.DeleteFunc(r.refused, func(_ string, refused refusal) bool { return refused.seen != r.listing })
	})
}

// Problems returns what cannot be served, ordered by id.
func (r *Registry) Problems() []Problem {
	out := r.unsortedProblems()
	for i := range out {
		if out[i].Field == "" {
			out[i].Field = fieldOf(out[i].Reason)
		}
	}
	slices.SortFunc(out, func(a, b Problem) int { return strings.Compare(a.ID, b.ID) })
	return out
}

func (r *Registry) unsortedProblems() []Problem {
	d := r.db
	d.apply.Lock()
	defer d.apply.Unlock()
	out := make([]Problem, 0, len(r.problems)+len(r.refused)+r.shadowed)
	for id, reason := range r.problems {
		out = append(out, Problem{ID: id, Reason: reason})
	}
	for id, refused := range r.refused {
		out = append(out, Problem{ID: id, Reason: refused.reason})
	}
	if r.unlisted > 0 {
		out = append(out, Problem{ID: "more", Reason: fmt.Sprintf("%d times since the listing began something was wrong that is not listed, "+
			"since there are %d problems of its kind already", r.unlisted, maxProblems)})
	}
	if r.shadowed+r.disputed > 0 {
		for id, v := range d.verdicts.now {
			if id.registry != r {
				continue
			}
			if reason := id.problem(v, d.rules); reason != "" {
				out = append(out, Problem{ID: "resource " + collection.ServiceEntry + " " + id.name, Reason: reason, Field: "conflicts"})
			}
		}
		r.claims(func(t *table, c *Record) {
			if !c.marked(isShadowed) || t.name == collection.ServiceEntry {
				return
			}
			what, cure := "shadowed", "Rename one of the two"
			if c.IsInstance() {
				what = "not served to sinks of the shape workload (inline, it is an endpoint of its service)"
				cure = "Give the service in one of the two another name (translate.name)"
			}
			out = append(out, Problem{
				ID: "resource " + t.name + " " + c.Name(),
				Reason: fmt.Sprintf("registry %q, which comes first in the configuration, has a resource of the same name; %s. %s",
					t.current(c.Name()).kind.registry.name, what, cure),
			})
		})
	}
	if r.unaddressed > 0 {
		r.claims(func(t *table, c *Record) {
			if t.name == collection.ServiceEntry && c.parts != nil && c.of.unaddressed {
				out = append(out, Problem{
					ID: "host " + c.of.host, Field: ofNetwork,
					Reason: "is served without an address, as other hosts have the two that it hashes to; choose a wider network with addresses.cidr",
				})
			}
		})
	}
	return out
}
