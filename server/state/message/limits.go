package message

import "fmt"

// Limits bound what one registry has.
type Limits struct {
	Resources, Services int
	Bytes               int // of metadata and bodies
}

// LimitError is the refusal of a resource that would exceed a limit.
type LimitError struct {
	Field string // of the configuration
	Value int
}

// Error implements error.
func (e *LimitError) Error() string {
	return fmt.Sprintf("with it the registry would exceed %s (%d); raise that, or select less in the registry's config", e.Field, e.Value)
}

// Check returns a [*LimitError] if a registry would exceed a limit by a
// resource of a size, in place of one of the size was, or of none if that is
// negative. A replacement that is no larger is always allowed.
func (l Limits) Check(have Limits, isEntry bool, size, was int) error {
	switch isNew := was < 0; {
	case isNew && have.Resources >= l.Resources:
		return &LimitError{"limits.resources_per_registry", l.Resources}
	case isNew && isEntry && have.Services >= l.Services:
		return &LimitError{"limits.services_per_registry", l.Services}
	case size > was && have.Bytes+size-max(was, 0) > l.Bytes:
		return &LimitError{"limits.bytes_per_registry", l.Bytes}
	}
	return nil
}
