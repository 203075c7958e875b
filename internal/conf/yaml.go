package conf

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"hash/fnv"
	"io"
	"math"
	"regexp"
	"strconv"
	"strings"

	"github.com/invopop/jsonschema"
	"go.yaml.in/yaml/v3"
)

// Bounds of a document once all aliases and variables are followed: a few bytes
// of YAML can stand for any number of values, and each is recorded under its
// path, which grows with the depth.
const (
	maxNodes    = 200_000  // values and keys
	maxDepth    = 64       // of lists and blocks in each other
	maxText     = 32 << 20 // bytes of paths and values
	maxProblems = 1_000    // that are listed
)

// Position is a position in a file, counted from 1. The zero value is no
// position.
type Position struct{ Line, Column int }

// Problem is an error that makes a document, or a value in it, unusable.
type Problem struct {
	Position
	FieldError
}

// Document is a YAML document.
type Document struct {
	// JSON is the document as JSON, in the order of the file. A value with a
	// problem is null. It is nil without a usable document.
	JSON json.RawMessage
	// Problems are errors of YAML and of variables; the schema is not checked.
	Problems []Problem

	blocks       map[string]json.RawMessage // those that the schema leaves open
	keys, values map[string]Position        // by path
}

// Block returns a block that the schema leaves open as JSON, in the order of
// the file; nil if there is none at the path.
func (d *Document) Block(path string) json.RawMessage { return d.blocks[path] }

// Has reports whether the document has a value at the path.
func (d *Document) Has(path string) bool { _, ok := d.keys[path]; return ok }

// Position returns the position of the field at the path: its key or, in a
// list, the item. For a missing field it is that of the innermost existing
// block around it.
func (d *Document) Position(path string) Position { return around(d.keys, path) }

// Value is like Position for the value of the field.
func (d *Document) Value(path string) Position { return around(d.values, path) }

func around(positions map[string]Position, path string) Position {
	for {
		if p, ok := positions[path]; ok {
			return p
		}
		i := strings.LastIndexAny(path, ".[")
		if i < 0 {
			return positions[""]
		}
		path = path[:i]
	}
}

// Extensions of the schema, for schemas for editors: these show both forms of a
// value that has a shorter one, and the bounds that the program checks itself.
const (
	// ShortField names the field whose value may replace the block.
	ShortField = "x-short"
	// ShortText describes such a block in messages.
	ShortText = "x-short-text"
	// SingleItem marks a list that its only item may replace.
	SingleItem = "x-single"
	// Zero marks a number that may be 0.
	Zero = "x-zero"
)

// ReadYAML reads the only document of a file. It converts values to text where
// the type requires it, and replaces environment variables, ${NAME}, in text.
// With a nil lookup variables stay as they are, and a duration that has one
// becomes a duration that no other text has.
func (t *Type[C]) ReadYAML(data []byte, lookup func(name string) (string, bool)) *Document {
	d := &Document{
		blocks: make(map[string]json.RawMessage),
		keys:   map[string]Position{"": {1, 1}}, values: make(map[string]Position),
	}
	r := reader{d: d, lookup: lookup, bare: lookup == nil}
	if r.bare {
		r.lookup = func(name string) (string, bool) { return "${" + name + "}", true }
	}
	root := r.document(data)
	if root == nil {
		return d
	}
	d.values[""] = Position{root.Line, root.Column}
	r.json(root, "", t.schema)
	if !r.tooBig {
		d.JSON = r.b.Bytes()
	}
	return d
}

type reader struct {
	d      *Document
	b      bytes.Buffer // JSON
	lookup func(string) (string, bool)
	bare   bool // variables stay
	nodes  int
	paths  int // bytes
	depth  int
	tooBig bool
}

func (r *reader) problem(n *yaml.Node, path, format string, args ...any) {
	if len(r.d.Problems) >= maxProblems {
		return
	}
	p := Problem{FieldError: FieldError{Field: path, Reason: fmt.Sprintf(format, args...)}}
	if n != nil {
		p.Position = Position{n.Line, n.Column}
	}
	r.d.Problems = append(r.d.Problems, p)
}

// document returns the root of the only document, nil if it is unusable.
func (r *reader) document(data []byte) *yaml.Node {
	dec := yaml.NewDecoder(bytes.NewReader(data))
	var doc, more yaml.Node
	switch err := dec.Decode(&doc); {
	case errors.Is(err, io.EOF):
		return nil
	case err != nil:
		r.syntax(data, err)
		return nil
	}
	if err := dec.Decode(&more); err == nil {
		r.problem(&more, "", "a second document begins here; the configuration is one document")
		return nil
	} else if !errors.Is(err, io.EOF) {
		r.syntax(data, err)
		return nil
	}
	return doc.Content[0]
}

