package file

import (
	"fmt"
	"math"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"go.yaml.in/yaml/v3"

	"github.com/isthmus-mesh/isthmus/internal/conf"
)

const (
	// maxDepth bounds the nesting of values.
	maxDepth = 100
	// maxFindings bounds the listed findings per file.
	maxFindings = 10
)

// finding is one error in a file. Line 0 stands for the whole file.
type finding struct {
	line int
	text string
}

// reader reads YAML nodes strictly. It collects all errors, so that one pass
// reports everything.
type reader struct {
	// budget is about the number of bytes that may still be read. It bounds the
	// size of files expanded by aliases.
	budget   int
	spent    bool // the exhausted budget was recorded
	findings []finding
	more     int // number of findings beyond maxFindings
}

// fail records an error at the position of n.
func (r *reader) fail(n *yaml.Node, format string, args ...any) { r.failAt(n.Line, format, args...) }

func (r *reader) failAt(line int, format string, args ...any) {
	f := finding{line, fmt.Sprintf(format, args...)}
	switch {
	case slices.Contains(r.findings, f):
	case len(r.findings) >= maxFindings:
		r.more++
	default:
		r.findings = append(r.findings, f)
	}
}

// deref follows an alias. It returns nil once the budget is exhausted.
func (r *reader) deref(n *yaml.Node) *yaml.Node {
	for n.Kind == yaml.AliasNode {
		n = n.Alias
	}
	if r.budget -= 1 + len(n.Value); r.budget < 0 {
		if !r.spent {
			r.spent = true
			r.fail(n, "the file is too large once its aliases are filled in; write fewer of them")
		}
		return nil
	}
	return n
}

// pair is one entry of a mapping.
type pair struct {
	key   *yaml.Node
	value *yaml.Node // not nil, and no alias
}

// pairs returns the entries of the mapping n in order, including those merged
// by "<<".
func (r *reader) pairs(n *yaml.Node, depth int) []pair {
	if depth > maxDepth {
		r.fail(n, "values are nested deeper than %d", maxDepth)
		return nil
	}
	var (
		all    []pair
		merged []*yaml.Node
		lines  = make(map[string]int, len(n.Content)/2)
	)
	for i := 0; i+1 < len(n.Content); i += 2 {
		key, value := r.deref(n.Content[i]), r.deref(n.Content[i+1])
		if key == nil || value == nil {
			return nil
		}
		switch {
		case key.Kind != yaml.ScalarNode || key.ShortTag() == "!!null":
			r.fail(key, "a key must be a plain word")
		case key.ShortTag() == "!!merge":
			merged = append(merged, value)
		case lines[key.Value] != 0:
			r.fail(key, "%s is there twice; the first is in line %d", quote(key.Value), lines[key.Value])
		default:
			lines[key.Value] = max(1, key.Line)
			all = append(all, pair{key, value})
		}
	}
	for _, value := range merged {
		from := []*yaml.Node{value}
		if value.Kind == yaml.SequenceNode {
			from = value.Content
		}
		for _, m := range from {
			if m = r.deref(m); m == nil {
				return nil
			}
			if m.Kind != yaml.MappingNode {
				r.fail(m, "<< takes a mapping, or a list of them")
				continue
			}
			for _, p := range r.pairs(m, depth+1) {
				if lines[p.key.Value] == 0 {
					lines[p.key.Value] = max(1, p.key.Line)
					all = append(all, p)
				}
			}
		}
	}
	return all
}

// field reads the value of one field.
type field struct {
	name string
	read func(n *yaml.Node)
}

// fields reads the mapping n and records unknown fields; what describes it in
// messages ("an instance"). A field without a value counts as missing. It
// returns false if n is not a mapping.
func (r *reader) fields(n *yaml.Node, what string, fields ...field) bool {
	if n.Kind != yaml.MappingNode {
		r.fail(n, "%s must be a mapping, not %s", what, kindOf(n))
		return false
	}
	for _, p := range r.pairs(n, 0) {
		i := slices.IndexFunc(fields, func(f field) bool { return f.name == p.key.Value })
		switch {
		case i < 0:
			names := make([]string, len(fields))
			for i, f := range fields {
				names[i] = f.name
			}
			r.fail(p.key, "unknown field %s of %s%s", quote(p.key.Value), what, suggestion(p.key.Value, names))
		case isNull(p.value) || fields[i].read == nil:
		default:
			fields[i].read(p.value)
		}
	}
	return true
}

