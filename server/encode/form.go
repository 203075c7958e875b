package encode

import "fmt"

// Shape is the way in which instances of a service are sent.
type Shape uint8

const (
	// Inline sends one ServiceEntry with its endpoints.
	Inline Shape = iota
	// Workload sends a ServiceEntry with a workloadSelector, and one
	// WorkloadEntry per instance.
	Workload
)

// String returns the name in the configuration.
func (s Shape) String() string {
	if s == Workload {
		return "workload"
	}
	return "inline"
}

// ParseShape is the inverse of [Shape.String].
func ParseShape(s string) (Shape, error) {
	switch s {
	case "inline":
		return Inline, nil
	case "workload":
		return Workload, nil
	}
	return 0, fmt.Errorf("shape %q: must be inline or workload", s)
}

// Form is a shape with the workarounds that a range of sink versions needs. It
// is comparable; all sinks of one form receive the same bytes.
type Form struct {
	Shape Shape
	// OmitVersion omits metadata.version: on Istio 1.11 a version makes every
	// update conflict.
	OmitVersion bool
	// Address gives a ServiceEntry without an address the one that its host
	// hashes to: before Istio 1.25, a change of inline endpoints of an entry
	// without one is a full push.
	Address bool
	// PortSets labels inline endpoints that share an IP with a hash of the
	// ports of that IP: before Istio 1.30, changing one of several ports of one
	// IP has no effect otherwise.
	PortSets bool
	// EmptySelector gives an inline ServiceEntry without endpoints a
	// workloadSelector that matches nothing: before Istio 1.30, an entry that
	// loses its last endpoint retains the old ones, or the change is a full
	// push anyway.
	EmptySelector bool
	// EndpointsHash labels a ServiceEntry with a hash of its exceptional
	// endpoints, see [EndpointsLabel]: Istio 1.14 to 1.22.3 compare only the
	// set of addresses of a service and ignore other changes of endpoints,
	// unless the entry itself changes, which is a full push.
	EndpointsHash bool
	// Legacy is the workaround by which a Pilot before Istio 1.9 notices that
	// the endpoints of a ServiceEntry changed.
	Legacy Legacy
	// Synthetic adds the annotations by which Istio 1.4 and 1.5 distinguish
	// changes of the endpoints of a synthetic ServiceEntry from changes of the
	// entry.
	Synthetic bool
	// Registry adds [RegistryAnnotation], for clients that ask for it.
	Registry bool
}

// String names the form. The name is part of versions, so its meaning never
// changes.
func (f Form) String() string {
	s := f.Shape.String()
	if f.OmitVersion {
		s += ",omit-version"
	}
	if f.Address {
		s += ",address"
	}
	if f.PortSets {
		s += ",port-sets"
	}
	if f.EmptySelector {
		s += ",empty-selector"
	}
	if f.EndpointsHash {
		s += ",endpoints-hash"
	}
	if f.Legacy != NotLegacy {
		s += "," + f.Legacy.String()
	}
	if f.Synthetic {
		s += ",synthetic"
	}
	if f.Registry {
		s += ",registry"
	}
	return s
}

// layout is the version of the composition of resources. A change of the bytes
// that equal parts result in increments it.
const layout = "1"

func (f Form) hash() Hash { return HashOf([]byte("form"), []byte(layout), []byte(f.String())) }

// Layout is a form prepared for encoding many resources. It is immutable.
type Layout struct {
	Form
	composed Hash // of the form, for composed ServiceEntries
	plain    Hash // of the form, for ServiceEntries served as they are
}

// NewLayout returns the layout of a form.
func NewLayout(f Form) *Layout {
	plain := Form{OmitVersion: f.OmitVersion, EndpointsHash: f.EndpointsHash, Legacy: f.Legacy, Synthetic: f.Synthetic}
	return &Layout{Form: f, composed: f.hash(), plain: plain.hash()}
}

// VersionOf returns the version of a ServiceEntry with that content hash,
// composed of several parts or served as it is. For all other kinds the content
// hash is the version.
func (l *Layout) VersionOf(content Hash, composed bool) Hash {
	switch {
	case composed:
		return content + l.composed
	case l.Legacy != NotLegacy, l.EndpointsHash:
		return content + l.plain
	}
	return content
}
