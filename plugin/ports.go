package plugin

import (
	"fmt"
	"math"
	"slices"
	"strconv"

	"github.com/isthmus-mesh/isthmus/plugin/registry"
)

// PortKey is a port that instances declare in their metadata.
type PortKey struct {
	Name     string `json:"name,omitempty" jsonschema:"required" jsonschema_description:"The port's name, for example grpc."`
	Key      string `json:"key,omitempty" jsonschema:"required" jsonschema_description:"Metadata key that holds its number, for example gRPC_port."`
	Protocol string `json:"protocol,omitempty" jsonschema_description:"Its protocol. Default: what its name says."`
}

// PortKeys is a list of such ports in a configuration.
type PortKeys []PortKey

// Check validates the list and returns each error as a *[FieldError] of the
// given field.
func (k PortKeys) Check(field string) (errs []error) {
	for i, p := range k {
		bad := func(name, reason string) {
			errs = append(errs, &FieldError{Field: fmt.Sprintf("%s[%d].%s", field, i, name), Reason: reason})
		}
		if p.Name == "" {
			bad("name", "is missing; several ports are told apart by name")
		}
		if p.Key == "" {
			bad("key", "is missing; it is the metadata key that holds the number")
		}
		if slices.ContainsFunc(k[:i], func(o PortKey) bool { return o.Name == p.Name }) {
			bad("name", fmt.Sprintf("%q is listed twice", p.Name))
		}
	}
	return errs
}

// Append appends the ports that the metadata declares to those of an instance,
// except for numbers that are there.
func (k PortKeys) Append(ports []registry.Port, meta map[string]string) []registry.Port {
	for _, p := range k {
		n, ok := portNumber(meta[p.Key])
		if ok && !slices.ContainsFunc(ports, func(o registry.Port) bool { return o.Number == n }) {
			ports = append(ports, registry.Port{Name: p.Name, Number: n, Protocol: p.Protocol})
		}
	}
	return ports
}

// Problem describes metadata that Append cannot use, for [Catalog].Problem: the
// first such value and the number of the others. It returns "" for none.
func (k PortKeys) Problem(instances []registry.Instance) string {
	first, n := "", 0
	for i := range instances {
		for _, p := range k {
			value, declared := instances[i].Meta[p.Key]
			if _, ok := portNumber(value); ok || !declared {
				continue
			}
			if n++; n == 1 {
				first = fmt.Sprintf("instance %s has %q as %s in its metadata, which is not a port number, so it is served without the port %q: register it with 1 to 65535, "+
					"or change config.ports", instances[i].ID, Excerpt(value), p.Key, p.Name)
			}
		}
	}
	if n > 1 {
		return fmt.Sprintf("%s (and %d more like it)", first, n-1)
	}
	return first
}

func portNumber(text string) (number int, ok bool) {
	n, err := strconv.Atoi(text)
	return n, err == nil && n >= 1 && n <= math.MaxUint16
}
