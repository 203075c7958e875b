package problems

import (
	"maps"

	"github.com/isthmus-mesh/isthmus/internal/clip"
)

// Bounds on what a plugin can make the server store.
const (
	Max       = 10_000  // per list
	MaxID     = 1 << 10 // bytes
	MaxReason = 4 << 10 // bytes
)

// List has reasons by id.
type List struct {
	By     Kinds
	Beyond int // times that something was beyond Max

	reasons map[string]string
	known   map[string]string // those before the current listing
}

// NewList returns an empty list.
func NewList() List { return List{By: make(Kinds), reasons: make(map[string]string)} }

// Len returns the number of ids.
func (l *List) Len() int { return len(l.reasons) }

// Set lists an id, or removes it if the reason is empty. It reports whether the
// reason is another than the one that the id has, or had before the last
// [List.Relist].
func (l *List) Set(id, reason string) (fresh bool) {
	id, reason = clip.Text(id, MaxID), clip.Text(reason, MaxReason)
	before, listed := l.reasons[id]
	if reason == "" {
		l.By.count(before, -1)
		delete(l.reasons, id)
		delete(l.known, id)
		return false
	}
	if !listed && len(l.reasons) >= Max {
		l.Beyond++
		return false
	}
	l.By.count(before, -1)
	l.By.count(reason, 1)
	l.reasons[id] = reason
	if !listed {
		before = l.known[id]
	}
	return before != reason
}

// Relist empties the list before a new listing, and remembers what it had. If
// the one before is incomplete, it may lack what was known before that.
func (l *List) Relist(incomplete bool) {
	known := l.reasons
	if incomplete {
		for id, reason := range l.known {
			if _, have := known[id]; !have && len(known) < Max {
				known[id] = reason
			}
		}
	}
	l.known, l.reasons = known, make(map[string]string)
	l.Clear()
}

// Clear empties the list.
func (l *List) Clear() {
	clear(l.reasons)
	l.By.reset()
	l.Beyond = 0
}

func (l *List) append(out []Problem) []Problem {
	for id, reason := range l.reasons {
		out = append(out, Problem{ID: id, Reason: reason})
	}
	return out
}

// Rejection is why a resource was rejected.
type Rejection struct {
	Reason string
	Seen   uint32 // last listing with the resource
}

// Rejections are the rejected resources by [ResourceID].
type Rejections map[string]Rejection

// Forget removes a resource of a collection, or of an unknown one.
func (r Rejections) Forget(coll, name string) {
	delete(r, ResourceID(coll, name))
	delete(r, ResourceID("", name))
}

// Sweep removes what a complete listing does not mention.
func (r Rejections) Sweep(listing uint32) {
	maps.DeleteFunc(r, func(_ string, refused Rejection) bool { return refused.Seen != listing })
}

// Set lists a rejection; ok is false if there are too many. It is fresh if it
// has another reason than before.
func (r Rejections) Set(id, reason string, seen uint32) (fresh, ok bool) {
	have, listed := r[id]
	if !listed && len(r) >= Max {
		return false, false
	}
	r[id] = Rejection{Reason: reason, Seen: seen}
	return have.Reason != reason, true
}
