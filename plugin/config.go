package plugin

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
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
)

// configType is one block of a registry's configuration: its schema, which comes from the Go type, and its defaults.
type configType[C any] struct {
	block    string // "config": the first part of every path
	defaults C
	schema   []byte // JSON Schema, draft 2020-12
	doc      any    // the schema decoded
	checker  *validate.Schema
}

const schemaURL = "schema.json"

// newConfigType makes the schema. The defaults are noted in it, for documentation.
func newConfigType[C any](block string, defaults C) (t *configType[C], err error) {
	// The library panics on types that it cannot describe.
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("schema of %s from %T: %v", block, defaults, p)
		}
	}()
	r := jsonschema.Reflector{
		Anonymous:                  true,
		DoNotReference:             true,
		RequiredFromJSONSchemaTags: true,
	}
	s := r.Reflect(defaults)
	known, err := json.Marshal(defaults)
	if err != nil {
		return nil, fmt.Errorf("defaults of %s: %w", block, err)
	}
	var values any
	if err := json.Unmarshal(known, &values); err != nil {
		return nil, fmt.Errorf("defaults of %s: %w", block, err)
	}
	noteDefaults(s, values)
	t = &configType[C]{block: block, defaults: defaults}
	if t.schema, err = json.Marshal(s); err != nil {
		return nil, fmt.Errorf("schema of %s: %w", block, err)
	}
	if t.doc, err = validate.UnmarshalJSON(bytes.NewReader(t.schema)); err != nil {
		return nil, fmt.Errorf("schema of %s: %w", block, err)
	}
	c := validate.NewCompiler()
	if err := c.AddResource(schemaURL, t.doc); err != nil {
		return nil, fmt.Errorf("schema of %s: %w", block, err)
	}
	if t.checker, err = c.Compile(schemaURL); err != nil {
		return nil, fmt.Errorf("schema of %s: %w", block, err)
	}
	return t, nil
}

// noteDefaults writes the values that are not zero into the schema.
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
			if !p.Value.WriteOnly && p.Value.Default == nil && !reflect.ValueOf(v).IsZero() {
				p.Value.Default = v
			}
		}
	}
}

// decode returns the configuration in raw over the defaults. Everything that is wrong with it is in the error, as *FieldError with the
// whole path; an error is never about anything else. With an error the configuration is what could be read of it.
func (t *configType[C]) decode(raw []byte) (C, error) {
	return t.decodeOver(raw, copyOf(t.defaults), validateValue[C])
}

// decodeAlone is decode without defaults, and with a check in place of the method Validate.
func (t *configType[C]) decodeAlone(raw []byte, check func(C) error) (C, error) {
	var c C
	return t.decodeOver(raw, c, check)
}

func (t *configType[C]) decodeOver(raw []byte, c C, check func(C) error) (C, error) {
	var zero C
	raw = bytes.TrimSpace(raw)
	if len(raw) == 0 || bytes.Equal(raw, []byte("null")) {
		raw = []byte("{}") // a block that is there but empty
	}
	v, err := validate.UnmarshalJSON(bytes.NewReader(raw))
	if err != nil {
		return zero, &FieldError{Field: t.block, Reason: "not JSON: " + err.Error()}
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
		return c, t.errorOf(check(c))
	}
	return c, errors.Join(t.schemaErrors(wrong), t.rest(wrong, func() error { return check(c) }))
}

// validateValue calls the method Validate of c or *c, if there is one.
func validateValue[C any](c C) error {
	if v, ok := any(&c).(interface{ Validate() error }); ok {
		return v.Validate()
	}
	return nil
}

// invalid is one thing that the schema finds wrong.
type invalid struct {
	FieldError
	location []string // in the document
	unusable bool     // the value at the location cannot be used; otherwise something is missing there
}

// schemaErrors returns what the schema found as errors.
func (t *configType[C]) schemaErrors(wrong []invalid) error {
	all := make([]error, len(wrong))
	for i := range wrong {
		all[i] = &wrong[i].FieldError
	}
	return errors.Join(all...)
}

