package main

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/isthmus-mesh/isthmus/internal/conf"
	"github.com/isthmus-mesh/isthmus/server/config"
	"github.com/isthmus-mesh/isthmus/server/supervisor"
)

func newDocs() *cobra.Command {
	var asSchema bool
	var pluginDir, dir string
	cmd := &cobra.Command{
		Use:   "docs",
		Short: "Print the reference of the configuration, or a schema of it for editors",
		Long: `Print the reference of the configuration as Markdown or, with --schema, a JSON Schema of it for editors. Adapters describe their own
fields: the built-in ones and, with --plugin-dir, the executables isthmus-adapter-TYPE in a directory. They are started for that, and
contact no registry.`,
		Example: `  isthmus docs --plugin-dir /opt/isthmus/plugins > configuration.md
  isthmus docs --plugin-dir /opt/isthmus/plugins --schema > isthmus.schema.json`,
		Args: usageArgs(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			described, err := describeAdapters(cmd.Context(), pluginDir, cmd.ErrOrStderr())
			if err != nil {
				return err
			}
			if asSchema {
				return writeSchema(cmd.OutOrStdout(), described)
			}
			return writeDocs(cmd.OutOrStdout(), dir, described)
		},
	}
	cmd.Flags().BoolVar(&asSchema, "schema", false, "print a JSON Schema of the configuration file")
	cmd.Flags().StringVar(&dir, "dir", "", "write the pages of the reference into `DIR`: configuration.md, adapters.md, translate.md")
	cmd.MarkFlagsMutuallyExclusive("schema", "dir")
	cmd.Flags().StringVar(&pluginDir, "plugin-dir", "", "`DIR` with executables isthmus-adapter-TYPE, to describe them, too")
	return cmd
}

// described is an adapter with what it says of itself.
type described struct {
	supervisor.Description
	builtIn bool
}

// describeAdapters asks the built-in adapters and those of a directory, if one
// is given, to describe themselves.
func describeAdapters(ctx context.Context, pluginDir string, stderr io.Writer) ([]described, error) {
	log := slog.New(slog.DiscardHandler)
	host, err := supervisor.NewHost("", log)
	if err != nil {
		return nil, err
	}
	defer host.Close()
	var all []described
	ask := func(name string, isBuiltIn bool, command ...string) error {
		d, err := supervisor.Describe(ctx, host, supervisor.Spec{Registry: name, Adapter: name, Command: command}, log)
		if err != nil {
			return fmt.Errorf("adapter %s: %w", name, err)
		}
		all = append(all, described{d, isBuiltIn})
		return nil
	}
	path, err := os.Executable()
	if err != nil {
		return nil, fmt.Errorf("find the program's own file: %w", err)
	}
	for _, name := range builtIn() {
		if err := ask(name, true, path, "adapter", name); err != nil {
			return nil, err
		}
	}
	if pluginDir == "" {
		return all, nil
	}
	entries, err := os.ReadDir(pluginDir)
	if err != nil {
		return nil, fmt.Errorf("--plugin-dir: %w", err)
	}
	found := 0
	for _, e := range entries {
		name, ok := strings.CutPrefix(e.Name(), config.PluginPrefix)
		if !ok {
			continue
		}
		found++
		if adapters[name] != nil {
			fmt.Fprintf(stderr, "isthmus: %s is never used: the adapter %s is built in\n", filepath.Join(pluginDir, e.Name()), name)
			continue
		}
		file, err := filepath.Abs(filepath.Join(pluginDir, e.Name()))
		if err != nil {
			return nil, err
		}
		if err := ask(name, false, file); err != nil {
			return nil, err
		}
	}
	if found == 0 {
		return nil, fmt.Errorf("--plugin-dir: there is no %sTYPE in %s", config.PluginPrefix, pluginDir)
	}
	return all, nil
}

// docsHead begins each page of the reference.
const docsHead = "<!-- Made by \"make generate\" from the code. Do not edit. -->\n\n"

// page is a page of the reference, with the name of its file.
type page struct{ file, text string }