// The YAML library reports lines in text only. Its parser, unlike its scanner,
// reports the preceding line.
var (
	yamlLine   = regexp.MustCompile(`^yaml: (?:line (\d+): )?`)
	yamlParser = regexp.MustCompile(`^(did not find expected (<|node content|'-' indicator|key|',' or)|found (undefined tag|duplicate %|incompatible))`)
)

func (r *reader) syntax(data []byte, err error) {
	m := yamlLine.FindStringSubmatch(err.Error())
	if m == nil {
		r.problem(nil, "", "YAML: %v", err)
		return
	}
	reason := err.Error()[len(m[0]):]
	line, err := strconv.Atoi(m[1])
	if err != nil {
		line = 1
	} else if yamlParser.MatchString(reason) {
		line++
	}
	line = min(line, bytes.Count(bytes.TrimRight(data, " \n"), []byte("\n"))+1) // the library counts the end of the file as a line
	column := 1
	if tabs.MatchString(reason) {
		for _, at := range []int{line, line + 1} { // the library may say where the block before ends
			if text := lineOf(data, at); bytes.ContainsRune(text[:len(text)-len(bytes.TrimLeft(text, " \t"))], '\t') {
				line, column = at, bytes.IndexByte(text, '\t')+1
				break
			}
		}
	}
	for _, w := range yamlWords {
		if strings.Contains(reason, w.library) {
			reason = w.ours + " (" + reason + ")"
			break
		}
	}
	r.problem(&yaml.Node{Line: line, Column: column}, "", "YAML: %s", reason)
}

// lineOf returns a line of a text, counted from 1.
func lineOf(data []byte, line int) []byte {
	for ; line > 1; line-- {
		_, data, _ = bytes.Cut(data, []byte("\n"))
	}
	text, _, _ := bytes.Cut(data, []byte("\n"))
	return text
}

// tabs matches what the library says of tabs.
var tabs = regexp.MustCompile(`tab character|cannot start any token`)

// yamlWords explain what the library says, with the cure.
var yamlWords = []struct{ library, ours string }{
	{"tab character", "a tab indents this line; indent with spaces"},
	{"cannot start any token", "a value cannot begin like this; if it is a tab, indent with spaces, else write the text in quotes"},
	{"did not find expected ',' or ']'", "a [ is not closed, or a comma is missing between two items"},
	{"did not find expected ',' or '}'", "a { is not closed, or a comma is missing between two fields"},
	{"did not find expected key", "the line fits no block: the fields of a block begin in one column"},
	{"did not find expected '-' indicator", "the items of a list begin with - in one column"},
	{"mapping values are not allowed", "a field cannot begin here: indent it as the fields around it, or write a text with a colon in quotes"},
	{"found unexpected end of stream", "a quote, [ or { is not closed"},
	{"could not find expected ':'", "a field is its name, a colon and a space, and its value"},
}

// count counts a value or a key, and reports whether the document is within its
// bounds.
func (r *reader) count(n *yaml.Node, path string) bool {
	if r.tooBig {
		return false
	}
	r.nodes++
	r.paths += len(path)
	r.tooBig = true
	switch {
	case r.nodes > maxNodes:
		r.problem(n, path, "more than %d values and keys once all aliases are followed", maxNodes)
	case r.paths+r.b.Len() > maxText:
		r.problem(n, path, "more than %d MiB of text once all aliases and variables are followed", maxText>>20)
	case r.depth > maxDepth:
		r.problem(n, "", "nested deeper than %d levels here, or an alias (*) that contains itself", maxDepth) // the path is long
	default:
		r.tooBig = false
	}
	return !r.tooBig
}

