package zookeeper

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"

	"github.com/isthmus-mesh/isthmus/internal/dubbo"
	"github.com/isthmus-mesh/isthmus/plugin/registry"
)

// text is a JSON string; any other value is its JSON text, null is "".
type text string

// UnmarshalJSON implements json.Unmarshaler.
func (t *text) UnmarshalJSON(b []byte) error {
	switch {
	case bytes.Equal(b, []byte("null")):
		*t = ""
	case len(b) > 0 && b[0] == '"':
		var s string
		if err := json.Unmarshal(b, &s); err != nil {
			return err
		}
		*t = text(s)
	default:
		*t = text(b)
	}
	return nil
}

// curator is ServiceInstance of Curator, as its JsonInstanceSerializer writes
// it.
type curator struct {
	Address string          `json:"address"`
	Port    *int            `json:"port"`
	SSLPort *int            `json:"sslPort"`
	Payload json.RawMessage `json:"payload"`
	// Enabled is written by Curator 5, and is true where it is missing.
	Enabled *bool `json:"enabled"`
}

// statusKey is where Spring Cloud keeps the status of an instance.
const statusKey = "instance_status"

// found is the instance that a node is.
type found struct {
	in registry.Instance
	// meta is the metadata before parts of it became something else.
	meta map[string]string
	// dubbo reports that the instance is of a Dubbo application, and revision
	// what of, if the registry has it.
	dubbo    bool
	revision string
}

// parseInstance reads the data of a node below an application.
func parseInstance(id string, data []byte) (found, error) {
	if len(data) > maxValue {
		return found{}, fmt.Errorf("its data has %d bytes, more than %d", len(data), maxValue)
	}
	if v := bytes.TrimLeft(data, " \t\r\n"); len(v) == 0 || v[0] != '{' {
		return found{}, errors.New("its data is not a JSON object, as Curator's service discovery writes it")
	}
	var c curator
	if err := json.Unmarshal(data, &c); err != nil {
		return found{}, fmt.Errorf("its data is not as Curator's service discovery writes it: %w", err)
	}
	f := found{in: registry.Instance{ID: id, Address: c.Address, Disabled: c.Enabled != nil && !*c.Enabled}, meta: metadata(c.Payload)}
	ports, err := dubbo.Endpoints(f.meta)
	if err != nil {
		return found{}, err
	}
	if len(ports) > 0 {
		f.dubbo, f.in.Ports, f.in.Meta, f.revision = true, ports, dubbo.Meta(f.meta), dubbo.Revision(f.meta)
		return f, nil
	}
	for _, p := range []struct {
		name   string
		number *int
	}{{"http", c.Port}, {"https", c.SSLPort}} {
		if p.number == nil || *p.number == 0 {
			continue
		}
		if *p.number < 0 || *p.number > math.MaxUint16 {
			return found{}, fmt.Errorf("%d is not a port", *p.number)
		}
		f.in.Ports = append(f.in.Ports, registry.Port{Name: p.name, Number: *p.number, Protocol: p.name})
	}
	if len(f.in.Ports) == 1 && f.in.Ports[0].Name == "http" { // it says nothing of the protocol
		f.in.Ports[0].Name, f.in.Ports[0].Protocol = "", ""
	}
	switch f.meta[statusKey] {
	case "UP":
		f.in.Health = registry.HealthPassing
	case "DOWN":
		f.in.Health = registry.HealthCritical
	case "OUT_OF_SERVICE":
		f.in.Disabled = true
	}
	f.in.Meta = maps.Clone(f.meta)
	delete(f.in.Meta, statusKey)
	if len(f.in.Meta) == 0 {
		f.in.Meta = nil
	}
	return f, nil
}

// metadata returns the metadata of a payload: its field metadata, as Dubbo and
// Spring Cloud have it, or else its fields that are no objects.
func metadata(payload json.RawMessage) map[string]string {
	var fields map[string]json.RawMessage
	if json.Unmarshal(payload, &fields) != nil {
		return nil // a text or nothing, of a program of one's own
	}
	var inner map[string]json.RawMessage
	if m, ok := fields["metadata"]; ok && json.Unmarshal(m, &inner) == nil {
		fields = inner
	}
	meta := map[string]string{}
	for _, key := range slices.Sorted(maps.Keys(fields)) {
		v := bytes.TrimSpace(fields[key])
		if key == "@class" || len(v) == 0 || v[0] == '{' || v[0] == '[' {
			continue
		}
		var t text
		if json.Unmarshal(v, &t) == nil && t != "" {
			meta[key] = string(t)
		}
	}
	if len(meta) == 0 {
		return nil
	}
	return meta
}
