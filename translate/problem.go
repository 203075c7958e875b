package translate

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"
)

// Problem is something in the registry that cannot be used unchanged.
type Problem struct {
	// ID identifies the subject, unique within the registry: "service web",
	// "instance web/web-1".
	ID string
	// Reason describes the problem, what was done and the remedy.
	Reason string
}

const (
	// maxProblems bounds the problems of a service, and those of its instances.
	// The rest is counted.
	maxProblems = 100
	// maxQuoted bounds how much of a registry's text a problem quotes, in
	// bytes.
	maxQuoted = 120
)

// finding is a problem before it is listed.
type finding struct {
	Problem
	// once keeps only the first finding of the ID, for findings that instances
	// share.
	once bool
}

// leftOut is what is not served although nothing is wrong with it: the registry
// takes an instance out of traffic, or a filter of the configuration excludes
// it.
type leftOut struct {
	list []Problem // at most maxProblems
	more int
}

func (l *leftOut) add(id, reason string) {
	if len(l.list) >= maxProblems {
		l.more++
		return
	}
	l.list = append(l.list, Problem{id, reason})
}

// problems returns the bounded list, sorted by ID.
func (l *leftOut) problems(c *call) []Problem {
	if l.more > 0 {
		l.list = append(l.list, Problem{
			"service " + c.key() + " more left out",
			fmt.Sprintf("%d more instances of this service are left out and not listed", l.more),
		})
	}
	slices.SortFunc(l.list, func(a, b Problem) int { return cmp.Or(cmp.Compare(a.ID, b.ID), cmp.Compare(a.Reason, b.Reason)) })
	return slices.CompactFunc(l.list, func(a, b Problem) bool { return a.ID == b.ID })
}

// list converts findings to problems: sorted by ID, with the reasons of an ID
// joined, and bounded. The order of findings of one ID must depend on content
// only.
func list(c *call, findings []finding) []Problem {
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
			ID:     "service " + c.key() + " more problems",
			Reason: fmt.Sprintf("%d more problems of this service and its instances are not listed; solve the listed ones first", more),
		})
	}
	slices.SortFunc(all, func(a, b Problem) int { return cmp.Compare(a.ID, b.ID) })
	return all
}

// quote returns s quoted, escaped and clipped.
func quote(s string) string {
	if len(s) > maxQuoted {
		return strconv.Quote(s[:cutAt(s, maxQuoted)]) + "..."
	}
	return strconv.Quote(s)
}

// plain returns s in a form for a problem's ID: valid UTF-8 and clipped. A hash
// keeps clipped texts distinct.
func plain(s string) string {
	if len(s) > 2*maxQuoted {
		s = s[:cutAt(s, 2*maxQuoted)] + "..." + shortHash(cutHash, s)
	}
	return strings.ToValidUTF8(s, string(utf8.RuneError))
}

// cutAt returns the largest length up to n that ends s between characters.
func cutAt(s string, n int) int {
	for n > 0 && !utf8.RuneStart(s[n]) {
		n--
	}
	return n
}
