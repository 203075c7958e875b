package main

import (
	"encoding/json"
	"fmt"
	"io"
	"reflect"

	"github.com/isthmus-mesh/isthmus/server/config"
	"github.com/isthmus-mesh/isthmus/server/supervisor"
)

// writeSchema writes a JSON Schema of the configuration file, for editors. It is less strict than the program in one thing: blocks of
// adapters that are not built in are not checked.
func writeSchema(w io.Writer, adapters []supervisor.Description) error {
	s := structSchema(reflect.TypeFor[config.Config](), reflect.ValueOf(config.Default))
	s["$schema"] = "https://json-schema.org/draft/2020-12/schema"
	s["title"] = "Configuration of Isthmus"
	s["required"] = []string{"registries"}

	// The adapters' schemas refer to definitions of their own, so each keeps being a resource of its own ($id).
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

// structSchema returns the schema of a part of the configuration.
func structSchema(t reflect.Type, defaults reflect.Value) map[string]any {
	properties := make(map[string]any)
	for i := range t.NumField() {
		f := t.Field(i)
		if !f.IsExported() {
			continue
		}
		var value reflect.Value
		if defaults.IsValid() {
			value = defaults.Field(i)
		}
		var p map[string]any
		switch {
		case f.Type == reflect.TypeFor[json.RawMessage]():
			p = map[string]any{"type": "object"}
		case f.Type == reflect.TypeFor[config.Listener]():
			p = listenerSchema()
		case f.Type == reflect.TypeFor[config.Listeners]():
			one := listenerSchema()["anyOf"].([]any)
			p = map[string]any{"anyOf": append(one, map[string]any{"type": "array", "minItems": 1, "items": map[string]any{"anyOf": one}})}
		case f.Type.Kind() == reflect.Struct:
			p = structSchema(f.Type, value)
		case f.Type.Kind() == reflect.Map:
			p = map[string]any{"type": "object", "additionalProperties": map[string]any{"type": "string"}}
		case f.Type.Kind() == reflect.Slice:
			p = map[string]any{"type": "array", "minItems": 1, "items": structSchema(f.Type.Elem(), reflect.Value{})}
		case f.Type.Kind() == reflect.Int:
			p = map[string]any{"type": "integer", "minimum": 1}
		case f.Type.Kind() == reflect.Bool:
			p = map[string]any{"type": "boolean"}
		default:
			p = map[string]any{"type": "string"}
		}
		if value.IsValid() && !value.IsZero() {
			switch v := value.Interface().(type) {
			case config.Listener:
				p["default"] = v.Address
			case config.Listeners:
				p["default"] = v[0].Address
			default:
				if f.Type.Kind() != reflect.Struct {
					p["default"] = v
				}
			}
		}
		p["description"] = f.Tag.Get("doc")
		properties[f.Tag.Get("json")] = p
	}
	return map[string]any{"type": "object", "additionalProperties": false, "properties": properties}
}

// listenerSchema returns the schema of a [config.Listener]: an address, or a
// block with one.
func listenerSchema() map[string]any {
	return map[string]any{"anyOf": []any{map[string]any{"type": "string"}, structSchema(reflect.TypeFor[config.Listener](), reflect.Value{})}}
}
