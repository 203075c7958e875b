package config

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math"
	"net"
	"os"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"go.yaml.in/yaml/v3"
)

// maxNodes bounds how many values a file may have once its aliases are followed, so that a few lines of aliases of aliases
// can not use up the memory.
const maxNodes = 100_000

// Parse reads the configuration from the content of a file; name is the name for messages. The error is a [Problems] or nil.
//
// If there are problems, the configuration holds what could be read. It is of use for nothing but asking the plugins of those registries
// that are [Config.Askable] about their blocks, so that what they find is reported together with the rest. A registry without a usable
// name has one made up then.
func Parse(name string, data []byte, o Options) (Config, error) {
	if o.LookupEnv == nil {
		o.LookupEnv = os.LookupEnv
	}
	c := Default
	c.file, c.positions = name, map[string]Position{"": {1, 1}}
	d := decoder{config: &c, lookup: o.LookupEnv}
	if root := d.document(data); root != nil {
		d.value(root, "", reflect.ValueOf(&c).Elem())
		if !d.tooBig && !d.bad[""] {
			d.validate(o)
		}
	}
	if len(d.problems) == 0 {
		return c, nil
	}
	if d.tooBig {
		c.Registries = nil // they end somewhere
	}
	for i := range c.Registries {
		if r := &c.Registries[i]; len(r.Name) > maxName || !label.MatchString(r.Name) {
			r.Name = fmt.Sprintf("registry-%d", i)
		}
	}
	c.problems = d.problems.Sort()
	return c, c.problems
}

type decoder struct {
	config   *Config
	lookup   func(string) (string, bool)
	problems Problems
	bad      map[string]bool // paths with a problem, which are not validated further
	nodes    int
	tooBig   bool
}

func (d *decoder) problem(n *yaml.Node, path, format string, args ...any) {
	p := &Problem{File: d.config.file, Field: path, Reason: fmt.Sprintf(format, args...)}
	if n != nil {
		p.Position = Position{n.Line, n.Column}
	}
	if d.bad == nil {
		d.bad = make(map[string]bool)
	}
	d.bad[path] = true
	d.problems = append(d.problems, p)
}

// The YAML library has the line in words only. Of what its parser finds, as opposed to its scanner, it tells the line before.
var (
	yamlLine   = regexp.MustCompile(`^yaml: (?:line (\d+): )?`)
	yamlParser = regexp.MustCompile(`^(did not find expected (<|node content|'-' indicator|key|',' or)|found (undefined tag|duplicate %|incompatible))`)
)

// document returns the root of the only document, nil if there is none that can be used.
func (d *decoder) document(data []byte) *yaml.Node {
	if len(data) > MaxSize {
		d.problem(nil, "", "the file is larger than %d MiB", MaxSize>>20)
		return nil
	}
	dec := yaml.NewDecoder(bytes.NewReader(data))
	var doc, more yaml.Node
	switch err := dec.Decode(&doc); {
	case errors.Is(err, io.EOF):
		d.problem(nil, "", "the file is empty; the smallest configuration has one registry: registries: [{name: load, type: sim}]")
		return nil
	case err != nil:
		d.syntax(data, err)
		return nil
	}
	if err := dec.Decode(&more); err == nil {
		d.problem(&more, "", "a second document begins here; the configuration is one document")
		return nil
	} else if !errors.Is(err, io.EOF) {
		d.syntax(data, err)
		return nil
	}
	return doc.Content[0]
}

func (d *decoder) syntax(data []byte, err error) {
	m := yamlLine.FindStringSubmatch(err.Error())
	if m == nil {
		d.problem(nil, "", "YAML: %v", err)
		return
	}
	reason := err.Error()[len(m[0]):]
	line, err := strconv.Atoi(m[1])
	if err != nil {
		line = 1
	} else if yamlParser.MatchString(reason) {
		line++
	}
	line = min(line, bytes.Count(bytes.TrimRight(data, " \n"), []byte("\n"))+1) // the end of the file counts as one more
	d.problem(&yaml.Node{Line: line, Column: 1}, "", "YAML: %s", reason)
}

// resolve follows an alias and counts.
func (d *decoder) resolve(n *yaml.Node, path string) *yaml.Node {
	for n.Kind == yaml.AliasNode {
		n = n.Alias
	}
	if d.nodes++; d.nodes > maxNodes && !d.tooBig {
		d.tooBig = true
		d.problem(n, path, "more than %d values once all aliases are followed", maxNodes)
	}
	return n
}

