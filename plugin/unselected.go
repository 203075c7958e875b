package plugin

import (
	"fmt"
	"maps"
	"slices"
	"strings"
)

const (
	// maxUnselected bounds the names that an Unselected counts.
	maxUnselected = 100_000
	// unselectedShown is how many names are shown, the first in order.
	unselectedShown = 5
)

// Unselected counts the names that a [Selection] leaves out, and lists them as
// left out by intention: one entry for include and one for exclude, with their
// number and the first few names. The zero value has none. Start with a new one
// for each complete listing, so that it has no names of the past. It is not
// safe for concurrent use.
type Unselected struct {
	include, exclude unselected
}

// unselected are the names that one list leaves out.
type unselected struct {
	names map[string]struct{} // at most maxUnselected
	shown []string            // the first of them, sorted
	more  bool                // names were not counted
}

// Match is [Selection].Match, and notes a name that is left out.
func (u *Unselected) Match(s Selection, name string) bool {
	switch {
	case s.Match(name):
		return true
	case s.Exclude.Match(name):
		u.exclude.add(name)
	default:
		u.include.add(name)
	}
	return false
}

// Forget removes a name that the registry no longer has.
func (u *Unselected) Forget(name string) {
	u.include.forget(name)
	u.exclude.forget(name)
}

// Tell lists the present numbers. Field is the selection's place in the config
// block, such as "services", and of distinguishes what is counted separately,
// such as a namespace; it may be empty.
func (u *Unselected) Tell(catalog Catalog, field, of string) {
	for list, all := range map[string]*unselected{"include": &u.include, "exclude": &u.exclude} {
		by := "config." + field + "." + list
		catalog.LeftOut(strings.TrimSpace(by+" "+of), all.text(by))
	}
}

func (u *unselected) add(name string) {
	if _, known := u.names[name]; known {
		return
	}
	if len(u.names) >= maxUnselected {
		u.more = true
		return
	}
	if u.names == nil {
		u.names = map[string]struct{}{}
	}
	name = strings.Clone(name) // may be part of a large answer
	u.names[name] = struct{}{}
	i, _ := slices.BinarySearch(u.shown, name)
	if i < unselectedShown {
		u.shown = slices.Insert(u.shown, i, name)
		u.shown = u.shown[:min(len(u.shown), unselectedShown)]
	}
}

func (u *unselected) forget(name string) {
	if _, known := u.names[name]; !known {
		return
	}
	delete(u.names, name)
	if slices.Contains(u.shown, name) {
		all := slices.Sorted(maps.Keys(u.names))
		u.shown = slices.Clone(all[:min(len(all), unselectedShown)])
	}
}

// text describes the names, or is empty if there are none.
func (u *unselected) text(by string) string {
	n := len(u.names)
	if n == 0 {
		return ""
	}
	quoted := make([]string, 0, unselectedShown)
	for _, name := range u.shown {
		quoted = append(quoted, fmt.Sprintf("%.100q", name))
	}
	number, noun := fmt.Sprint(n), "names"
	if n == 1 {
		noun = "name"
	}
	if u.more {
		number = "more than " + number
	}
	if n > len(quoted) {
		quoted = append(quoted, "...")
	}
	return fmt.Sprintf("%s %s left out by %s: %s", number, noun, by, strings.Join(quoted, ", "))
}
