package translate

import (
	"cmp"
	"fmt"
	"path"
	"slices"
	"strings"
)

const (
	// revisionLabel makes istiods of other revisions ignore a resource.
	revisionLabel = "istio.io/rev"
	// clusterIDLabel names the cluster of a workload in the mesh.
	clusterIDLabel = "topology.istio.io/cluster"
	// healthChecksAnnotation makes Istio wait for a health condition that is
	// never set.
	healthChecksAnnotation = "proxy.istio.io/health-checks-enabled"
)

// IsIstios reports whether Istio gives a meaning to a label or an annotation:
// those of its own domains, and istio-locality. Only the configuration sets
// them.
func IsIstios(key string) bool {
	domain, _, ok := strings.Cut(lower(key), "/")
	return domain == "istio-locality" || ok && (domain == "istio.io" || strings.HasSuffix(domain, ".istio.io"))
}

// Sets reports whether the options set a label or an annotation to that value,
// or to one of the registry by naming the key.
func (o Options) Sets(key, value string) bool {
	for _, labels := range []map[string]string{o.Labels.Add, o.ServiceLabels.Add, o.Annotations.Add} {
		if v, ok := labels[key]; ok && v == value {
			return true
		}
	}
	sets := func(r RelabelRule) bool { return strings.TrimPrefix(r.Target, "annotation.") == key }
	return o.ClusterID != "" && key == clusterIDLabel && value == o.ClusterID || o.Labels.Cluster == key ||
		slices.ContainsFunc(o.Relabel.Instances, sets) || slices.ContainsFunc(o.Relabel.Services, sets)
}

// foreign reports whether a key of the registry is one that only the
// configuration may set.
func (t *Translator) foreign(key string) bool {
	return IsIstios(key) && !slices.ContainsFunc(t.o.Permit, func(pattern string) bool {
		ok, _ := path.Match(pattern, key) // validated by the bridge
		return ok || pattern == "*"
	})
}

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

// globs are alternative patterns: * matches any run of characters, ? one byte.
type globs []string

func (g globs) match(s string) bool {
	for _, pattern := range g {
		if pattern == "*" || glob(pattern, s) {
			return true
		}
	}
	return false
}

// glob matches in time at most proportional to the product of the lengths.
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

// Sources of labels; in a conflict the smaller one wins.
const (
	fromBridge = iota // the selector label
	fromOptions
	fromRule
	fromCluster
	fromMeta
	fromTag
)

// candidate is a label before conflicts are resolved.
type candidate struct {
	pair
	from    int
	changed bool   // the key was made legal
	origin  string // the key or tag in the registry's spelling
}

// labeler collects the labels of one resource at a time.
type labeler struct {
	call       *call
	candidates []candidate
	pairs      []pair
}

// add offers a label from the registry and makes it legal.
func (l *labeler) add(from int, origin, key, value string) {
	if value == "" {
		return // no label; see "Labels" in the package comment
	}
	k := mendLabelKey(key)
	switch {
	case k == "":
		l.find(origin, "has no letter or digit: cannot be a label, left out; rename it, or leave it out by translate.labels")
		return
	case k == SelectorLabel || k == revisionLabel:
		l.find(origin, fmt.Sprintf("the label %s is reserved: left out; rename it, or leave it out by translate.labels", k))
		return
	}
	// A rule says its target by name; what it copies is checked before.
	if (from > fromCluster || from == fromRule && k != key) && l.denies(k) {
		return
	}
	v := mendLabelValue(value)
	switch {
	case v == "":
		l.find(origin, fmt.Sprintf("the value %s has no letter or digit: left out; correct it, or leave it out by translate.labels", quote(value)))
		return
	case (k != key || v != value) && l.call.t.o.Labels.Illegal == "drop":
		l.find(origin, fmt.Sprintf("it or its value %s is not legal in a label: left out; correct it, or set translate.labels.illegal", quote(value)))
		return
	case k != key && v != value:
		l.find(origin, fmt.Sprintf("neither it nor its value %s is legal in a label: served as %s=%s; correct both, or leave it out by translate.labels", quote(value), k, v))
	case k != key:
		l.find(origin, fmt.Sprintf("is not a legal label: served as %s; rename it, or leave it out by translate.labels", k))
	case v != value:
		l.find(origin, fmt.Sprintf("the value %s is not a legal label value: served as %s; correct it, or leave it out by translate.labels", quote(value), v))
	}
	l.candidates = append(l.candidates, candidate{pair{k, v}, from, k != key, origin})
}

// denies reports and lists a label from the registry that only the
// configuration may set.
func (l *labeler) denies(key string) bool {
	if !l.call.t.foreign(key) {
		return false
	}
	l.find(key, "has a meaning to Istio: left out; set it in translate.labels.add, or name it in owns.labels to take it from the registry")
	return true
}

func (l *labeler) find(origin, reason string) { l.call.once("label "+quote(origin), reason) }

// tag offers the label of a tag.
func (l *labeler) tag(tag string) {
	if key, value := l.call.t.tagLabel(tag); key != "" {
		l.add(fromTag, key, key, value)
	}
}

// tagLabel returns the label of a tag of the form k=v, k:v, k|v, or of a bare
// tag. An empty key means none.
func (t *Translator) tagLabel(tag string) (key, value string) {
	if i := strings.IndexAny(tag, t.o.Labels.Separators); i > 0 {
		if t.pairTags {
			return tag[:i], tag[i+1:]
		}
		return "", ""
	}
	if t.bareTags {
		return tag, "true"
	}
	return "", ""
}

// settle resolves conflicts, returns the labels sorted by key, and resets the
// labeler. The slice is valid until the next call.
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
		// An override by the configuration is intended.
		if winner.value != c.value && winner.from > fromOptions {
			l.call.once("label "+quote(c.origin)+" conflict", fmt.Sprintf("the label %s is taken with the value %s: the value %s is left out; rename one of the two, or leave one out by translate.labels", c.key, quote(winner.value), quote(c.value)))
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
