package plugin

import (
	"fmt"
	"hash/maphash"
	"slices"
	"strings"
	"unicode/utf8"
)

const (
	// maxProblems is the number of problems that are listed. Those beyond it are counted in a closing entry, with which there are
	// 10,000.
	maxProblems = 9_999
	// maxSpare is the number of problems beyond these that are kept, to be listed when others are solved.
	maxSpare = 10_000
	// maxCounted is the number of problems beyond these of which only a hash is kept, to count them.
	maxCounted = 100_000
	// moreID is the id of the closing entry.
	moreID = "more"

	maxIDBytes     = 512
	maxReasonBytes = 2 << 10
)

// problems is what cannot be used as it is: by id, what each source says of it. A source is whatever can be compared: several may
// have something to say about one id, and each takes back its own finding only.
type problems struct {
	found    map[string][]finding
	listed   map[string]struct{} // at most max of the ids in found
	unlisted map[string]struct{} // the rest, at most maxSpare
	counted  map[uint64]struct{} // what there was no room for, at most maxCounted
	more     bool                // nor is there in counted; from then on
	max      int
	seed     maphash.Seed
}

type finding struct {
	source any
	reason string
}

func newProblems() *problems {
	return &problems{
		found:    make(map[string][]finding),
		listed:   make(map[string]struct{}),
		unlisted: make(map[string]struct{}),
		counted:  make(map[uint64]struct{}),
		seed:     maphash.MakeSeed(),
		max:      maxProblems,
	}
}

// set records what source says of id, nothing if the reason is empty, and calls changed with each id whose text changed.
func (p *problems) set(source any, id, reason string, changed func(id string)) {
	id, reason = clip(id, maxIDBytes), clip(reason, maxReasonBytes)
	all := p.found[id]
	i := slices.IndexFunc(all, func(f finding) bool { return f.source == source })
	if len(all) == 0 && reason != "" && len(p.listed) >= p.max && len(p.unlisted) >= maxSpare {
		p.leaveOut(source, id)
		changed(moreID)
		return
	}
	if len(p.counted) > 0 {
		if h := p.hash(source, id); p.isCounted(h) {
			delete(p.counted, h)
			changed(moreID)
		}
	}
	switch {
	case i < 0 && reason == "", i >= 0 && all[i].reason == reason:
		return
	case i < 0:
		p.found[id] = append(all, finding{source, reason})
	case reason == "":
		p.found[id] = slices.Delete(all, i, i+1)
	default:
		all[i].reason = reason
	}

	if len(p.found[id]) == 0 {
		delete(p.found, id)
		if _, ok := p.unlisted[id]; ok {
			delete(p.unlisted, id)
			changed(moreID)
			return
		}
		delete(p.listed, id)
		changed(id)
		for next := range p.unlisted { // any of them
			delete(p.unlisted, next)
			p.listed[next] = struct{}{}
			changed(next)
			changed(moreID)
			break
		}
		return
	}
	if _, ok := p.listed[id]; ok {
		changed(id)
		return
	}
	if _, ok := p.unlisted[id]; ok {
		return
	}
	if len(p.listed) < p.max {
		p.listed[id] = struct{}{}
		changed(id)
		return
	}
	p.unlisted[id] = struct{}{}
	changed(moreID)
}

// leaveOut counts a finding that there is no room for.
func (p *problems) leaveOut(source any, id string) {
	h := p.hash(source, id)
	switch {
	case p.isCounted(h):
	case len(p.counted) < maxCounted:
		p.counted[h] = struct{}{}
	default:
		p.more = true
	}
}

func (p *problems) hash(source any, id string) uint64 {
	return maphash.Comparable(p.seed, struct {
		source any
		id     string
	}{source, id})
}

func (p *problems) isCounted(h uint64) bool {
	_, ok := p.counted[h]
	return ok
}

// wants reports whether findings were left out and there is room again: one that is set again is kept then.
func (p *problems) wants() bool {
	return (len(p.counted) > 0 || p.more) && len(p.unlisted) < maxSpare
}

// shows reports whether there is a text for an id.
func (p *problems) shows(id string) bool {
	if id == moreID {
		return len(p.unlisted)+len(p.counted) > 0 || p.more
	}
	_, ok := p.listed[id]
	return ok
}

// text returns what is shown of an id, "" if it is not listed.
func (p *problems) text(id string) string {
	switch n := len(p.unlisted) + len(p.counted); {
	case !p.shows(id):
		return ""
	case id == moreID && p.more:
		return fmt.Sprintf("and more than %d more; those beyond are listed only once others are solved and they are found again", n)
	case id == moreID:
		return fmt.Sprintf("and %d more", n)
	}
	reasons := make([]string, 0, 1)
	for _, f := range p.found[id] {
		reasons = append(reasons, f.reason)
	}
	slices.Sort(reasons)
	return clip(strings.Join(slices.Compact(reasons), "; "), maxReasonBytes)
}

// each calls f with every id that is shown.
func (p *problems) each(f func(id string)) {
	for id := range p.listed {
		f(id)
	}
	if p.shows(moreID) {
		f(moreID)
	}
}

// clip makes s valid UTF-8, which a message on the wire must be, of at most limit bytes.
func clip(s string, limit int) string {
	s = strings.ToValidUTF8(s, "\uFFFD")
	if len(s) <= limit {
		return s
	}
	const dots = "..."
	cut := limit - len(dots)
	for cut > 0 && !utf8.RuneStart(s[cut]) {
		cut--
	}
	return s[:cut] + dots
}
