package conf

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"unicode"

	"github.com/invopop/jsonschema"
	validate "github.com/santhosh-tekuri/jsonschema/v6"
	"github.com/santhosh-tekuri/jsonschema/v6/kind"
	"golang.org/x/text/language"
	"golang.org/x/text/message"

	"github.com/isthmus-mesh/isthmus/internal/clip"
	"github.com/isthmus-mesh/isthmus/translate"
)

// FieldError is the error of one field, with its whole path.
type FieldError = translate.FieldError

// DurationPattern is the schema's pattern of a duration.
const DurationPattern = `^(0|([0-9]+(\.[0-9]+)?(ns|us|µs|ms|s|m|h))+)$`

// ErrDuration is the error of an invalid duration.
var ErrDuration = errors.New(`must be a duration such as "5s" or "1m30s"`)

// Type is a kind of configuration: the schema of a Go type, and its defaults.
type Type[C any] struct {
	// Defaults are the values of missing fields.
	Defaults C
	// Schema is the JSON Schema, draft 2020-12.
	Schema []byte

	block   string // "config": the first part of every path; may be empty
	lang    *Language
	schema  *jsonschema.Schema
	checker *validate.Schema
}

const schemaURL = "schema.json"

// New returns the type of a block, or of a file if block is "". The schema
// documents the defaults.
func New[C any](block string, defaults C, lang *Language) (t *Type[C], err error) {
	// The library panics on unsupported types.
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("schema of %s from %T: %v", block, defaults, p)
		}
	}()
	r := jsonschema.Reflector{
		Anonymous:                  true,
		DoNotReference:             true,
		RequiredFromJSONSchemaTags: true,
		Mapper:                     lang.mapper,
		LookupComment: func(t reflect.Type, field string) string {
			if t.Kind() != reflect.Struct || field == "" {
				return ""
			}
			f, _ := t.FieldByName(field)
			return f.Tag.Get("doc")
		},
	}
	s := r.Reflect(defaults)
	if err := NoteDefaults(s, defaults); err != nil {
		return nil, fmt.Errorf("defaults of %s: %w", block, err)
	}
	t = &Type[C]{block: block, Defaults: defaults, lang: lang, schema: s}
	if t.Schema, err = json.Marshal(s); err != nil {
		return nil, fmt.Errorf("schema of %s: %w", block, err)
	}
	doc, err := validate.UnmarshalJSON(bytes.NewReader(t.Schema))
	if err != nil {
		return nil, fmt.Errorf("schema of %s: %w", block, err)
	}
	c := validate.NewCompiler()
	if err := c.AddResource(schemaURL, doc); err != nil {
		return nil, fmt.Errorf("schema of %s: %w", block, err)
	}
	if t.checker, err = c.Compile(schemaURL); err != nil {
		return nil, fmt.Errorf("schema of %s: %w", block, err)
	}
	return t, nil
}

// NoteDefaults writes the defaults of a block into its schema. A type that is
// an item of a list calls it for its own.
func NoteDefaults(s *jsonschema.Schema, defaults any) error {
	known, err := json.Marshal(defaults)
	if err != nil {
		return err
	}
	var values any
	if err := json.Unmarshal(known, &values); err != nil {
		return err
	}
	noteDefaults(s, values)
	return nil
}

// noteDefaults adds non-zero values and explicit false values to the schema.
func noteDefaults(s *jsonschema.Schema, values any) {
	object, ok := values.(map[string]any)
	if !ok || s.Properties == nil {
		return
	}
	for p := s.Properties.Oldest(); p != nil; p = p.Next() {
		switch v := object[p.Key].(type) {
		case nil:
		case map[string]any:
			if p.Value.Properties != nil {
				noteDefaults(p.Value, v)
			} else if len(v) > 0 {
				p.Value.Default = v
			}
		case []any:
			if len(v) > 0 {
				p.Value.Default = v
			}
		default:
			if !p.Value.WriteOnly && p.Value.Default == nil && (v == false || !reflect.ValueOf(v).IsZero()) {
				p.Value.Default = v
			}
		}
	}
}

