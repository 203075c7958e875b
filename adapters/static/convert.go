package static

import (
	"cmp"
	"net"
	"slices"
	"strconv"
	"strings"

	"github.com/isthmus-mesh/isthmus/plugin/registry"
)

// id returns what tells the endpoint from the others of its service.
func (e Endpoint) id() string {
	address := strings.ToLower(e.Address)
	if len(e.Ports) > 0 {
		address = net.JoinHostPort(address, strconv.Itoa(e.Ports[0].Number))
	}
	return cmp.Or(e.ID, address)
}

// convert returns the service and its instances, sorted by ID.
func (s Service) convert() (registry.Service, []registry.Instance) {
	var instances []registry.Instance
	all, _ := s.endpoints()
	for _, e := range all {
		ports := e.Ports
		if len(ports) == 0 {
			ports = s.Ports
		}
		i := registry.Instance{ID: e.id(), Address: e.Address, Meta: e.Metadata, Weight: e.Weight, Disabled: e.Disabled}
		for _, p := range ports {
			if len(ports) == 1 && len(s.Ports) == 1 { // another number of the same port
				p.Name, p.Protocol = cmp.Or(p.Name, s.Ports[0].Name), cmp.Or(p.Protocol, s.Ports[0].Protocol)
			}
			i.Ports = append(i.Ports, registry.Port(p))
		}
		parts := append(strings.Split(e.Locality, "/"), "", "")
		i.Locality = registry.Locality{Region: parts[0], Zone: parts[1], SubZone: parts[2]}
		instances = append(instances, i)
	}
	slices.SortFunc(instances, func(a, b registry.Instance) int { return cmp.Compare(a.ID, b.ID) })
	return registry.Service{Key: registry.Key{Name: s.Name}, Meta: s.Metadata}, instances
}
