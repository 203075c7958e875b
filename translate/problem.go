package translate

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"
)

// Problem is something in the registry that cannot be used as it is.
type Problem struct {
	// ID says what it is about, unique within the registry: "service web", "instance web/web-1".
	ID string
	// Reason says what is wrong, what was done about it, and how to mend it.
	Reason string
}

const (
	// maxProblems bounds the problems of one service's own, and those of its instances, each. What is beyond is counted.
	maxProblems = 100
	// maxQuoted is how much of a registry's text a problem repeats, in bytes.
	maxQuoted = 120
)

// finding is a problem on its way into the list.
type finding struct {
	Problem
	// once keeps the first finding of the ID only: several instances say the same.
	once bool
}

// list sorts findings into problems: by ID, reasons of one ID joined, and not too many. Findings of one ID must come in an
// order that depends on nothing but content.
func list(service string, findings []finding) []Problem {
	if len(findings) == 0 {
		return nil
	}
	slices.SortStableFunc(findings, func(a, b finding) int { return cmp.Compare(a.ID, b.ID) })
	var all, instances []Problem
	for i := 0; i < len(findings); {
		p := findings[i].Problem
		reasons := []string{p.Reason}
		j := i + 1
		for ; j < len(findings) && findings[j].ID == p.ID; j++ {
			if r := findings[j].Reason; !findings[j].once && len(reasons) < 5 && !slices.Contains(reasons, r) {
				reasons = append(reasons, r)
			}
		}
		i = j
		p.Reason = strings.Join(reasons, "; ")
		if strings.HasPrefix(p.ID, "instance ") {
			instances = append(instances, p)
		} else {
			all = append(all, p)
		}
	}
	more := max(0, len(all)-maxProblems) + max(0, len(instances)-maxProblems)
	all = append(all[:min(len(all), maxProblems)], instances[:min(len(instances), maxProblems)]...)
	if more > 0 {
		all = append(all, Problem{
			ID:     "service " + service + " more problems",
			Reason: fmt.Sprintf("%d more problems of this service and its instances are not listed; mend the ones that are", more),
		})
	}
	slices.SortFunc(all, func(a, b Problem) int { return cmp.Compare(a.ID, b.ID) })
	return all
}

// quote returns s in quotes, escaped and not too long.
func quote(s string) string {
	if len(s) > maxQuoted {
		return strconv.Quote(s[:cutAt(s, maxQuoted)]) + "..."
	}
	return strconv.Quote(s)
}

// plain returns s fit for a problem's ID: valid UTF-8 and not too long. Long texts stay apart by a hash.
func plain(s string) string {
	if len(s) > 2*maxQuoted {
		s = s[:cutAt(s, 2*maxQuoted)] + "..." + shortHash(cutHash, s)
	}
	return strings.ToValidUTF8(s, string(utf8.RuneError))
}

// cutAt returns the largest length up to n at which s can be cut between characters.
func cutAt(s string, n int) int {
	for n > 0 && !utf8.RuneStart(s[n]) {
		n--
	}
	return n
}