// Decode decodes raw over the defaults. The error joins all errors of the
// configuration, each a *FieldError with the whole path. With an error, the
// result is the readable part of the configuration.
func (t *Type[C]) Decode(raw []byte) (C, error) {
	return t.decodeOver(raw, copyOf(t.Defaults), validateValue[C])
}

// DecodeAlone is like Decode, without defaults and with a check instead of the
// method Validate.
func (t *Type[C]) DecodeAlone(raw []byte, check func(C) error) (C, error) {
	var c C
	return t.decodeOver(raw, c, check)
}

func (t *Type[C]) decodeOver(raw []byte, c C, check func(C) error) (C, error) {
	var zero C
	raw = bytes.TrimSpace(raw)
	if len(raw) == 0 || bytes.Equal(raw, []byte("null")) {
		raw = []byte("{}") // an empty block
	}
	v, err := validate.UnmarshalJSON(bytes.NewReader(raw))
	if err != nil {
		return zero, &FieldError{Field: t.block, Reason: "not JSON: " + err.Error()}
	}
	if deeper(v, maxDepth) {
		return zero, &FieldError{Field: t.block, Reason: fmt.Sprintf("nested deeper than %d levels", maxDepth)}
	}
	v = dropNulls(v)
	wrong := t.check(v)
	if wrong != nil {
		v = prune(v, wrong)
	}
	clean, err := json.Marshal(v)
	if err != nil {
		return zero, &FieldError{Field: t.block, Reason: err.Error()}
	}
	d := json.NewDecoder(bytes.NewReader(clean))
	d.DisallowUnknownFields()
	if err := d.Decode(&c); err != nil {
		if wrong != nil {
			return zero, t.schemaErrors(wrong)
		}
		field, reason := t.block, err.Error()
		if e, ok := errors.AsType[*json.UnmarshalTypeError](err); ok && e.Field != "" {
			field += "." + e.Field
			reason = fmt.Sprintf("must be %s, not %s", nameOfKind(e.Type.Kind()), e.Value)
		}
		return zero, &FieldError{Field: field, Reason: reason}
	}
	if wrong == nil {
		return c, t.ErrorOf(check(c))
	}
	return c, errors.Join(t.schemaErrors(wrong), t.rest(wrong, func() error { return check(c) }))
}

// validateValue calls the method Validate of c or *c, if it exists.
func validateValue[C any](c C) error {
	if v, ok := any(&c).(interface{ Validate() error }); ok {
		return v.Validate()
	}
	return nil
}

// invalid is one error that the schema finds.
type invalid struct {
	FieldError
	location []string // in the document
	unusable bool     // the value is invalid; otherwise something is missing at the location
}

// schemaErrors converts errors of the schema.
func (t *Type[C]) schemaErrors(wrong []invalid) error {
	all := make([]error, len(wrong))
	for i := range wrong {
		all[i] = &wrong[i].FieldError
	}
	return errors.Join(all...)
}

// rest runs a check of the valid part of a configuration that has errors. It
// drops errors that may be consequences: those about the same fields, or that
// name one of them.
func (t *Type[C]) rest(wrong []invalid, check func() error) (err error) {
	// The check may rely on what the schema guarantees.
	defer func() {
		if p := recover(); p != nil {
			err = nil
		}
	}()
	var all []error
	for _, f := range FieldErrors(t.ErrorOf(check())) {
		if !slices.ContainsFunc(wrong, func(w invalid) bool { return w.explains(f) }) {
			all = append(all, f)
		}
	}
	return errors.Join(all...)
}