// reference returns the pages of the reference of the configuration.
func reference(adapters []described) ([]page, error) {
	var b bytes.Buffer
	b.WriteString(docsHead + `# The configuration file

Every field of the file that ` + "`isthmus serve --config FILE`" + ` reads.
[Write a configuration](../configuration.md) has an example.

`)
	file, err := parseSchema(fileSchema())
	if err != nil {
		return nil, fmt.Errorf("schema of the file: %w", err)
	}
	tableHead(&b)
	file.rows(&b, "", file, 0)
	pages := []page{{"configuration.md", b.String()}}

	b.Reset()
	b.WriteString(docsHead + `# config, by adapter

Every field of the block ` + "`registries[].config`" + `, which is the adapter's own.
`)
	for _, a := range adapters {
		s, err := parseSchema(a.ConfigSchema)
		if err != nil {
			return nil, fmt.Errorf("adapter %s: config schema: %w", a.Name, err)
		}
		fmt.Fprintf(&b, "\n## config of %s\n\n", a.Name)
		b.WriteString(introduction(a) + "\n\n")
		tableHead(&b)
		s.rows(&b, "", s, 0)
	}
	pages = append(pages, page{"adapters.md", b.String()})

	b.Reset()
	b.WriteString(docsHead + `# translate

Every field of the block ` + "`registries[].translate`" + `: how services of a registry
become resources. Adapters that publish services have it.

`)
	var all []*schema
	var names []string
	own := map[string]*schema{} // of adapters that translate in another way
	for _, a := range adapters {
		if len(a.TranslateSchema) == 0 {
			continue
		}
		s, err := parseSchema(a.TranslateSchema)
		if err != nil {
			return nil, fmt.Errorf("adapter %s: translate schema: %w", a.Name, err)
		}
		if len(all) > 0 && !slices.Equal(fields(s), fields(all[0])) {
			own[a.Name] = s
			continue
		}
		all, names = append(all, s), append(names, a.Name)
	}
	if len(all) > 0 {
		for i, s := range all {
			for _, field := range slices.Sorted(maps.Keys(s.properties())) {
				if p := s.properties()[field]; p.Default != nil && !equalJSON(p.Default, sharedDefault(all, field)) {
					fmt.Fprintf(&b, "The default of `%s` for %s is %s.\n\n", field, names[i], code(p.Default))
				}
			}
		}
		common := all[0]
		for field, p := range common.properties() {
			p.Default = sharedDefault(all, field)
		}
		tableHead(&b)
		common.rows(&b, "", common, 0)
	}
	for _, name := range slices.Sorted(maps.Keys(own)) {
		fmt.Fprintf(&b, "\n## translate of %s\n\nThis adapter takes a block of its own in place of the above.\n\n", name)
		tableHead(&b)
		own[name].rows(&b, "", own[name], 0)
	}
	return append(pages, page{"translate.md", b.String()}), nil
}

// writeDocs writes the pages one after the other, or as files of a directory.
func writeDocs(w io.Writer, dir string, adapters []described) error {
	pages, err := reference(adapters)
	if err != nil {
		return err
	}
	for i, p := range pages {
		switch {
		case dir != "":
			err = os.WriteFile(filepath.Join(dir, p.file), []byte(p.text), 0o644) //nolint:gosec // a page that others may read
		case i == 0:
			_, err = io.WriteString(w, p.text)
		default:
			_, err = io.WriteString(w, "\n"+strings.TrimPrefix(p.text, docsHead))
		}
		if err != nil {
			return fmt.Errorf("write %s: %w", p.file, err)
		}
	}
	return nil
}

// fields returns the names of a block's fields, sorted.
func fields(s *schema) []string { return slices.Sorted(maps.Keys(s.properties())) }

// sharedDefault returns the default that all adapters share for a field, nil if
// there is none.
func sharedDefault(all []*schema, field string) json.RawMessage {
	first := all[0].properties()[field].Default
	for _, s := range all[1:] {
		if p := s.properties()[field]; p == nil || !equalJSON(p.Default, first) {
			return nil
		}
	}
	return first
}

