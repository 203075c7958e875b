package translate

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
)

const (
	// revisionLabel makes every istiod of another revision ignore a resource.
	revisionLabel = "istio.io/rev"
	// healthChecksAnnotation makes Istio wait for a health condition that nobody sets.
	healthChecksAnnotation = "proxy.istio.io/health-checks-enabled"
)

// pair is one label or annotation.
type pair struct{ key, value string }

func sortedPairs(m map[string]string) []pair {
	if len(m) == 0 {
		return nil
	}
	pairs := make([]pair, 0, len(m))
	for k, v := range m {
		pairs = append(pairs, pair{k, v})
	}
	slices.SortFunc(pairs, func(a, b pair) int { return cmp.Compare(a.key, b.key) })
	return pairs
}

// globs are patterns, of which any may match: * stands for any run of characters, ? for one byte.
type globs []string

func (g globs) match(s string) bool {
	for _, pattern := range g {
		if pattern == "*" || glob(pattern, s) {
			return true
		}
	}
	return false
}

// glob matches in time proportional to the product of the lengths, at worst.
func glob(pattern, s string) bool {
	star, mark, p, i := -1, 0, 0, 0
	for i < len(s) {
		switch {
		case p < len(pattern) && pattern[p] == '*':
			star, mark = p, i
			p++
		case p < len(pattern) && (pattern[p] == '?' || pattern[p] == s[i]):
			p++
			i++
		case star >= 0:
			mark++
			p, i = star+1, mark
		default:
			return false
		}
	}
	return strings.Trim(pattern[p:], "*") == ""
}

// Where a label comes from; the smaller one wins a key that two want.
const (
	fromBridge = iota // the selector label
	fromOptions
	fromCluster
	fromMeta
	fromTag
)

// candidate is a label before conflicts are settled.
type candidate struct {
	pair
	from    int
	changed bool   // the key had to be mended
	origin  string // the key or tag as the registry spells it
}

// labeler collects the labels of one resource after another.
type labeler struct {
	call       *call
	candidates []candidate
	pairs      []pair
}

// add offers a label out of the registry, mended.
func (l *labeler) add(from int, origin, key, value string) {
	if value == "" {
		return // says nothing; see "Labels" in the package comment
	}
	k := mendLabelKey(key)
	switch {
	case k == "":
		l.find(origin, "has no letter or digit: cannot be a label, left out; rename it")
		return
	case k == SelectorLabel || k == revisionLabel:
		l.find(origin, fmt.Sprintf("the label %s is reserved: left out; rename it", k))
		return
	}
	v := mendLabelValue(value)
	switch {
	case v == "":
		l.find(origin, fmt.Sprintf("the value %s has no letter or digit: left out; correct it, or leave it out by translate.labels", quote(value)))
		return
	case k != key && v != value:
		l.find(origin, fmt.Sprintf("neither it nor its value %s is legal in a label: served as %s=%s; correct both, or leave it out by translate.labels", quote(value), k, v))
	case k != key:
		l.find(origin, fmt.Sprintf("is no legal label: served as %s; rename it, or leave it out by translate.labels", k))
	case v != value:
		l.find(origin, fmt.Sprintf("the value %s is no legal label value: served as %s; correct it, or leave it out by translate.labels", quote(value), v))
	}
	l.candidates = append(l.candidates, candidate{pair{k, v}, from, k != key, origin})
}

func (l *labeler) find(origin, reason string) { l.call.once("label "+quote(origin), reason) }

// tag offers the label of a tag, by its form: k=v, k:v, k|v, or a bare one.
func (l *labeler) tag(tag string) {
	if i := strings.IndexAny(tag, "=:|"); i > 0 {
		if l.call.t.pairTags {
			l.add(fromTag, tag[:i], tag[:i], tag[i+1:])
		}
		return
	}
	if l.call.t.bareTags && tag != "" {
		l.add(fromTag, tag, tag, "true")
	}
}

// settle returns the labels sorted by key, one for each, and begins anew. The slice is good until the next call.
func (l *labeler) settle() []pair {
	slices.SortFunc(l.candidates, func(a, b candidate) int {
		return cmp.Or(cmp.Compare(a.key, b.key), cmp.Compare(a.from, b.from), compareBools(a.changed, b.changed),
			cmp.Compare(a.origin, b.origin), cmp.Compare(a.value, b.value))
	})
	l.pairs = l.pairs[:0]
	var winner candidate
	for _, c := range l.candidates {
		if len(l.pairs) == 0 || winner.key != c.key {
			winner = c
			l.pairs = append(l.pairs, c.pair)
			continue
		}
		// What the configuration overrules is as wanted.
		if winner.value != c.value && winner.from > fromOptions {
			l.call.once("label "+quote(c.origin)+" conflict", fmt.Sprintf("the label %s is taken with the value %s: the value %s is left out; rename one of the two", c.key, quote(winner.value), quote(c.value)))
		}
	}
	l.candidates = l.candidates[:0]
	return l.pairs
}

func compareBools(a, b bool) int {
	switch {
	case a == b:
		return 0
	case b:
		return -1
	}
	return 1
}
