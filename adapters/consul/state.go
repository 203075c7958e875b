package consul

import (
	"slices"
	"strings"
	"sync"

	"github.com/isthmus-mesh/isthmus/plugin"
)

// state is the state of the registry as reported to the catalog, by every scope
// and watch of one Run.
type state struct {
	faults  *plugin.Faults[faultKind]
	listing *plugin.FirstListing
	catalog plugin.Catalog

	mu      sync.Mutex // guards details and the order of calls to catalog.Detail
	details [details]string
}

// detail is one of the things that the registry's detail says.
type detail uint8

const (
	detailAddress detail = iota // where queries go
	detailShared                // how services share connections
	detailStale                 // how old answers may be
	detailWaits                 // how long queries may wait
	details
)

func newState(catalog plugin.Catalog) *state {
	return &state{faults: plugin.NewFaults[faultKind](catalog), listing: plugin.NewFirstListing(catalog), catalog: catalog}
}

// set sets the fault of a scope or watch; nil clears it.
func (s *state) set(part string, f *fault) {
	if f == nil {
		s.faults.Clear(part)
		return
	}
	s.faults.Set(part, f.kind, f.err)
}

// detail returns a function that sets one part of the registry's detail; ""
// removes it.
func (s *state) detail(part detail) func(text string) {
	return func(text string) {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.details[part] = text
		s.catalog.Detail(strings.Join(slices.DeleteFunc(slices.Clone(s.details[:]), func(text string) bool { return text == "" }), "; "))
	}
}