// introduction returns what an adapter says of itself, with its page if it is
// built in.
func introduction(a described) string {
	if !a.builtIn {
		text := strings.Join(strings.Fields(a.Summary), " ")
		about := fmt.Sprintf("Of `%s%s` in `plugin_dir`", config.PluginPrefix, a.Name)
		if version := strings.Join(strings.Fields(a.Version), " "); version != "" {
			about += ", version " + version
		}
		return strings.TrimSpace(text + " " + about + ".")
	}
	page := fmt.Sprintf("[registries/%s.md](../registries/%[1]s.md)", a.Name)
	text := a.Summary + " See"
	if len(text)+1+len(page)+1 > 80 {
		return text + "\n" + page + "."
	}
	return text + " " + page + "."
}

// fileSchema returns the schema of the file, which names the adapters.
func fileSchema() []byte {
	return bytes.ReplaceAll(config.Schema(), []byte("{adapters}"), []byte(strings.Join(builtIn(), ", ")))
}

func tableHead(b *bytes.Buffer) {
	b.WriteString("| field | type | default | |\n|---|---|---|---|\n")
}

func row(b *bytes.Buffer, path, typ, def, about string) {
	cell := strings.NewReplacer("|", "\\|", "\n", " ")
	fmt.Fprintf(b, "| `%s` | %s | %s | %s |\n", path, cell.Replace(typ), cell.Replace(def), cell.Replace(about))
}

// schema is the part of JSON Schema that package conf uses.
type schema struct {
	Short                string             `json:"x-short"`  // field whose value may replace the block
	Single               bool               `json:"x-single"` // an item may replace the list
	Ref                  string             `json:"$ref"`
	Defs                 map[string]*schema `json:"$defs"`
	Type                 any                `json:"type"`
	Description          string             `json:"description"`
	Default              json.RawMessage    `json:"default"`
	Enum                 []any              `json:"enum"`
	Minimum              *json.Number       `json:"minimum"`
	ExclusiveMinimum     *json.Number       `json:"exclusiveMinimum"`
	Maximum              *json.Number       `json:"maximum"`
	Pattern              string             `json:"pattern"`
	Required             []string           `json:"required"`
	Properties           map[string]*schema `json:"properties"`
	Items                *schema            `json:"items"`
	AnyOf                []*schema          `json:"anyOf"`
	AdditionalProperties json.RawMessage    `json:"additionalProperties"`
	PatternProperties    map[string]*schema `json:"patternProperties"`

	order []string          // of the properties in the source
	told  map[string]string // path by words of the larger blocks that were written
}

func parseSchema(raw []byte) (*schema, error) {
	s := new(schema)
	return s, json.Unmarshal(raw, s)
}

// UnmarshalJSON records the order of the properties.
func (s *schema) UnmarshalJSON(raw []byte) error {
	if string(raw) == "true" || string(raw) == "false" {
		return nil
	}
	type plain schema
	if err := json.Unmarshal(raw, (*plain)(s)); err != nil {
		return err
	}
	var p struct{ Properties json.RawMessage }
	if err := json.Unmarshal(raw, &p); err != nil || p.Properties == nil {
		return err
	}
	dec := json.NewDecoder(bytes.NewReader(p.Properties))
	if _, err := dec.Token(); err != nil {
		return err
	}
	for dec.More() {
		key, err := dec.Token()
		if err != nil {
			return err
		}
		var skipped json.RawMessage
		if err := dec.Decode(&skipped); err != nil {
			return err
		}
		s.order = append(s.order, fmt.Sprint(key))
	}
	return nil
}

// resolve resolves a reference to the definitions of root. Text or a block is
// a block with a short form.
func (s *schema) resolve(root *schema) *schema {
	if len(s.AnyOf) == 2 && s.AnyOf[0].Type == "string" && s.AnyOf[1].Type == "object" {
		r := *s.AnyOf[1]
		r.Short = "text"
		return &r
	}
	if name, ok := strings.CutPrefix(s.Ref, "#/$defs/"); ok && root.Defs[name] != nil {
		r := *root.Defs[name]
		r.Description, r.Default = cmp.Or(s.Description, r.Description), s.Default
		return &r
	}
	return s
}

func (s *schema) properties() map[string]*schema { return s.resolve(s).Properties }

