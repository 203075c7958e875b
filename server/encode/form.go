package encode

import "fmt"

// Shape is how a service's instances reach a sink.
type Shape uint8

const (
	// Inline is one ServiceEntry with its endpoints.
	Inline Shape = iota
	// Workload is a ServiceEntry with a workloadSelector, and one WorkloadEntry
	// per instance.
	Workload
)

// String returns the shape's name as in configuration.
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

// Form is a shape and the workarounds that a range of sink versions needs. It
// is comparable; all sinks of one form get the same bytes.
type Form struct {
	Shape Shape
	// OmitVersion leaves metadata.version empty: on Istio 1.11 a version makes
	// every update conflict.
	OmitVersion bool
	// Address gives a ServiceEntry without an address the one that its host
	// hashes to: before Istio 1.25 each change of inline endpoints of an entry
	// without one is a full push.
	Address bool
	// PortSets labels inline endpoints that share an IP with a hash of the IP's
	// ports: before Istio 1.30 a change of one of several ports of one IP is
	// not seen otherwise.
	PortSets bool
	// EmptySelector gives an inline ServiceEntry without endpoints a
	// workloadSelector that nothing matches: before Istio 1.30 the old
	// endpoints of an entry whose list became empty are kept, or the change is
	// a full push anyway.
	EmptySelector bool
	// EndpointsHash labels a ServiceEntry with a hash of its exceptional
	// endpoints, see [EndpointsLabel]: Istio 1.14 to 1.22.3 do not look at what
	// changes while the set of addresses stays the same, unless the entry
	// itself changes, which makes it a full push.
	EndpointsHash bool
	// Legacy is what a Pilot before Istio 1.9 needs to see that a
	// ServiceEntry's endpoints changed.
	Legacy Legacy
	// Synthetic adds the annotations by which Istio 1.4 and 1.5 tell a change
	// of a synthetic ServiceEntry's endpoints from one of the entry itself.
	Synthetic bool
}

// String names the form. It is part of versions and so never changes its
// meaning.
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
	return s
}

// layout is the version of the way in which resources are composed. A change of
// the bytes that the same parts give increments it.
const layout = "1"

func (f Form) hash() Hash { return HashOf([]byte("form"), []byte(layout), []byte(f.String())) }

// Layout is a form made ready to encode many resources. It is immutable.
type Layout struct {
	Form
	composed Hash // of the form, for ServiceEntries that are composed
	plain    Hash // of what of it concerns a ServiceEntry that is not
}

// NewLayout returns the layout of a form.
func NewLayout(f Form) *Layout {
	plain := Form{OmitVersion: f.OmitVersion, EndpointsHash: f.EndpointsHash, Legacy: f.Legacy, Synthetic: f.Synthetic}
	return &Layout{Form: f, composed: f.hash(), plain: plain.hash()}
}

// VersionOf returns the version of a ServiceEntry of the given content, which
// is composed of several parts or served as it is. The version of any other
// kind is its hash.
func (l *Layout) VersionOf(content Hash, composed bool) Hash {
	switch {
	case composed:
		return content + l.composed
	case l.Legacy != NotLegacy, l.EndpointsHash:
		return content + l.plain
	}
	return content
}