// pairs returns the keys and values of a mapping, without those that are given twice or are no plain keys.
func (d *decoder) pairs(n *yaml.Node, path string) (keys []string, values []*yaml.Node, at []*yaml.Node) {
	seen := make(map[string]int)
	for i := 0; i+1 < len(n.Content); i += 2 {
		k, v := n.Content[i], n.Content[i+1]
		switch {
		case k.Kind != yaml.ScalarNode:
			d.problem(k, path, "a key must be a plain word")
			continue
		case k.Tag == "!!merge":
			d.problem(k, path, "merge keys (<<) are not supported; write the fields out")
			continue
		case seen[k.Value] != 0:
			d.problem(k, join(path, k.Value), "given twice, first on line %d", seen[k.Value])
			continue
		}
		seen[k.Value] = k.Line
		keys, values, at = append(keys, k.Value), append(values, v), append(at, k)
		d.config.positions[join(path, k.Value)] = Position{k.Line, k.Column}
	}
	return keys, values, at
}

func join(path, key string) string {
	if path == "" {
		return key
	}
	return path + "." + key
}

// Types that are more in the file than they look.
var (
	rawMessage = reflect.TypeFor[json.RawMessage]()
	listener   = reflect.TypeFor[Listener]()
	listeners  = reflect.TypeFor[Listeners]()
)

// value decodes n over v.
func (d *decoder) value(n *yaml.Node, path string, v reflect.Value) {
	if n = d.resolve(n, path); d.tooBig {
		return
	}
	if v.Type() == rawMessage {
		if n.Kind != yaml.MappingNode && !isNull(n) {
			d.problem(n, path, "must be a block of fields, not %s", describe(n))
			return
		}
		var b bytes.Buffer
		if isNull(n) {
			b.WriteString("{}")
		} else {
			d.json(&b, n, path)
		}
		v.Set(reflect.ValueOf(json.RawMessage(b.Bytes())))
		return
	}
	if isNull(n) {
		return // as if it were not there
	}
	if v.Type() == listeners && n.Kind != yaml.SequenceNode {
		v.Set(reflect.MakeSlice(listeners, 1, 1))
		v = v.Index(0)
	}
	if v.Type() == listener && n.Kind == yaml.ScalarNode {
		v = v.Field(0) // the address alone
	}
	switch v.Kind() {
	case reflect.Struct:
		if n.Kind != yaml.MappingNode {
			what := "a block of fields"
			if v.Type() == listener {
				what = "an address as host:port, or a block with one"
			}
			d.problem(n, path, "must be %s, not %s", what, describe(n))
			return
		}
		fields := make(map[string]int)
		for i := range v.NumField() {
			if f := v.Type().Field(i); f.IsExported() {
				fields[f.Tag.Get("json")] = i
			}
		}
		keys, values, at := d.pairs(n, path)
		for i, key := range keys {
			if f, ok := fields[key]; ok {
				d.value(values[i], join(path, key), v.Field(f))
				continue
			}
			d.problem(at[i], join(path, key), "unknown field; %s", suggest(key, fieldNames(v.Type())))
		}
	case reflect.Slice:
		if n.Kind != yaml.SequenceNode {
			d.problem(n, path, "must be a list, not %s", describe(n))
			return
		}
		v.Set(reflect.MakeSlice(v.Type(), len(n.Content), len(n.Content)))
		for i, item := range n.Content {
			p := fmt.Sprintf("%s[%d]", path, i)
			d.config.positions[p] = Position{item.Line, item.Column}
			d.value(item, p, v.Index(i))
		}
	case reflect.String:
		if n.Kind != yaml.ScalarNode {
			d.problem(n, path, "must be a word, not %s", describe(n))
			return
		}
		if s, ok := d.expand(n, path); ok {
			v.SetString(s)
		}
	case reflect.Map: // of text
		if n.Kind != yaml.MappingNode {
			d.problem(n, path, "must be a block of fields, not %s", describe(n))
			return
		}
		v.Set(reflect.MakeMap(v.Type()))
		keys, values, _ := d.pairs(n, path)
		for i, key := range keys {
			text := reflect.New(v.Type().Elem()).Elem()
			d.value(values[i], join(path, key), text)
			v.SetMapIndex(reflect.ValueOf(key), text)
		}
	case reflect.Bool:
		var b bool
		if n.Kind != yaml.ScalarNode || n.Tag != "!!bool" || n.Decode(&b) != nil {
			d.problem(n, path, "must be true or false, not %s", describe(n))
			return
		}
		v.SetBool(b)
	case reflect.Int:
		var i int
		if n.Kind != yaml.ScalarNode || n.Tag != "!!int" || n.Decode(&i) != nil {
			d.problem(n, path, "must be a whole number, not %s", describe(n))
			return
		}
		v.SetInt(int64(i))
	default:
		panic(fmt.Sprintf("BUG: config: no decoding for %s", v.Type()))
	}
}