// pairs returns the keys and values of a mapping, without duplicates and keys
// that are not plain.
func (r *reader) pairs(n *yaml.Node, path string) (keys []string, values []*yaml.Node) {
	seen := make(map[string]int)
	for i := 0; i+1 < len(n.Content); i += 2 {
		k, v := n.Content[i], n.Content[i+1]
		if !r.count(k, path) {
			return nil, nil
		}
		switch {
		case k.Kind == yaml.MappingNode && k.Style&yaml.FlowStyle != 0:
			r.problem(k, path, "{{ begins a field of a template: render the template first (helm template), or write the text in quotes")
			continue
		case k.Kind != yaml.ScalarNode:
			r.problem(k, path, "a key must be a plain word")
			continue
		case k.Tag == "!!merge":
			r.problem(k, path, "merge keys (<<) are not supported; write the fields out")
			continue
		case seen[k.Value] != 0:
			r.problem(k, joinPath(path, k.Value), "given twice, first on line %d", seen[k.Value])
			continue
		}
		seen[k.Value] = k.Line
		keys, values = append(keys, k.Value), append(values, v)
		r.d.keys[joinPath(path, k.Value)] = Position{k.Line, k.Column}
	}
	return keys, values
}

// json writes n as JSON in the order of the file, converted as the schema
// requires; a nil schema requires nothing.
func (r *reader) json(n *yaml.Node, path string, s *jsonschema.Schema) {
	for n.Kind == yaml.AliasNode {
		n = n.Alias
	}
	r.depth++
	defer func() { r.depth-- }()
	if !r.count(n, path) {
		return
	}
	r.d.values[path] = Position{n.Line, n.Column}
	if s != nil && s.Extras[SingleItem] != nil && n.Kind != yaml.SequenceNode && !isNull(n) {
		r.b.WriteByte('[')
		r.json(n, path, s.Items)
		r.b.WriteByte(']')
		return
	}
	if s != nil && s.Extras[ShortField] != nil && !isNull(n) {
		switch n.Kind {
		case yaml.ScalarNode:
			r.b.WriteByte('{')
			r.write(s.Extras[ShortField])
			r.b.WriteByte(':')
			r.text(n, path)
			r.b.WriteByte('}')
			return
		case yaml.SequenceNode:
			r.problem(n, path, "must be %s, not a list", s.Extras[ShortText])
			r.b.WriteString("null")
			return
		}
	}
	switch n.Kind {
	case yaml.MappingNode:
		start := r.b.Len()
		keys, values := r.pairs(n, path)
		r.b.WriteByte('{')
		for i, key := range keys {
			if i > 0 {
				r.b.WriteByte(',')
			}
			r.write(key)
			r.b.WriteByte(':')
			r.json(values[i], joinPath(path, key), fieldOf(s, key))
		}
		r.b.WriteByte('}')
		if s != nil && s.Properties == nil {
			r.d.blocks[path] = bytes.Clone(r.b.Bytes()[start:])
		}
	case yaml.SequenceNode:
		r.b.WriteByte('[')
		for i, item := range n.Content {
			if i > 0 {
				r.b.WriteByte(',')
			}
			if r.tooBig {
				return
			}
			p := path + "[" + strconv.Itoa(i) + "]"
			r.d.keys[p] = Position{item.Line, item.Column}
			var of *jsonschema.Schema
			if s != nil {
				of = s.Items
			}
			r.json(item, p, of)
		}
		r.b.WriteByte(']')
	default:
		if s != nil && s.Type == "string" && !isNull(n) {
			if r.bare && s.Pattern == DurationPattern && strings.Contains(n.Value, "${") {
				r.write(durationOf(n.Value))
				return
			}
			r.text(n, path)
			return
		}
		integer := s != nil && s.Type == "integer"
		if n = r.number(n, path, integer || s != nil && s.Type == "number"); n != nil {
			r.scalar(n, path, integer)
			return
		}
		r.b.WriteString("null")
	}
}

// number returns a node with the value of the variables of a number: a scalar
// with a tag that says so, or where the schema requires a number. Any other
// node is returned as it is, and nil if the value is not known.
func (r *reader) number(n *yaml.Node, path string, wanted bool) *yaml.Node {
	tagged := n.Tag == "!!int" || n.Tag == "!!float"
	if !strings.Contains(n.Value, "${") || !tagged && !(wanted && n.Tag == "!!str") {
		return n
	}
	if r.bare {
		if wanted {
			return &yaml.Node{Kind: yaml.ScalarNode, Tag: "!!int", Value: strconv.FormatUint(hashOf(n.Value), 10), Line: n.Line, Column: n.Column}
		}
		return &yaml.Node{Kind: yaml.ScalarNode, Tag: "!!str", Value: n.Value, Line: n.Line, Column: n.Column}
	}
	text, ok := r.expand(n, path)
	if !ok {
		return nil
	}
	var doc yaml.Node
	if err := yaml.Unmarshal([]byte(text), &doc); err == nil && len(doc.Content) == 1 {
		if v := doc.Content[0]; v.Tag == "!!int" || v.Tag == "!!float" {
			return &yaml.Node{Kind: yaml.ScalarNode, Tag: v.Tag, Value: v.Value, Line: n.Line, Column: n.Column}
		}
	}
	r.problem(n, path, "must be a number, and the value of the variables is none") // the value may be a secret
	return nil
}

