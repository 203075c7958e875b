package nacos

import "github.com/isthmus-mesh/isthmus/plugin"

// faultKind is a kind of fault of the registry, in order of precedence.
type faultKind int

const (
	// faultAway: no server is reachable, or the current one does not serve.
	faultAway faultKind = iota
	// faultAuth: the server refuses the credentials.
	faultAuth
	// faultNamespace: a namespace does not exist, or is empty and may not
	// exist.
	faultNamespace
	// faultList: services cannot be listed.
	faultList
	// faultService: a service cannot be subscribed or queried.
	faultService
	// faultGrace: instances known before an outage are retained.
	faultGrace
)

// state is the state of the registry as reported to the catalog, across
// sessions.
type state struct {
	faults  *plugin.Faults[faultKind]
	listing *plugin.FirstListing
}

func newState(catalog plugin.Catalog) *state {
	return &state{faults: plugin.NewFaults[faultKind](catalog), listing: plugin.NewFirstListing(catalog)}
}
