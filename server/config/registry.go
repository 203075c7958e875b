package config

import (
	"encoding/json"

	"github.com/invopop/jsonschema"

	"github.com/isthmus-mesh/isthmus/internal/conf"
)

// UnmarshalJSON decodes a registry over [DefaultRegistry].
func (r *Registry) UnmarshalJSON(b []byte) error {
	type plain Registry // without this method
	*r = DefaultRegistry
	return json.Unmarshal(b, (*plain)(r))
}

// JSONSchemaExtend documents the defaults.
func (Registry) JSONSchemaExtend(s *jsonschema.Schema) {
	if err := conf.NoteDefaults(s, DefaultRegistry); err != nil {
		panic("BUG: config: " + err.Error())
	}
}