// saidDefault matches a default at the end of a description. It moves to its
// own column.
var saidDefault = regexp.MustCompile(`\s*Default: (.*[^.])\.$`)

// maxDepth bounds the depth of the tables if a schema refers to itself.
const maxDepth = 8

// words returns the names and descriptions of a block's fields, which are equal
// for blocks of one type.
func (s *schema) words() string {
	var b strings.Builder
	for _, name := range s.order {
		b.WriteString(name + ": " + s.Properties[name].Description + "\n")
	}
	return b.String()
}

// rows writes the properties of a block and of the blocks within.
func (s *schema) rows(b *bytes.Buffer, path string, root *schema, depth int) {
	block := s.resolve(root)
	for _, name := range block.order {
		p := block.Properties[name].resolve(root)
		about := p.Description
		if slices.Contains(block.Required, name) {
			about = strings.TrimSpace("Required. " + about)
		}
		def := code(p.Default)
		if m := saidDefault.FindStringSubmatch(about); m != nil {
			about = strings.TrimSpace(about[:len(about)-len(m[0])])
			def = cmp.Or(def, m[1])
		}
		inner, suffix := p, "."
		for inner.Items != nil {
			inner, suffix = inner.Items.resolve(root), "[]"+suffix
		}
		at := path + name + strings.TrimSuffix(suffix, ".")
		words := inner.words()
		told, again := root.told[words]
		if again {
			about += " The fields of its block are those of `" + told + "`."
		}
		row(b, path+name, p.typeName(root), def, about)
		if again || len(inner.Properties) == 0 || depth >= maxDepth {
			continue
		}
		if root.told == nil {
			root.told = make(map[string]string)
		}
		if len(inner.Properties) > 2 {
			root.told[words] = at
		}
		inner.rows(b, path+name+suffix, root, depth+1)
	}
}

func (s *schema) typeName(root *schema) string {
	if len(s.Enum) > 0 {
		var words []string
		for _, e := range s.Enum {
			words = append(words, fmt.Sprintf("`%v`", e))
		}
		return strings.Join(words, ", ")
	}
	switch s.Type {
	case "string":
		if s.Pattern == conf.DurationPattern {
			return "duration"
		}
		return "text"
	case "boolean":
		return "true or false"
	case "integer", "number":
		name := map[any]string{"integer": "number", "number": "number, may be fractional"}[s.Type]
		switch {
		case s.Minimum != nil && s.Maximum != nil:
			name += fmt.Sprintf(", %s to %s", *s.Minimum, *s.Maximum)
		case s.Minimum != nil:
			name += fmt.Sprintf(", at least %s", *s.Minimum)
		case s.ExclusiveMinimum != nil:
			name += fmt.Sprintf(", more than %s", *s.ExclusiveMinimum)
		case s.Maximum != nil:
			name += fmt.Sprintf(", at most %s", *s.Maximum)
		}
		return name
	case "array":
		if s.Single {
			return strings.ReplaceAll(s.Items.resolve(root).typeName(root), " or ", ", ") + " or list"
		}
		if s.Items != nil {
			if of := s.Items.resolve(root).typeName(root); of != "block" {
				return "list of " + of
			}
		}
		return "list"
	case "object":
		switch {
		case s.Short != "":
			return s.Short + " or block"
		case len(s.Properties) == 0 && len(s.AdditionalProperties)+len(s.PatternProperties) > 0:
			return "map"
		}
		return "block"
	default:
		return "any"
	}
}

// code formats a JSON value as in the file.
func code(v json.RawMessage) string {
	if len(v) == 0 {
		return ""
	}
	var s string
	if json.Unmarshal(v, &s) == nil {
		if s == "" {
			return ""
		}
		return "`" + s + "`"
	}
	return "`" + string(v) + "`"
}

func equalJSON(a, b json.RawMessage) bool {
	var x, y bytes.Buffer
	if len(a) == 0 || len(b) == 0 || json.Compact(&x, a) != nil || json.Compact(&y, b) != nil {
		return len(a) == len(b)
	}
	return bytes.Equal(x.Bytes(), y.Bytes())
}
