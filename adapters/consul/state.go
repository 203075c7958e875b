package consul

import "github.com/isthmus-mesh/isthmus/plugin"

// state is the state of the registry as reported to the catalog, by every scope
// and watch of one Run.
type state struct {
	faults  *plugin.Faults[faultKind]
	listing *plugin.FirstListing
}

func newState(catalog plugin.Catalog) *state {
	return &state{faults: plugin.NewFaults[faultKind](catalog), listing: plugin.NewFirstListing(catalog)}
}

// set sets the fault of a scope or watch; nil clears it.
func (s *state) set(part string, f *fault) {
	if f == nil {
		s.faults.Clear(part)
		return
	}
	s.faults.Set(part, f.kind, f.err)
}
