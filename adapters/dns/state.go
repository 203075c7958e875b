package dns

import (
	"container/heap"
	"fmt"
	"net/netip"
	"strings"
	"time"

	"github.com/isthmus-mesh/isthmus/plugin"
	"github.com/isthmus-mesh/isthmus/plugin/registry"
)

// service is a service and the names that make it.
type service struct {
	key     registry.Key
	names   []Name // with defaults
	changed bool   // the names were, since the last call to the catalog
	needs   map[question]*query
	shown   []registry.Instance // in the catalog
	exists  bool                // in the catalog
	// unsettled is since when not everything is known; zero if it is.
	unsettled time.Time
	problem   string
	arrived   func() // its part of the first listing
}

// query is a question that services need the answer to.
type query struct {
	question

	users   map[*service]bool
	due     time.Time
	index   int  // in the queue; -1 while under way
	dropped bool // no service needs it
	retry   plugin.Backoff
	failed  bool // the last attempt had no answer

	// known is the last answer with records, until another proves to hold.
	known *answer
	// kind is what the last answer said, if answered.
	kind     kind
	answered bool
	// since is when the first of answers in a row came that say that there is
	// nothing; zero if the last one does not. confirmed reports that they did
	// so for long enough, in which the time of failures does not count: stopped
	// is since when there is no answer, and paused the sum before.
	since     time.Time
	stopped   time.Time
	paused    time.Duration
	confirmed bool
}

// take applies an answer, and reports whether anything changed. An unproven one
// must not come to a query that knows records.
func (q *query) take(a *answer, now time.Time, grace time.Duration) (changed bool) {
	before := *q
	q.failed, q.answered, q.kind = false, true, a.kind
	switch a.kind {
	case found:
		q.since, q.paused, q.confirmed = time.Time{}, 0, false
		changed = q.known == nil || !q.known.equal(a)
		q.known = a
	case unproven:
		q.since, q.paused, q.confirmed = time.Time{}, 0, false
	default:
		if q.since.IsZero() {
			q.since = now
		}
		if !q.stopped.IsZero() {
			q.paused += now.Sub(q.stopped)
		}
		if q.confirmed = q.confirmed || now.Sub(q.since)-q.paused >= grace; q.confirmed {
			q.known = nil
		}
	}
	q.stopped = time.Time{}
	return changed || q.answered != before.answered || q.kind != before.kind || q.confirmed != before.confirmed || q.since != before.since || (q.known == nil) != (before.known == nil)
}

// fail records that there was no answer: the clock of remove_grace stops.
func (q *query) fail(now time.Time) {
	q.failed = true
	if !q.since.IsZero() && q.stopped.IsZero() {
		q.stopped = now
	}
}

// pair is what is known of a name by its queries, of one type or of A and AAAA.
type pair struct {
	queries []*query
	addrs   []netip.Addr
	known   *answer // of the last query that knows records
}

func (p *pair) add(q *query) {
	p.queries = append(p.queries, q)
	if q.known != nil {
		p.known = q.known
		p.addrs = append(p.addrs, q.known.addrs...)
	}
}

// settled reports whether enough is known to remove what is not: there are
// records of one type, and an answer about the other; or it is certain that
// there are none.
func (p *pair) settled() bool {
	for _, q := range p.queries {
		if p.known != nil && !q.answered || p.known == nil && !q.confirmed {
			return false
		}
	}
	return true
}

// gone reports whether it is certain that the name does not exist.
func (p *pair) gone() bool {
	for _, q := range p.queries {
		if !q.confirmed || q.kind != noName {
			return false
		}
	}
	return true
}

// problem returns what is wrong with the name, or "".
func (p *pair) problem(grace time.Duration) string {
	for _, q := range p.queries {
		if q.known != nil && q.kind == found {
			if q.known.odd > 0 {
				return fmt.Sprintf("%d %s records have no address or target that could be used, and are left out", q.known.odd, strings.Fields(q.String())[1])
			}
			return ""
		}
	}
	for _, q := range p.queries {
		switch {
		case !q.answered || q.kind == found:
		case q.known != nil:
			return fmt.Sprintf("%s since %s; what was known is kept for %v (remove_grace)", q.kind, q.since.UTC().Format(time.RFC3339), grace)
		case q.kind == unproven:
			return unproven.String()
		default:
			return q.kind.String() + "; correct the name, or create it"
		}
	}
	return ""
}

// queue is a heap of queries by the time at which they are due.
type queue []*query

var _ heap.Interface = (*queue)(nil)

// Len implements heap.Interface.
func (q queue) Len() int { return len(q) }

// Less implements heap.Interface.
func (q queue) Less(i, j int) bool { return q[i].due.Before(q[j].due) }

// Swap implements heap.Interface.
func (q queue) Swap(i, j int) {
	q[i], q[j] = q[j], q[i]
	q[i].index, q[j].index = i, j
}

// Push implements heap.Interface.
func (q *queue) Push(x any) {
	e := x.(*query) //nolint:forcetypeassert // nothing else is in the queue
	e.index = len(*q)
	*q = append(*q, e)
}

// Pop implements heap.Interface.
func (q *queue) Pop() any {
	old := *q
	e := old[len(old)-1]
	old[len(old)-1] = nil
	*q = old[:len(old)-1]
	e.index = -1
	return e
}