// explains reports whether f may be a consequence of w.
func (w invalid) explains(f *FieldError) bool {
	if inBlock(f.Field, w.Field) || inBlock(w.Field, f.Field) && strings.Contains(f.Field, ".") {
		return true
	}
	name := w.Field[strings.LastIndexByte(w.Field, '.')+1:]
	name, _, _ = strings.Cut(name, "[")
	return name != "" && slices.Contains(strings.FieldsFunc(f.Reason, func(r rune) bool {
		return r != '_' && !unicode.IsLetter(r) && !unicode.IsDigit(r)
	}), name)
}

// inBlock reports whether path is block or below it.
func inBlock(path, block string) bool {
	rest, ok := strings.CutPrefix(path, block)
	return ok && (rest == "" || rest[0] == '.' || rest[0] == '[')
}

// prune returns doc without invalid values. Lists keep their length.
func prune(doc any, wrong []invalid) any {
	for _, w := range wrong {
		if !w.unusable {
			continue
		}
		if len(w.location) == 0 {
			return map[string]any{}
		}
		last := len(w.location) - 1
		within := valueAt(doc, w.location[:last])
		switch x := within.(type) {
		case map[string]any:
			delete(x, w.location[last])
		case []any:
			if i, err := strconv.Atoi(w.location[last]); err == nil && i >= 0 && i < len(x) {
				x[i] = nil
			}
		}
	}
	return doc
}

// valueAt returns the value at a location, nil if there is none.
func valueAt(doc any, location []string) any {
	for _, token := range location {
		doc = child(doc, token)
	}
	return doc
}

func child(doc any, token string) any {
	switch x := doc.(type) {
	case map[string]any:
		return x[token]
	case []any:
		if i, err := strconv.Atoi(token); err == nil && i >= 0 && i < len(x) {
			return x[i]
		}
	}
	return nil
}

// ErrorOf adds the path of the block to the *FieldErrors of an error.
func (t *Type[C]) ErrorOf(err error) error {
	var all []error
	for _, f := range FieldErrors(err) {
		switch {
		case f.Field == "":
			f = &FieldError{Field: t.block, Reason: f.Reason}
		case t.block != "" && f.Field != t.block && !strings.HasPrefix(f.Field, t.block+".") && !strings.HasPrefix(f.Field, t.block+"["):
			f = &FieldError{Field: t.block + "." + f.Field, Reason: f.Reason}
		}
		all = append(all, f)
	}
	return errors.Join(all...)
}

// FieldErrors returns every *FieldError in the tree of err. A branch without
// one becomes one without a field.
func FieldErrors(err error) []*FieldError {
	if err == nil {
		return nil
	}
	if f, ok := err.(*FieldError); ok { //nolint:errorlint // the tree is walked here
		return []*FieldError{f}
	}
	if j, ok := err.(interface{ Unwrap() []error }); ok { //nolint:errorlint // the same
		var out []*FieldError
		for _, e := range j.Unwrap() {
			out = append(out, FieldErrors(e)...)
		}
		if len(out) > 0 {
			return out
		}
	}
	if f, ok := errors.AsType[*FieldError](err); ok {
		return []*FieldError{f}
	}
	return []*FieldError{{Reason: err.Error()}}
}

// deeper reports whether lists and objects are nested deeper than a bound.
func deeper(v any, bound int) bool {
	switch v := v.(type) {
	case map[string]any:
		for _, e := range v {
			if deeper(e, bound-1) {
				return true
			}
		}
	case []any:
		for _, e := range v {
			if deeper(e, bound-1) {
				return true
			}
		}
	}
	return bound < 0
}

// dropNulls removes fields that are null, such as empty lines in YAML: they are
// not set.
func dropNulls(v any) any {
	switch v := v.(type) {
	case map[string]any:
		for k, e := range v {
			if e == nil {
				delete(v, k)
				continue
			}
			v[k] = dropNulls(e)
		}
	case []any:
		for i, e := range v {
			v[i] = dropNulls(e)
		}
	}
	return v
}