func isNull(n *yaml.Node) bool { return n.Kind == yaml.ScalarNode && n.Tag == "!!null" }

// describe names what n is without giving away a value that may be a secret.
func describe(n *yaml.Node) string {
	switch {
	case n.Kind == yaml.MappingNode:
		return "a block of fields"
	case n.Kind == yaml.SequenceNode:
		return "a list"
	case isNull(n):
		return "nothing"
	case n.Tag == "!!int" || n.Tag == "!!float":
		return "the number " + n.Value
	case n.Tag == "!!bool":
		return n.Value
	default:
		return "text"
	}
}

// json writes n as JSON, keys in the order of the file.
func (d *decoder) json(b *bytes.Buffer, n *yaml.Node, path string) {
	if n = d.resolve(n, path); d.tooBig {
		return
	}
	switch n.Kind {
	case yaml.MappingNode:
		keys, values, _ := d.pairs(n, path)
		b.WriteByte('{')
		for i, key := range keys {
			if i > 0 {
				b.WriteByte(',')
			}
			writeJSON(b, key)
			b.WriteByte(':')
			d.json(b, values[i], join(path, key))
		}
		b.WriteByte('}')
	case yaml.SequenceNode:
		b.WriteByte('[')
		for i, item := range n.Content {
			if i > 0 {
				b.WriteByte(',')
			}
			p := fmt.Sprintf("%s[%d]", path, i)
			d.config.positions[p] = Position{item.Line, item.Column}
			d.json(b, item, p)
		}
		b.WriteByte(']')
	default:
		d.scalar(b, n, path)
	}
}

// scalar writes a scalar as JSON; one with a problem as null, as if it were not there.
func (d *decoder) scalar(b *bytes.Buffer, n *yaml.Node, path string) {
	switch n.Tag {
	case "!!null":
		b.WriteString("null")
	case "!!bool":
		var v bool
		if n.Decode(&v) != nil {
			d.problem(n, path, "must be true or false")
		}
		writeJSON(b, v)
	case "!!int":
		var i int64
		var u uint64
		switch {
		case n.Decode(&i) == nil:
			writeJSON(b, i)
		case n.Decode(&u) == nil:
			writeJSON(b, u)
		default:
			d.problem(n, path, "the number %s is too large", n.Value)
			b.WriteString("null")
		}
	case "!!float":
		var f float64
		if n.Decode(&f) != nil || math.IsInf(f, 0) || math.IsNaN(f) {
			d.problem(n, path, "%s is no number that can be used here", n.Value)
			b.WriteString("null")
			return
		}
		writeJSON(b, f)
	default:
		s, ok := d.expand(n, path)
		if !ok {
			b.WriteString("null")
			return
		}
		writeJSON(b, s)
	}
}

// writeJSON writes v without the escapes that are for HTML, as the values are read by people too.
func writeJSON(b *bytes.Buffer, v any) {
	enc := json.NewEncoder(b)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(v); err != nil {
		panic(fmt.Sprintf("BUG: config: encode %T: %v", v, err))
	}
	b.Truncate(b.Len() - 1) // the line break
}

var variable = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]*$`)

// expand returns the text of a scalar with its variables replaced.
func (d *decoder) expand(n *yaml.Node, path string) (string, bool) {
	s, good := n.Value, true
	if n.Tag == "!!binary" {
		d.problem(n, path, "!!binary is not supported; write text")
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
		name, rest, closed := strings.Cut(s[i+2:], "}")
		if !closed || !variable.MatchString(name) {
			d.problem(n, path, "${ begins the name of an environment variable, as in ${NAME}; write $${ for a plain ${")
			return "", false
		}
		value, ok := d.lookup(name)
		if !ok {
			d.problem(n, path, "the environment variable %s is not set", name)
			good = false
		}
		b.WriteString(value)
		s = rest
	}
}

// maxName is the longest name of a registry.
const maxName = 63

// label is a DNS label.
var label = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]*[a-z0-9])?$`)