// items calls read for each item of the list n; what describes it in messages
// ("services").
func (r *reader) items(n *yaml.Node, what string, read func(n *yaml.Node)) {
	if n.Kind != yaml.SequenceNode {
		r.fail(n, "%s must be a list, not %s", what, kindOf(n))
		return
	}
	for _, item := range n.Content {
		if item = r.deref(item); item == nil {
			return
		}
		read(item)
	}
}

// text returns the text of a scalar as written in the file.
func (r *reader) text(n *yaml.Node, what string) string {
	if n.Kind != yaml.ScalarNode || isNull(n) {
		r.fail(n, "%s must be text, not %s", what, kindOf(n))
		return ""
	}
	if tag := n.ShortTag(); !strings.HasPrefix(tag, "!!") {
		r.fail(n, "%s: the tag %s means nothing here; leave it out", what, quote(tag))
		return ""
	}
	if !utf8.ValidString(n.Value) {
		r.fail(n, "%s is not valid UTF-8", what)
		return ""
	}
	return n.Value
}

// nonEmpty is like text and rejects empty text.
func (r *reader) nonEmpty(n *yaml.Node, what string) string {
	before := len(r.findings) + r.more
	s := r.text(n, what)
	if s == "" && len(r.findings)+r.more == before {
		r.fail(n, "%s is empty", what)
	}
	return s
}

// texts returns a list of texts.
func (r *reader) texts(n *yaml.Node, what string) (all []string) {
	r.items(n, what, func(n *yaml.Node) { all = append(all, r.text(n, "an item of "+what)) })
	return all
}

// textMap returns a mapping of texts. Missing values are empty.
func (r *reader) textMap(n *yaml.Node, what string) map[string]string {
	if n.Kind != yaml.MappingNode {
		r.fail(n, "%s must be a mapping, not %s", what, kindOf(n))
		return nil
	}
	pairs := r.pairs(n, 0)
	m := make(map[string]string, len(pairs))
	for _, p := range pairs {
		key, value := r.text(p.key, "a key of "+what), ""
		if !isNull(p.value) {
			value = r.text(p.value, what+"."+key)
		}
		m[key] = value
	}
	return m
}

func (r *reader) boolean(n *yaml.Node, what string) (b bool) {
	if n.Kind != yaml.ScalarNode || n.ShortTag() != "!!bool" || n.Decode(&b) != nil {
		r.fail(n, "%s must be true or false, not %s", what, kindOf(n))
	}
	return b
}

// port returns a port number, or 0 after recording an error.
func (r *reader) port(n *yaml.Node, what string) (port int) {
	if n.Kind != yaml.ScalarNode || n.ShortTag() != "!!int" || n.Decode(&port) != nil || port < 1 || port > 65535 {
		r.fail(n, "%s must be a number from 1 to 65535, not %s", what, kindOf(n))
		return 0
	}
	return port
}

// share returns a finite number of at least 0.
func (r *reader) share(n *yaml.Node, what string) (f float64) {
	tag := n.ShortTag()
	if n.Kind != yaml.ScalarNode || tag != "!!int" && tag != "!!float" || n.Decode(&f) != nil || !(f >= 0) || math.IsInf(f, 0) {
		r.fail(n, "%s must be a number that is not negative, not %s", what, kindOf(n))
		return 0
	}
	return f
}

func isNull(n *yaml.Node) bool { return n.Kind == yaml.ScalarNode && n.ShortTag() == "!!null" }

// kindOf describes n in messages.
func kindOf(n *yaml.Node) string {
	switch {
	case n.Kind == yaml.MappingNode:
		return "a mapping"
	case n.Kind == yaml.SequenceNode:
		return "a list"
	case isNull(n):
		return "empty"
	default:
		return quote(n.Value)
	}
}

// quote returns s quoted, and shortened if it is long.
func quote(s string) string {
	const most = 80
	if len(s) > most {
		s = strings.ToValidUTF8(s[:most], "") + "..."
	}
	return strconv.Quote(s)
}

// suggestion returns "; did you mean X?" if a name resembles the written one,
// or else lists the names.
func suggestion(written string, names []string) string {
	if best := conf.Nearest(written, names); best != "" {
		return fmt.Sprintf("; did you mean %s?", best)
	}
	return "; it may have " + strings.Join(names, ", ")
}

var (
	dnsLabel = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]*[a-z0-9])?$`)
	dnsName  = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$`)
)

// isDNSLabel reports whether s is a valid namespace.
func isDNSLabel(s string) bool { return len(s) <= 63 && dnsLabel.MatchString(s) }

// isDNSName reports whether s is a valid name of a resource.
func isDNSName(s string) bool { return len(s) <= 253 && dnsName.MatchString(s) }
