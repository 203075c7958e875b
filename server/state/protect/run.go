package protect

import (
	"slices"
	"time"
)

// Run is what was removed within [Window] and not replaced, of the services of
// a registry or of the endpoints of a service. An addition stands for a removal
// before it, or for one within [Overlap] after it: a rolling restart leaves
// nothing behind. The zero Run is empty.
type Run[T any] struct {
	gone []gone[T]   // oldest first
	came []time.Time // additions that stand for removals to come, oldest first
}

// Overlap is how long something and what replaces it may both be there.
const Overlap = 2 * time.Minute

type gone[T any] struct {
	what T
	at   time.Time
}

// Remove notes a removal.
func (r *Run[T]) Remove(what T, now time.Time) {
	if r.Expire(now); len(r.came) > 0 {
		r.came = r.came[1:]
		return
	}
	r.gone = append(r.gone, gone[T]{what, now})
}

// Add notes an addition: of the same as was removed, or else of what stands for
// the oldest removal.
func (r *Run[T]) Add(same func(T) bool, now time.Time) {
	if r.Expire(now); len(r.gone) == 0 {
		r.came = append(r.came, now)
		return
	}
	if n := slices.IndexFunc(r.gone, func(g gone[T]) bool { return same(g.what) }); n > 0 {
		r.gone = slices.Delete(r.gone, n, n+1)
	} else {
		r.forget()
	}
}

// Expire drops what is too old, and reports whether anything is left.
func (r *Run[T]) Expire(now time.Time) (left bool) {
	for len(r.gone) > 0 && now.Sub(r.gone[0].at) > Window {
		r.forget()
	}
	for len(r.came) > 0 && now.Sub(r.came[0]) > Overlap {
		r.came = r.came[1:]
	}
	return len(r.gone)+len(r.came) > 0
}

// forget drops the oldest removal. Of very many, each costs the same.
func (r *Run[T]) forget() {
	r.gone[0] = gone[T]{}
	r.gone = r.gone[1:]
}

// Len returns the number of removals after n more, without a change of the run.
func (r *Run[T]) Len(n int) int {
	if r == nil {
		return n
	}
	return len(r.gone) + max(0, n-len(r.came))
}

// Take empties the run, and returns what was removed, the newest first.
func (r *Run[T]) Take() (all []T) {
	for _, g := range slices.Backward(r.gone) {
		all = append(all, g.what)
	}
	*r = Run[T]{}
	return all
}
