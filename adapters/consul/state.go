package consul

import "github.com/isthmus-mesh/isthmus/plugin"

// state is what the catalog is told of the registry as a whole, by every scope and watch of one Run.
type state struct {
	faults  *plugin.Faults[faultKind]
	listing *plugin.FirstListing
}

func newState(catalog plugin.Catalog) *state {
	return &state{faults: plugin.NewFaults[faultKind](catalog), listing: plugin.NewFirstListing(catalog)}
}

// set says what is wrong with a scope or watch, or with nil that nothing is.
func (s *state) set(part string, f *fault) {
	if f == nil {
		s.faults.Clear(part)
		return
	}
	s.faults.Set(part, f.kind, f.err)
}
