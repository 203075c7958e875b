package admin

import (
	"cmp"
	"fmt"
	"regexp"
	"slices"
	"strings"

	"github.com/isthmus-mesh/isthmus/server/state"
)

// problemGroup is the problems of a registry with one reason.
type problemGroup struct {
	Key, Registry, Field, Title string
	Count, More                 int
	Items                       []state.Problem // the first of them
}

var (
	// variable matches the parts of a reason that differ between problems of
	// one kind: quoted text, names, hosts, addresses, numbers.
	variable = regexp.MustCompile(`"[^"]*"|\b[\w*-]+(?:/[\w.*-]+)+|\b[\w-]*\d[\w.-]*|\b[\w-]+(?:\.[\w-]+)+`)
	// keptWords are the variable parts that tell kinds apart: registries and
	// fields of the configuration.
	keptWords = regexp.MustCompile(`^(?:translate|config|limits|owns|conflicts|addresses|protect)\b`)
	ownedBy   = regexp.MustCompile(`^(?:registry|… of the same registry) "([^"]*)", which comes first`)
)

// shapeOf returns a reason without what differs between problems of one kind.
func shapeOf(reason string) string {
	var b strings.Builder
	last := 0
	for _, at := range variable.FindAllStringIndex(reason, -1) {
		word := reason[at[0]:at[1]]
		b.WriteString(reason[last:at[0]])
		if last = at[1]; keptWords.MatchString(word) || strings.HasSuffix(reason[:at[0]], "registry ") {
			b.WriteString(word)
		} else {
			b.WriteString("…")
		}
	}
	b.WriteString(reason[last:])
	return b.String()
}

// groupProblems groups the problems of a registry by kind, the largest group
// first.
func groupProblems(prefix, registry string, problems []state.Problem) []problemGroup {
	groups := make(map[string]*problemGroup)
	for _, p := range problems {
		shape := shapeOf(p.Reason)
		g := groups[shape]
		if g == nil {
			g = &problemGroup{Key: prefix + " " + registry + " " + shape, Registry: registry, Field: p.Field}
			groups[shape] = g
		}
		if g.Count++; len(g.Items) < maxShown {
			g.Items = append(g.Items, p)
		}
	}
	out := make([]problemGroup, 0, len(groups))
	for shape, g := range groups {
		g.More = g.Count - len(g.Items)
		switch owner := ownedBy.FindStringSubmatch(shape); {
		case owner != nil:
			g.Title = fmt.Sprintf("%s owned by %s", countOf(g.Count, "name", "names"), owner[1])
		case g.Count == 1:
			g.Title = g.Items[0].ID
		default:
			what, _, _ := strings.Cut(shape, ":")
			g.Title = fmt.Sprintf("%d: %s", g.Count, what)
		}
		out = append(out, *g)
	}
	slices.SortFunc(out, func(a, b problemGroup) int {
		return cmp.Or(cmp.Compare(b.Count, a.Count), strings.Compare(a.Key, b.Key))
	})
	return out
}
