package state

import "github.com/isthmus-mesh/isthmus/server/state/protect"

// service is the mutable state of a ServiceEntry with instances. DB.apply
// guards all mutable fields.
type service struct {
	registry *Registry
	name     string // of its ServiceEntry; immutable, with memory not shared with a buffer
	selector string // the value of [encode.SelectorLabel]
	label    []byte // the label as a field of WorkloadEntry; immutable

	host string // host counted in DB.hosts
	// unaddressed reports that the host has no address although it should.
	unaddressed bool
	aside       bool    // the entry is not served separately, as another registry has precedence
	merger      *merger // merger that it leads or belongs to, nil for none
	retained    uint32  // last listing that kept all instances, 0 for none

	counts protect.Endpoints[*Record] // for the guard of the registry

	// Changes of the current batch.
	changed        bool
	added, removed []*Record
}
