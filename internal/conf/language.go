package conf

import (
	"encoding/json"
	"reflect"
	"strconv"
	"strings"

	"github.com/invopop/jsonschema"
)

// UnknownField begins the reason for a field that does not exist.
const UnknownField = "unknown field"

// Language holds the terms of a kind of document.
type Language struct {
	names  map[string]string // JSON types, with an article
	values bool              // messages quote numbers and booleans, and call text "text"
	mapper func(reflect.Type) *jsonschema.Schema
	most   int  // number of names that a suggestion lists
	sorted bool // by name, not in the order of the type
}

// JSON is the language of blocks of adapters.
var JSON = &Language{
	names: map[string]string{
		"array": "a list", "object": "an object", "integer": "an integer", "number": "a number", "string": "a string",
		"boolean": "true or false", "null": "nothing",
	},
	most: 12, sorted: true,
}

// YAML is the language of the configuration file. A json.RawMessage in it is a
// block with fields of another program.
var YAML = &Language{
	names: map[string]string{
		"array": "a list", "object": "a block of fields", "integer": "a whole number", "number": "a number", "string": "a word",
		"boolean": "true or false", "null": "nothing",
	},
	values: true,
	mapper: func(t reflect.Type) *jsonschema.Schema {
		if t == reflect.TypeFor[json.RawMessage]() {
			return &jsonschema.Schema{Type: "object"}
		}
		return nil
	},
	most: 1000,
}

func typeOf(v any) string {
	switch v.(type) {
	case nil:
		return "null"
	case bool:
		return "boolean"
	case string:
		return "string"
	case []any:
		return "array"
	case map[string]any:
		return "object"
	}
	return "number"
}

// got describes a value without revealing one that may be a secret.
func (l *Language) got(v any) string {
	switch v := v.(type) {
	case bool:
		if l.values {
			return strconv.FormatBool(v)
		}
	case json.Number:
		if l.values {
			return "the number " + v.String()
		}
	case string:
		if l.values {
			return "text"
		}
	}
	return l.names[typeOf(v)]
}

// types describes the allowed types of a value.
func (l *Language) types(types []string) string {
	out := make([]string, 0, len(types))
	for _, t := range types {
		out = append(out, l.names[t])
	}
	return strings.Join(out, " or ")
}

// suggest returns the cure for an unknown name.
func (l *Language) suggest(name string, known []string) string {
	switch s := didYouMean(name, known); {
	case s != "":
		return s
	case len(known) == 0:
		return "; there are none here"
	case len(known) <= l.most:
		return "; there are " + strings.Join(known, ", ")
	}
	return ""
}

// didYouMean returns "; did you mean NAME?" if a known name resembles name,
// else "".
func didYouMean(name string, known []string) string {
	if best := Nearest(name, known); best != "" {
		return "; did you mean " + best + "?"
	}
	return ""
}