// durationOf returns a duration that stands for a text with variables.
func durationOf(text string) string {
	return fmt.Sprintf("%dns", hashOf(text))
}

// hashOf returns a number of 63 bits that stands for a text.
func hashOf(text string) uint64 {
	h := fnv.New64a()
	_, _ = h.Write([]byte(text))
	return h.Sum64() >> 1
}

// fieldOf returns the schema of a field of a block, nil if there is none.
func fieldOf(s *jsonschema.Schema, key string) *jsonschema.Schema {
	if s == nil {
		return nil
	}
	if s.Properties != nil {
		return property(s, key)
	}
	return s.AdditionalProperties
}

func isNull(n *yaml.Node) bool { return n.Kind == yaml.ScalarNode && n.Tag == "!!null" }

// text writes a scalar as text, or null with a problem.
func (r *reader) text(n *yaml.Node, path string) {
	if s, ok := r.expand(n, path); ok {
		r.write(s)
		return
	}
	r.b.WriteString("null")
}

// scalar writes a scalar as JSON; one with a problem as null, as if it were not
// there. An integer must fit into 64 bits with a sign.
func (r *reader) scalar(n *yaml.Node, path string, integer bool) {
	switch n.Tag {
	case "!!null":
		r.b.WriteString("null")
	case "!!bool":
		var v bool
		if n.Decode(&v) != nil {
			r.problem(n, path, "must be true or false")
		}
		r.write(v)
	case "!!int":
		var i int64
		var u uint64
		switch {
		case n.Decode(&i) == nil:
			r.write(i)
		case !integer && n.Decode(&u) == nil:
			r.write(u)
		default:
			r.problem(n, path, "the number %s is too large", n.Value)
			r.b.WriteString("null")
		}
	case "!!float":
		var f float64
		if n.Decode(&f) != nil || math.IsInf(f, 0) || math.IsNaN(f) {
			r.problem(n, path, "%s is not a number that can be used here", n.Value)
			r.b.WriteString("null")
			return
		}
		if integer && math.Abs(f) >= 1<<63 {
			r.problem(n, path, "the number %s is too large", n.Value)
			r.b.WriteString("null")
			return
		}
		r.write(f)
	default:
		r.text(n, path)
	}
}

// write writes v without HTML escapes, because people read the values.
func (r *reader) write(v any) {
	enc := json.NewEncoder(&r.b)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(v); err != nil {
		panic(fmt.Sprintf("BUG: conf: encode %T: %v", v, err))
	}
	r.b.Truncate(r.b.Len() - 1) // the line break
}

var variable = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]*$`)

// expand returns the text of a scalar with its variables replaced.
func (r *reader) expand(n *yaml.Node, path string) (string, bool) {
	s, good := n.Value, true
	if n.Tag == "!!binary" {
		r.problem(n, path, "!!binary is not supported; write text")
		return "", false
	}
	if !strings.Contains(s, "${") {
		return s, true
	}
	var b strings.Builder
	for {
		i := strings.Index(s, "${")
		if i < 0 {
			b.WriteString(s)
			return b.String(), good
		}
		if i > 0 && s[i-1] == '$' {
			b.WriteString(s[:i-1] + "${")
			s = s[i+2:]
			continue
		}
		b.WriteString(s[:i])
		if b.Len() > maxText {
			r.problem(n, path, "longer than %d MiB once its variables are replaced", maxText>>20)
			return "", false
		}
		inner, rest, closed := strings.Cut(s[i+2:], "}")
		name, otherwise, hasDefault := strings.Cut(inner, ":-")
		if !closed || !variable.MatchString(name) {
			r.problem(n, path, "${ begins the name of an environment variable, as in ${NAME} or ${NAME:-default}; write $${ for a plain ${")
			return "", false
		}
		value, ok := r.lookup(name)
		switch {
		case hasDefault && r.bare:
			value = "${" + inner + "}"
		case hasDefault && value == "":
			value = otherwise
		case !ok:
			r.problem(n, path, "the environment variable %s is not set", name)
			good = false
		}
		b.WriteString(value)
		s = rest
	}
}
