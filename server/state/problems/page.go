package problems

import (
	"fmt"
	"slices"
	"strings"

	"github.com/isthmus-mesh/isthmus/plugin/collection"
)

// Sorted orders problems by id, and sets the fields of those without.
func Sorted(all []Problem) []Problem {
	for i := range all {
		if all[i].Field == "" {
			all[i].Field = FieldOf(all[i].Reason)
		}
	}
	slices.SortFunc(all, func(a, b Problem) int { return strings.Compare(a.ID, b.ID) })
	return all
}

// more is the problem that not all are listed.
func more(format string, args ...any) Problem {
	return Problem{ID: "more", Reason: fmt.Sprintf(format, args...)}
}

// Skipped returns what is not meant to be served.
func (l *List) Skipped() []Problem {
	out := l.append(nil)
	if l.Beyond > 0 {
		out = append(out, more("more is skipped than the %d that are listed", Max))
	}
	return Sorted(out)
}

// Problems returns what a plugin reports, and what is rejected.
func (l *List) Problems(rejected Rejections) []Problem {
	out := l.append(make([]Problem, 0, l.Len()+len(rejected)))
	for id, r := range rejected {
		out = append(out, Problem{ID: id, Reason: r.Reason})
	}
	if l.Beyond > 0 {
		out = append(out, more("%d times since the listing began something was wrong that is not listed, "+
			"since there are %d problems of its kind already", l.Beyond, Max))
	}
	return out
}

// Shadowed is the problem of a resource whose name another registry owns.
func Shadowed(coll, name, owner string, isInstance bool) Problem {
	what, cure := "shadowed", "Rename one of the two"
	if isInstance {
		what = "not served to sinks of the shape workload (inline, it is an endpoint of its service)"
		cure = "Give the service in one of the two another name (translate.name)"
	}
	return Problem{
		ID:     "resource " + coll + " " + name,
		Reason: fmt.Sprintf("registry %q, which comes first in the configuration, has a resource of the same name; %s. %s", owner, what, cure),
	}
}

// InConflict is the problem of a ServiceEntry whose host another one has.
func InConflict(name, reason string) Problem {
	return Problem{ID: "resource " + collection.ServiceEntry + " " + name, Reason: reason, Field: "conflicts"}
}

// Unaddressed is the problem of a host without an address.
func Unaddressed(host string) Problem {
	return Problem{
		ID: "host " + host, Field: OfNetwork,
		Reason: "is served without an address, as other hosts have the two that it hashes to; choose a wider network with addresses.cidr",
	}
}
