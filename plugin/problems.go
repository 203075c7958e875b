package plugin

import (
	"fmt"
	"hash/maphash"
	"slices"
	"strings"

	"github.com/isthmus-mesh/isthmus/internal/clip"
)

const (
	// maxProblems bounds the listed problems. The rest is counted in a closing
	// entry, the 10,000th.
	maxProblems = 9_999
	// maxSpare bounds the unlisted problems that are retained, to be listed
	// when others are resolved.
	maxSpare = 10_000
	// maxCounted bounds the further problems of which only a hash is retained,
	// for counting.
	maxCounted = 100_000
	// moreID is the id of the closing entry.
	moreID = "more"

	maxIDBytes     = 512
	maxReasonBytes = 2 << 10
)

// problems holds the problems: by id, the reason that each source gives. A
// source is any comparable value; sources may share an id, and each clears only
// its own reason.
type problems struct {
	found    map[string][]finding
	listed   map[string]struct{} // at most max of the ids in found
	unlisted map[string]struct{} // the rest, at most maxSpare
	counted  map[uint64]struct{} // hashes of what exceeds the above, at most maxCounted
	more     bool                // counted overflowed; permanent
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

// set records the reason that source gives for id, or clears it if the reason
// is empty. It calls changed with each id whose text changed.
func (p *problems) set(source any, id, reason string, changed func(id string)) {
	id, reason = clip.Text(id, maxIDBytes), clip.Text(redact(reason), maxReasonBytes)
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

// leaveOut counts a finding that exceeds the bounds.
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

// wants reports whether findings were left out and there is room again, so that
// one that is set again is retained.
func (p *problems) wants() bool {
	return (len(p.counted) > 0 || p.more) && len(p.unlisted) < maxSpare
}

// shows reports whether id has a text.
func (p *problems) shows(id string) bool {
	if id == moreID {
		return len(p.unlisted)+len(p.counted) > 0 || p.more
	}
	_, ok := p.listed[id]
	return ok
}

// text returns the text shown for id, or "" if it is not listed.
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
	return clip.Text(strings.Join(slices.Compact(reasons), "; "), maxReasonBytes)
}

// each calls f with every id shown.
func (p *problems) each(f func(id string)) {
	for id := range p.listed {
		f(id)
	}
	if p.shows(moreID) {
		f(moreID)
	}
}