// check reports a problem with a field, unless it has one already.
func (d *decoder) check(ok bool, path, format string, args ...any) {
	if !ok && !d.bad[path] {
		p := d.config.Position(path)
		d.problem(&yaml.Node{Line: p.Line, Column: p.Column}, path, format, args...)
	}
}

func (d *decoder) validate(o Options) {
	c := d.config
	d.listen()

	d.check(len(c.Registries) > 0, "registries", "no registry is configured; add one, for example {name: load, type: sim}")
	names := make(map[string]int)
	for i := range c.Registries {
		d.registry(fmt.Sprintf("registries[%d]", i), &c.Registries[i], names)
	}

	levels, formats := []string{"debug", "info", "warn", "error"}, []string{"text", "json"}
	d.check(slices.Contains(levels, c.Log.Level), "log.level", "must be one of %s", strings.Join(levels, ", "))
	d.check(slices.Contains(formats, c.Log.Format), "log.format", "must be one of %s", strings.Join(formats, ", "))
	if c.Profile != "" && o.Profiles != nil {
		d.check(slices.Contains(o.Profiles, c.Profile), "profile", "there is no profile of this name; %s", suggest(c.Profile, o.Profiles))
	}
	d.legacy(o)
	d.check(c.Limits.ResourcesPerRegistry > 0, "limits.resources_per_registry", "must be positive")
	d.check(c.Limits.BytesPerRegistry > 0, "limits.bytes_per_registry", "must be positive")
	d.check(c.Limits.Tombstones > 0, "limits.tombstones", "must be positive")
}

// legacy checks what is about the legacy protocol.
func (d *decoder) legacy(o Options) {
	c := d.config
	if c.MCP.Profile != "" && o.MCPProfiles != nil {
		d.check(slices.Contains(o.MCPProfiles, c.MCP.Profile), "mcp.profile", "there is no profile of this name; %s", suggest(c.MCP.Profile, o.MCPProfiles))
	}
	for i := range c.Sinks {
		s, path := &c.Sinks[i], fmt.Sprintf("sinks[%d]", i)
		d.check(s.Address != "", path+".address", "is missing; for example pilot.example.org:9901")
		for j := range i {
			d.check(s.Address == "" || c.Sinks[j].Address != s.Address, path+".address", "sinks[%d] has the same", j)
		}
		t := &s.TLS
		d.check((t.CertFile == "") == (t.KeyFile == ""), path+".tls.key_file", "cert_file and key_file go together")
		d.check(t.Enabled || *t == SinkTLS{}, path+".tls.enabled", "is not true, but there are other fields of tls; set it to true, or remove them")
	}
}

// listen checks that each port is an address, and that no two are the same.
func (d *decoder) listen() {
	c := d.config
	taken := make(map[string]string) // path by address
	check := func(path string, l Listener) {
		if _, block := c.positions[path+".address"]; block {
			path += ".address"
		}
		_, port, err := net.SplitHostPort(l.Address)
		if err == nil {
			_, err = strconv.ParseUint(port, 10, 16)
		}
		d.check(err == nil, path, "must be host:port, for example 127.0.0.1:15051, or :15051 for all addresses of the machine")
		if other := taken[l.Address]; other != "" && port != "0" && err == nil {
			d.check(false, path, "is the same as %s; they need a port each", other)
			return
		}
		taken[l.Address] = path
	}
	d.check(len(c.Listen.XDS) > 0, "listen.xds", "is an empty list; leave it out for %v", Default.Listen.XDS[0])
	for i, l := range c.Listen.XDS {
		path := "listen.xds"
		if item := fmt.Sprintf("listen.xds[%d]", i); c.positions[item] != (Position{}) {
			path = item
		}
		check(path, l)
	}
	check("listen.admin", c.Listen.Admin)
	if c.Listen.MCP != (Listener{}) {
		check("listen.mcp", c.Listen.MCP)
	}
}

