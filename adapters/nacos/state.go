package nacos

import "github.com/isthmus-mesh/isthmus/plugin"

// faultKind is what keeps the registry from being followed. Kinds are shown in this order.
type faultKind int

const (
	// faultAway: no server can be reached, or the one at hand does not serve.
	faultAway faultKind = iota
	// faultAuth: the server refuses who asks.
	faultAuth
	// faultNamespace: a namespace does not exist, or is empty and may not exist.
	faultNamespace
	// faultList: which services there are cannot be learnt.
	faultList
	// faultService: a service cannot be subscribed or asked for.
	faultService
	// faultGrace: what was known before an outage is kept for a while.
	faultGrace
)

// state is what the catalog is told of the registry as a whole, over all sessions.
type state struct {
	faults  *plugin.Faults[faultKind]
	listing *plugin.FirstListing
}

func newState(catalog plugin.Catalog) *state {
	return &state{faults: plugin.NewFaults[faultKind](catalog), listing: plugin.NewFirstListing(catalog)}
}