// check validates a decoded document and returns the errors in the order of
// their texts.
func (t *Type[C]) check(v any) []invalid {
	err := t.checker.Validate(v)
	if err == nil {
		return nil
	}
	e, ok := errors.AsType[*validate.ValidationError](err)
	if !ok {
		return []invalid{{FieldError: FieldError{Field: t.block, Reason: err.Error()}, unusable: true}}
	}
	var all []invalid
	seen := make(map[FieldError]bool)
	t.leaves(e, v, func(f invalid) bool {
		if !seen[f.FieldError] {
			seen[f.FieldError] = true
			all = append(all, f)
		}
		return len(all) < maxProblems
	})
	slices.SortStableFunc(all, func(a, b invalid) int { return strings.Compare(a.Error(), b.Error()) })
	return all
}

// leaves calls f with the innermost causes of a validation error, until it
// returns false.
func (t *Type[C]) leaves(e *validate.ValidationError, doc any, f func(invalid) bool) bool {
	at := pathOf(t.block, doc, e.InstanceLocation)
	unusable := func(reason string) bool {
		return f(invalid{FieldError{Field: at, Reason: reason}, e.InstanceLocation, true})
	}
	switch k := e.ErrorKind.(type) {
	case *kind.AdditionalProperties:
		known := t.properties(e.SchemaURL)
		for _, name := range k.Properties {
			if !f(invalid{
				FieldError{Field: joinPath(at, name), Reason: UnknownField + t.lang.suggest(name, known)},
				append(slices.Clone(e.InstanceLocation), name), true,
			}) {
				return false
			}
		}
		return true
	case *kind.Required:
		for _, name := range k.Missing {
			if !f(invalid{FieldError{Field: joinPath(at, name), Reason: "is required"}, e.InstanceLocation, false}) {
				return false
			}
		}
		return true
	case *kind.Type:
		return unusable(fmt.Sprintf("must be %s, not %s", t.lang.types(k.Want), t.lang.got(valueAt(doc, e.InstanceLocation))))
	case *kind.Enum:
		var want []string
		for _, w := range k.Want {
			want = append(want, fmt.Sprint(w))
		}
		got := fmt.Sprint(k.Got)
		return unusable(fmt.Sprintf("must be one of %s, not %s", strings.Join(want, ", "), clip.Text(strconv.Quote(got), 80)) + didYouMean(got, want))
	case *kind.Pattern:
		if k.Want == DurationPattern {
			return unusable(ErrDuration.Error())
		}
		return unusable("must match " + k.Want) // the value may be a secret
	case *kind.OneOf, *kind.AnyOf:
		var reasons []string
		for _, c := range e.Causes {
			t.leaves(c, doc, func(l invalid) bool {
				if l.Field != at {
					l.Reason = l.Field + ": " + l.Reason
				}
				reasons = append(reasons, l.Reason)
				return true
			})
		}
		if len(reasons) == 0 {
			reasons = []string{"fits more than one form"}
		}
		return unusable(strings.Join(reasons, ", or "))
	}
	if len(e.Causes) == 0 {
		return unusable(e.ErrorKind.LocalizedString(message.NewPrinter(language.English)))
	}
	for _, c := range e.Causes {
		if !t.leaves(c, doc, f) {
			return false
		}
	}
	return true
}

// properties returns the names of the properties of the schema at a URL such as
// "schema.json#/properties/tls".
func (t *Type[C]) properties(url string) (names []string) {
	_, pointer, _ := strings.Cut(url, "#/")
	block, tokens := t.schema, strings.Split(pointer, "/")
	for i := 0; i < len(tokens) && block != nil && pointer != ""; i++ {
		key := ""
		if i+1 < len(tokens) {
			key = strings.NewReplacer("~1", "/", "~0", "~").Replace(tokens[i+1])
		}
		in := map[string][]*jsonschema.Schema{"anyOf": block.AnyOf, "oneOf": block.OneOf, "allOf": block.AllOf}[tokens[i]]
		switch tokens[i] {
		case "items":
			block = block.Items
			continue
		case "additionalProperties":
			block = block.AdditionalProperties
			continue
		case "properties":
			block = property(block, key)
		case "patternProperties":
			block = block.PatternProperties[key]
		case "$defs":
			block = block.Definitions[key]
		default:
			n, err := strconv.Atoi(key)
			if err != nil || n < 0 || n >= len(in) {
				return nil
			}
			block = in[n]
		}
		i++ // the key
	}
	if block == nil || block.Properties == nil {
		return nil
	}
	for p := block.Properties.Oldest(); p != nil; p = p.Next() {
		names = append(names, p.Key)
	}
	if t.lang.sorted {
		slices.Sort(names)
	}
	return names
}

