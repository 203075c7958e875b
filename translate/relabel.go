package translate

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
)

// Names available to rules for a service and for an instance; a name that ends
// with "_" is the prefix of a key.
var (
	serviceFacts = []string{
		"__name", "__group", "__namespace", "__partition", "__datacenter", "__peer", "__registry", "__tags", "__meta_", "__instance_meta_", "__tmp",
	}
	instanceFacts = append([]string{
		"__id", "__address", "__port", "__node", "__cluster", "__health", "__region", "__zone", "__sub_zone", "__network",
	}, serviceFacts...)
)

// rules is one compiled list.
type rules []rule

type rule struct {
	field       string // "translate.relabel.services[0]"
	source      []string
	separator   string
	regex       *regexp.Regexp
	target      string
	replacement string
	action      string
}

// filters reports whether any of the rules may exclude something.
func (rs rules) filters() bool {
	return slices.ContainsFunc(rs, func(r rule) bool {
		return r.action == "keep" || r.action == "drop" || r.action == "keepequal" || r.action == "dropequal"
	})
}

// names reports whether a rule reads the names of all values.
func (rs rules) names() bool {
	return slices.ContainsFunc(rs, func(r rule) bool { return r.action == "labelmap" })
}

// compile compiles the rules of a field and reports errors by bad.
func compile(field string, list []RelabelRule, facts []string, bad func(field, format string, args ...any)) rules {
	known := func(name string) bool {
		return !strings.HasPrefix(name, "__") || slices.ContainsFunc(facts, func(f string) bool {
			return name == f || (strings.HasSuffix(f, "_") || f == "__tmp") && strings.HasPrefix(name, f)
		})
	}
	text := func(s *string, fallback string) string {
		if s == nil {
			return fallback
		}
		return *s
	}
	var out rules
	for i, r := range list {
		at := fmt.Sprintf("%s[%d]", field, i)
		c := rule{
			field: "translate." + at, source: r.Source, separator: text(r.Separator, ";"), target: r.Target,
			replacement: text(r.Replacement, "$1"), action: over(r.Action, "replace"),
		}
		var err error
		// As in Prometheus, the whole value must match.
		if c.regex, err = regexp.Compile("^(?s:" + text(r.Regex, "(.*)") + ")$"); err != nil {
			bad(at+".regex", "is not a regular expression: %v", err)
		}
		for j, s := range r.Source {
			if !known(s) {
				bad(fmt.Sprintf("%s.source[%d]", at, j), "%s is not known; there are %s, and names that do not begin with __", quote(s), strings.Join(facts, ", "))
			}
		}
		needsSource, needsTarget := true, true
		switch c.action {
		case "replace":
			needsSource = false
		case "keepequal", "dropequal", "lowercase", "uppercase":
		case "keep", "drop":
			needsTarget = false
		case "labelmap", "labeldrop", "labelkeep":
			needsSource, needsTarget = false, false
			if len(r.Source) > 0 {
				bad(at+".source", "is of no use with %s, which looks at names; remove it", c.action)
			}
		default:
			bad(at+".action", "%s", notOneOf(c.action, "replace", "keep", "drop", "keepequal", "dropequal", "lowercase", "uppercase", "labelmap", "labeldrop", "labelkeep"))
		}
		switch {
		case needsSource && len(r.Source) == 0:
			bad(at+".source", "is missing; name at least one value")
		case needsTarget && r.Target == "":
			bad(at+".target", "is missing; name the value that is set or compared")
		case !needsTarget && r.Target != "":
			bad(at+".target", "is of no use with %s; remove it", c.action)
		case needsTarget && !known(r.Target):
			bad(at+".target", "%s is not known; use a label, or a name that begins with __tmp", quote(r.Target))
		case r.Target == SelectorLabel, r.Target == revisionLabel:
			bad(at+".target", "is reserved; use another label")
		}
		out = append(out, c)
	}
	return out
}

// values are the values that rules read and write.
type values struct {
	set map[string]string
	// more, if not nil, looks up names that are not set.
	more func(name string) string
	// foreign reports whether a name that is copied is one that only the
	// configuration may set; nil means none.
	foreign func(name string) bool
}

func (v *values) get(name string) string {
	s, ok := v.set[name]
	if !ok && v.more != nil {
		s = v.more(name)
	}
	return s
}

func (v *values) put(name, value string) {
	if value == "" && v.more != nil && strings.HasPrefix(name, "__") {
		v.set[name] = "" // hides what more has
		return
	}
	if value == "" {
		delete(v.set, name)
		return
	}
	v.set[name] = value
}

// apply runs the rules in order. It returns the field of the rule that excludes
// the subject, or "".
func (rs rules) apply(v *values) (leftOut string) {
	for i := range rs {
		r := &rs[i]
		if r.names(v) {
			continue
		}
		parts := make([]string, len(r.source))
		for j, s := range r.source {
			parts[j] = v.get(s)
		}
		joined := strings.Join(parts, r.separator)
		keep := true
		switch r.action {
		case "replace":
			if match := r.regex.FindStringSubmatchIndex(joined); match != nil {
				v.put(r.target, string(r.regex.ExpandString(nil, r.replacement, joined, match)))
			}
		case "lowercase":
			v.put(r.target, strings.ToLower(joined))
		case "uppercase":
			v.put(r.target, strings.ToUpper(joined))
		case "keep":
			keep = r.regex.MatchString(joined)
		case "drop":
			keep = !r.regex.MatchString(joined)
		case "keepequal":
			keep = joined == v.get(r.target)
		case "dropequal":
			keep = joined != v.get(r.target)
		}
		if !keep {
			return r.field
		}
	}
	return ""
}

// names runs a rule that acts on names, and reports whether it is one.
func (r *rule) names(v *values) bool {
	switch r.action {
	case "labelmap":
		for _, p := range sortedPairs(v.set) {
			if r.regex.MatchString(p.key) {
				if to := r.regex.ReplaceAllString(p.key, r.replacement); to != "" && (v.foreign == nil || !v.foreign(to)) {
					v.put(to, p.value)
				}
			}
		}
	case "labeldrop", "labelkeep":
		for _, name := range sortedNames(v.set) {
			if !strings.HasPrefix(name, "__") && r.regex.MatchString(name) == (r.action == "labeldrop") {
				delete(v.set, name)
			}
		}
	default:
		return false
	}
	return true
}

// tagText is the form of tags in rules: each between two commas.
func tagText(tags []string) string {
	if len(tags) == 0 {
		return ""
	}
	return "," + strings.Join(tags, ",") + ","
}