func (d *decoder) registry(path string, r *Registry, names map[string]int) {
	for _, block := range []*json.RawMessage{&r.Config, &r.Translate} {
		if *block == nil {
			*block = json.RawMessage("{}")
		}
	}
	name := path + ".name"
	switch {
	case r.Name == "":
		d.check(false, name, "is missing; give the registry a name")
	case len(r.Name) > maxName || !label.MatchString(r.Name):
		d.check(false, name, "must be lower-case letters, digits and dashes, beginning and ending with a letter or digit, at most 63")
	case names[r.Name] != 0:
		d.check(false, name, "another registry has the name %s already, on line %d; names are unique", r.Name, names[r.Name])
	default:
		names[r.Name] = d.config.Position(name).Line
	}

	typ := path + ".type"
	switch {
	case r.Type == "":
		d.check(false, typ, "is missing; one of %s, or that of a plugin in plugin_dir", strings.Join(BuiltIn, ", "))
	case r.Built():
		d.check(r.Plugin.SHA256 == "", path+".plugin.sha256", "the adapter %s is built in; sha256 is for executables in plugin_dir", r.Type)
	case !label.MatchString(r.Type):
		d.check(false, typ, "must be lower-case letters, digits and dashes")
	case d.config.PluginDir == "":
		d.check(false, typ, "no adapter of this name is built in; %s; or set plugin_dir to the directory that has %s%s", suggest(r.Type, BuiltIn), PluginPrefix, r.Type)
	default:
		file := d.config.Executable(r)
		info, err := os.Stat(file)
		switch {
		case errors.Is(err, os.ErrNotExist):
			d.check(false, typ, "no adapter of this name is built in (%s), and there is no %s", strings.Join(BuiltIn, ", "), file)
		case err != nil:
			d.check(false, typ, "%s", lookError(err))
		case !info.Mode().IsRegular() || info.Mode().Perm()&0o111 == 0:
			d.check(false, typ, "%s is not an executable file; chmod +x may help", file)
		}
		sum, err := hex.DecodeString(r.Plugin.SHA256)
		d.check(r.Plugin.SHA256 == "" || err == nil && len(sum) == 32, path+".plugin.sha256", "must be 64 hexadecimal digits, as sha256sum prints them")
	}
}

// lookError says why an executable cannot be looked at, and the cure.
func lookError(err error) string {
	switch {
	case errors.Is(err, fs.ErrPermission):
		return err.Error() + "; make plugin_dir and the folders around it readable for the user that runs isthmus (chmod a+rx)"
	case errors.Is(err, syscall.ENOTDIR):
		return err.Error() + "; plugin_dir must be the directory that has the executable"
	default:
		return err.Error() + "; mend plugin_dir, or move the executable to another"
	}
}

// fieldNames returns the names of a struct's fields as the file has them.
func fieldNames(t reflect.Type) []string {
	var names []string
	for i := range t.NumField() {
		if f := t.Field(i); f.IsExported() {
			names = append(names, f.Tag.Get("json"))
		}
	}
	return names
}

// suggest returns "did you mean X?" if a name is close to what was written, or the list of all.
func suggest(got string, names []string) string {
	best, least := "", 1+max(1, len(got)/3)
	for _, name := range names {
		if n := distance(got, name); n < least {
			best, least = name, n
		}
	}
	if best != "" {
		return "did you mean " + best + "?"
	}
	return "there are " + strings.Join(names, ", ")
}

// distance is the number of letters to add, drop, change or swap with their neighbour to get from a to b.
func distance(a, b string) int {
	if len(a) > 64 || len(b) > 64 {
		return math.MaxInt
	}
	rows := [3][]int{make([]int, len(b)+1), make([]int, len(b)+1), make([]int, len(b)+1)}
	for j := range rows[1] {
		rows[1][j] = j
	}
	for i := 1; i <= len(a); i++ {
		older, last, row := rows[0], rows[1], rows[2]
		row[0] = i
		for j := 1; j <= len(b); j++ {
			change := 1
			if a[i-1] == b[j-1] {
				change = 0
			}
			row[j] = min(last[j]+1, row[j-1]+1, last[j-1]+change)
			if i > 1 && j > 1 && a[i-1] == b[j-2] && a[i-2] == b[j-1] {
				row[j] = min(row[j], older[j-2]+1)
			}
		}
		rows[0], rows[1], rows[2] = last, row, older
	}
	return rows[1][len(b)]
}