// property returns the schema of a property, nil if there is none.
func property(s *jsonschema.Schema, name string) *jsonschema.Schema {
	if s.Properties == nil {
		return nil
	}
	return s.Properties.Value(name)
}

// pathOf formats a location in a document as a dotted path.
func pathOf(block string, doc any, location []string) string {
	path := block
	for _, token := range location {
		switch x := doc.(type) {
		case []any:
			path += "[" + token + "]"
			i, err := strconv.Atoi(token)
			if err != nil || i < 0 || i >= len(x) {
				return path
			}
			doc = x[i]
		case map[string]any:
			path = joinPath(path, token)
			doc = x[token]
		default:
			return joinPath(path, token)
		}
	}
	return path
}

// maxPlain bounds a name in a path, in bytes.
const maxPlain = 100

func joinPath(path, name string) string {
	plain := name != "" && len(name) <= maxPlain && strings.IndexFunc(name, func(r rune) bool {
		return r != '_' && r != '-' && !unicode.IsLetter(r) && !unicode.IsDigit(r)
	}) < 0
	switch {
	case plain && path == "":
		return name
	case plain:
		return path + "." + name
	}
	return path + "[" + strconv.Quote(clip.Text(name, maxPlain)) + "]"
}

func nameOfKind(k reflect.Kind) string {
	switch k {
	case reflect.Int, reflect.Int8, reflect.Int16, reflect.Int32, reflect.Int64,
		reflect.Uint, reflect.Uint8, reflect.Uint16, reflect.Uint32, reflect.Uint64:
		return "an integer in the range of " + k.String()
	case reflect.Float32, reflect.Float64:
		return "a number in the range of " + k.String()
	case reflect.Slice, reflect.Array:
		return "a list"
	case reflect.Map, reflect.Struct:
		return "an object"
	case reflect.Bool:
		return "true or false"
	}
	return "a " + k.String()
}

// copyOf returns a deep copy of v, so that decoding over the copy does not
// modify v.
func copyOf[T any](v T) T {
	out := reflect.ValueOf(&v).Elem()
	deepen(out)
	return v
}

func deepen(v reflect.Value) {
	switch v.Kind() {
	case reflect.Struct:
		for i := range v.NumField() {
			if f := v.Field(i); f.CanSet() {
				deepen(f)
			}
		}
	case reflect.Array:
		for i := range v.Len() {
			deepen(v.Index(i))
		}
	case reflect.Slice:
		if v.IsNil() {
			return
		}
		c := reflect.MakeSlice(v.Type(), v.Len(), v.Len())
		reflect.Copy(c, v)
		for i := range c.Len() {
			deepen(c.Index(i))
		}
		v.Set(c)
	case reflect.Map:
		if v.IsNil() {
			return
		}
		c := reflect.MakeMapWithSize(v.Type(), v.Len())
		for it := v.MapRange(); it.Next(); {
			e := reflect.New(v.Type().Elem()).Elem()
			e.Set(it.Value())
			deepen(e)
			c.SetMapIndex(it.Key(), e)
		}
		v.Set(c)
	case reflect.Pointer:
		if v.IsNil() || v.Elem().Kind() != reflect.Struct && !v.Elem().CanSet() {
			return
		}
		c := reflect.New(v.Type().Elem())
		c.Elem().Set(v.Elem())
		deepen(c.Elem())
		v.Set(c)
	}
}
