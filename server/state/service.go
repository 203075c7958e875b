package state

import (
	"slices"
	"strings"

	"github.com/isthmus-mesh/isthmus/plugin/collection"
	"github.com/isthmus-mesh/isthmus/server/encode"
	"github.com/isthmus-mesh/isthmus/server/state/protect"
	"github.com/isthmus-mesh/isthmus/server/state/record"
)

// service is the mutable state of a ServiceEntry with instances. DB.apply
// guards all mutable fields.
type service struct {
	registry *Registry
	name     string // of its ServiceEntry; immutable, with memory not shared with a buffer
	selector string // the value of [encode.SelectorLabel]
	label    []byte // the label as a field of WorkloadEntry; immutable

	own  *composition // its instances; served, unless it is the lead of a merger
	host string       // host counted in DB.addresses
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

// newService makes a ServiceEntry the one of a new service.
func (r *Registry) newService(e *Record) {
	s := &service{registry: r, name: strings.Clone(e.Name())}
	s.selector, s.label = r.db.selector(s.name)
	s.own = &composition{Selector: s.selector}
	e.of, e.parts = s, s.own
	r.services++
}

// entry returns the service's ServiceEntry, nil if it is removed.
func (s *service) entry() *Record {
	return s.registry.db.tables[collection.ServiceEntry].claim(s.name, s.registry)
}

// addressed returns the host of a ServiceEntry if it is to have an address.
func (r *Record) addressed() string {
	if hosts := encode.Hosts(r.Spec()); !r.Is(record.OwnAddress) && len(hosts) > 0 {
		return hosts[0]
	}
	return ""
}

// leave removes an instance from the service.
func (s *service) leave(i *Record) {
	if n := slices.Index(s.added, i); n >= 0 { // added by this batch
		s.added = slices.Delete(s.added, n, n+1)
		return
	}
	s.removed = append(s.removed, i)
}

// each calls f with each instance of the service, with the changes of the
// current batch.
func (s *service) each(f func(*Record)) {
	removed := make(map[*Record]bool, len(s.removed))
	for _, i := range s.removed {
		removed[i] = true
	}
	for i := range s.own.All() {
		if !removed[i] {
			f(i)
		}
	}
	for _, i := range slices.Clone(s.added) {
		f(i)
	}
}
