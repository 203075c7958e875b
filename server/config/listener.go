package config

import (
	"encoding/json"

	"github.com/invopop/jsonschema"

	"github.com/isthmus-mesh/isthmus/internal/conf"
)

// JSONSchemaExtend allows the address in place of the block.
func (Listener) JSONSchemaExtend(s *jsonschema.Schema) {
	s.Extras = map[string]any{conf.ShortField: "address", conf.ShortText: "an address as host:port, or a block with one"}
}

// MarshalJSON encodes a listener in its short form.
func (l Listener) MarshalJSON() ([]byte, error) { return json.Marshal(l.Address) }

// JSONSchemaExtend allows one item in place of the list.
func (Listeners) JSONSchemaExtend(s *jsonschema.Schema) {
	s.Extras = map[string]any{conf.SingleItem: true}
}

// MarshalJSON encodes listeners in their shortest form.
func (l Listeners) MarshalJSON() ([]byte, error) {
	if len(l) == 1 {
		return json.Marshal(l[0])
	}
	return json.Marshal([]Listener(l))
}