// rest returns what a check of the remaining configuration finds, after the schema found something wrong and what cannot be used was
// left out. It drops what may come of that: what is about the same fields, or names one of them.
func (t *configType[C]) rest(wrong []invalid, check func() error) (err error) {
	// A check may rely on what the schema promises.
	defer func() {
		if p := recover(); p != nil {
			err = nil
		}
	}()
	var all []error
	for _, f := range fieldErrors(t.errorOf(check())) {
		if !slices.ContainsFunc(wrong, func(w invalid) bool { return w.explains(f) }) {
			all = append(all, f)
		}
	}
	return errors.Join(all...)
}

// explains says whether f may be there because of w alone.
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

// inBlock says whether a path is that of a block or of something in it.
func inBlock(path, block string) bool {
	rest, ok := strings.CutPrefix(path, block)
	return ok && (rest == "" || rest[0] == '.' || rest[0] == '[')
}

// prune returns doc without what cannot be used. Lists keep their length.
func prune(doc any, wrong []invalid) any {
	for _, w := range wrong {
		if !w.unusable {
			continue
		}
		if len(w.location) == 0 {
			return map[string]any{}
		}
		within, last := doc, len(w.location)-1
		for _, token := range w.location[:last] {
			within = child(within, token)
		}
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

// child returns what a document has at one step of a location, nil if there is nothing.
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

// errorOf turns an error about the block into one whose *FieldErrors have whole paths.
func (t *configType[C]) errorOf(err error) error {
	var all []error
	for _, f := range fieldErrors(err) {
		switch {
		case f.Field == "":
			f = &FieldError{Field: t.block, Reason: f.Reason}
		case f.Field != t.block && !strings.HasPrefix(f.Field, t.block+".") && !strings.HasPrefix(f.Field, t.block+"["):
			f = &FieldError{Field: t.block + "." + f.Field, Reason: f.Reason}
		}
		all = append(all, f)
	}
	return errors.Join(all...)
}

// fieldErrors returns every *FieldError in err's tree. A branch without any becomes one without a field.
func fieldErrors(err error) []*FieldError {
	if err == nil {
		return nil
	}
	if f, ok := err.(*FieldError); ok { //nolint:errorlint // the tree is walked here
		return []*FieldError{f}
	}
	if j, ok := err.(interface{ Unwrap() []error }); ok { //nolint:errorlint // the same
		var out []*FieldError
		for _, e := range j.Unwrap() {
			out = append(out, fieldErrors(e)...)
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

// dropNulls removes the fields of objects that are null: an empty line in YAML, a field that is not set.
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

// check validates a decoded document against the schema and returns what is wrong, in the order of the texts.
func (t *configType[C]) check(v any) []invalid {
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
	t.leaves(e, v, func(f invalid) {
		if !seen[f.FieldError] {
			seen[f.FieldError] = true
			all = append(all, f)
		}
	})
	slices.SortStableFunc(all, func(a, b invalid) int { return strings.Compare(a.Error(), b.Error()) })
	return all
}

// leaves calls f with what a validation error comes down to.
func (t *configType[C]) leaves(e *validate.ValidationError, doc any, f func(invalid)) {
	at := pathOf(t.block, doc, e.InstanceLocation)
	unusable := func(reason string) {
		f(invalid{FieldError{Field: at, Reason: reason}, e.InstanceLocation, true})
	}
	switch k := e.ErrorKind.(type) {
	case *kind.AdditionalProperties:
		known := t.properties(e.SchemaURL)
		for _, name := range k.Properties {
			f(invalid{
				FieldError{Field: joinPath(at, name), Reason: "unknown field" + suggest(name, known)},
				append(slices.Clone(e.InstanceLocation), name), true,
			})
		}
		return
	case *kind.Required:
		for _, name := range k.Missing {
			f(invalid{FieldError{Field: joinPath(at, name), Reason: "is required"}, e.InstanceLocation, false})
		}
		return
	case *kind.Type:
		unusable(fmt.Sprintf("must be %s, not %s", article(k.Want), articleOf(k.Got)))
		return
	case *kind.Enum:
		var want []string
		for _, w := range k.Want {
			want = append(want, fmt.Sprint(w))
		}
		got := fmt.Sprint(k.Got)
		unusable(fmt.Sprintf("must be one of %s, not %s", strings.Join(want, ", "), clip(strconv.Quote(got), 80)) + didYouMean(got, want))
		return
	case *kind.Pattern:
		if k.Want == durationPattern {
			unusable(errDuration.Error())
		} else {
			unusable("must match " + k.Want) // the value may be a secret
		}
		return
	case *kind.OneOf, *kind.AnyOf:
		var reasons []string
		for _, c := range e.Causes {
			t.leaves(c, doc, func(l invalid) {
				if l.Field != at {
					l.Reason = l.Field + ": " + l.Reason
				}
				reasons = append(reasons, l.Reason)
			})
		}
		if len(reasons) == 0 {
			reasons = []string{"fits more than one form"}
		}
		unusable(strings.Join(reasons, ", or "))
		return
	}
	if len(e.Causes) == 0 {
		unusable(e.ErrorKind.LocalizedString(message.NewPrinter(language.English)))
		return
	}
	for _, c := range e.Causes {
		t.leaves(c, doc, f)
	}
}

// properties returns the names of the properties of the schema at a URL like "schema.json#/properties/tls".
func (t *configType[C]) properties(url string) []string {
	_, pointer, _ := strings.Cut(url, "#")
	v := t.doc
	for token := range strings.SplitSeq(strings.TrimPrefix(pointer, "/"), "/") {
		if token == "" {
			continue
		}
		token = strings.NewReplacer("~1", "/", "~0", "~").Replace(token)
		switch x := v.(type) {
		case map[string]any:
			v = x[token]
		case []any:
			i, err := strconv.Atoi(token)
			if err != nil || i < 0 || i >= len(x) {
				return nil
			}
			v = x[i]
		}
	}
	object, _ := v.(map[string]any)
	properties, _ := object["properties"].(map[string]any)
	return slices.Sorted(maps.Keys(properties))
}

// pathOf writes a location in a document as a dotted path.
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

func joinPath(path, name string) string {
	plain := name != "" && strings.IndexFunc(name, func(r rune) bool {
		return r != '_' && r != '-' && !unicode.IsLetter(r) && !unicode.IsDigit(r)
	}) < 0
	if plain {
		return path + "." + name
	}
	return path + "[" + strconv.Quote(clip(name, 100)) + "]"
}

// suggest returns what to say of a name that is not among the known ones.
func suggest(name string, known []string) string {
	if s := didYouMean(name, known); s != "" {
		return s
	}
	switch {
	case len(known) == 0:
		return "; there are none here"
	case len(known) <= 12:
		return "; there are " + strings.Join(known, ", ")
	}
	return ""
}

// didYouMean returns "; did you mean NAME?" if one of known is much like name, else "".
func didYouMean(name string, known []string) string {
	if len(name) > 100 {
		return ""
	}
	best, distance := "", 1+max(1, min(3, len(name)/3))
	for _, k := range known {
		if d := editDistance(fold(name), fold(k)); d < distance {
			best, distance = k, d
		}
	}
	if best == "" {
		return ""
	}
	return "; did you mean " + best + "?"
}

// fold makes spellings of one name equal: tokenFile, token-file, token_file.
func fold(s string) string {
	return strings.ToLower(strings.NewReplacer("_", "", "-", "").Replace(s))
}

// editDistance is the number of letters to insert, delete, replace or swap with a neighbour that turn a into b.
func editDistance(a, b string) int {
	x, y := []rune(a), []rune(b)
	before, last, row := make([]int, len(y)+1), make([]int, len(y)+1), make([]int, len(y)+1)
	for j := range row {
		row[j] = j
	}
	for i := 1; i <= len(x); i++ {
		before, last, row = last, row, before
		row[0] = i
		for j := 1; j <= len(y); j++ {
			cost := 1
			if x[i-1] == y[j-1] {
				cost = 0
			}
			row[j] = min(last[j]+1, row[j-1]+1, last[j-1]+cost)
			if i > 1 && j > 1 && x[i-1] == y[j-2] && x[i-2] == y[j-1] {
				row[j] = min(row[j], before[j-2]+1)
			}
		}
	}
	return row[len(y)]
}

func article(types []string) string {
	out := make([]string, 0, len(types))
	for _, t := range types {
		out = append(out, articleOf(t))
	}
	return strings.Join(out, " or ")
}

// articleOf puts an article before the name of a JSON type.
func articleOf(typ string) string {
	switch typ {
	case "array":
		return "a list"
	case "object", "integer":
		return "an " + typ
	case "null":
		return "nothing"
	case "boolean":
		return "true or false"
	}
	return "a " + typ
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

// copyOf returns a copy of v that shares no list, map or pointer with it, so that decoding over the copy does not reach v.
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
