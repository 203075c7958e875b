package main

import (
	"encoding/json"
	"fmt"
	"io"
	"slices"

	"github.com/isthmus-mesh/isthmus/internal/conf"
)

// schemaID is the identity of the schema of the built-in adapters, and where
// editors find it: the newest one. A release has its own beside its archives.
const schemaID = "https://raw.githubusercontent.com/isthmus-mesh/isthmus/main/docs/configuration.schema.json"

// writeSchema writes a JSON Schema of the configuration file for editors.
// Unlike the program it does not check blocks of adapters that it does not
// know. With adapters that are not built in it is another schema than that of
// schemaID, and has no identity.
func writeSchema(w io.Writer, adapters []described) error {
	var s map[string]any
	if err := json.Unmarshal(fileSchema(), &s); err != nil {
		return fmt.Errorf("schema of the file: %w", err)
	}
	s = forEditors(s)
	if !slices.ContainsFunc(adapters, func(a described) bool { return !a.builtIn }) {
		s["$id"] = schemaID
	}
	s["$schema"] = "https://json-schema.org/draft/2020-12/schema"
	s["title"] = "Configuration of Isthmus"
	s["required"] = []string{"registries"}

	// The schemas of adapters refer to definitions of their own, so each is a
	// resource of its own ($id).
	defs := make(map[string]any)
	var choices []any
	for _, a := range adapters {
		then := make(map[string]any)
		for field, raw := range map[string][]byte{"config": a.ConfigSchema, "translate": a.TranslateSchema} {
			if len(raw) == 0 {
				continue
			}
			var block map[string]any
			if err := json.Unmarshal(raw, &block); err != nil {
				return fmt.Errorf("adapter %s: %s schema: %w", a.Name, field, err)
			}
			id := "https://isthmus.invalid/" + a.Name + "/" + field
			block["$id"] = id
			defs[a.Name+"-"+field] = block
			then[field] = map[string]any{"$ref": id}
		}
		choices = append(choices, map[string]any{
			"if":   map[string]any{"properties": map[string]any{"type": map[string]any{"const": a.Name}}, "required": []string{"type"}},
			"then": map[string]any{"properties": then},
		})
	}
	s["$defs"] = defs
	items := s["properties"].(map[string]any)["registries"].(map[string]any)["items"].(map[string]any)
	items["required"] = []string{"name", "type"}
	items["allOf"] = choices

	enc := json.NewEncoder(w)
	enc.SetEscapeHTML(false)
	enc.SetIndent("", "  ")
	if err := enc.Encode(s); err != nil {
		return fmt.Errorf("write: %w", err)
	}
	return nil
}

// forEditors returns a schema with the bounds that the program checks itself,
// and with both forms of values that have a shorter one.
func forEditors(s map[string]any) map[string]any {
	properties, _ := s["properties"].(map[string]any)
	for name, p := range properties {
		properties[name] = forEditors(p.(map[string]any))
	}
	var forms []any
	switch s["type"] {
	case "integer":
		s["minimum"] = 1
		if s[conf.Zero] != nil {
			s["minimum"] = 0
			delete(s, conf.Zero)
		}
	case "number":
		s["minimum"], s["maximum"] = 0, 1
	case "array":
		items := forEditors(s["items"].(map[string]any))
		s["items"], s["minItems"] = items, 1
		if s[conf.SingleItem] != nil {
			forms, _ = items["anyOf"].([]any)
		}
	case "object":
		if s[conf.ShortField] != nil {
			forms = []any{map[string]any{"type": "string"}}
		}
	}
	if forms == nil {
		return s
	}
	out := map[string]any{"anyOf": append(forms[:len(forms):len(forms)], s)}
	for _, key := range []string{"default", "description"} {
		if s[key] != nil {
			out[key] = s[key]
		}
		delete(s, key)
	}
	for _, key := range []string{conf.ShortField, conf.ShortText, conf.SingleItem} {
		delete(s, key)
	}
	return out
}
