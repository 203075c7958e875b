package consul

import (
	"cmp"
	"maps"
	"slices"
	"strings"

	"github.com/hashicorp/consul/api"

	"github.com/isthmus-mesh/isthmus/plugin"
	"github.com/isthmus-mesh/isthmus/plugin/registry"
)

// converter converts entries of Consul to instances of package registry. It is
// immutable.
type converter struct {
	kinds         []string
	tags          []string
	meta          map[string]string
	taggedAddress string
	nodeMeta      plugin.Globs
	connect       bool
}

func newConverter(c Config) converter {
	return converter{kinds: c.Kinds, tags: c.Tags, meta: c.Meta, taggedAddress: c.TaggedAddress, nodeMeta: c.NodeMeta, connect: c.Connect}
}

// instances converts an answer of /v1/health/service, without instances that
// the configuration does not select, sorted by ID. Entries without node or
// service are skipped.
func (c converter) instances(entries []*api.ServiceEntry) []registry.Instance {
	out := make([]registry.Instance, 0, len(entries))
	for _, e := range entries {
		if e == nil || e.Node == nil || e.Service == nil || !c.selects(e.Service) {
			continue
		}
		out = append(out, c.instance(e))
	}
	return plugin.SortInstances(out)
}

// selects reports whether the configuration selects the instance.
func (c converter) selects(s *api.AgentService) bool {
	if c.connect && destination(s) == "" || !c.connect && !slices.Contains(c.kinds, cmp.Or(string(s.Kind), kindTypical)) {
		return false
	}
	for _, tag := range c.tags {
		if !slices.Contains(s.Tags, tag) {
			return false
		}
	}
	for k, want := range c.meta {
		if got, ok := s.Meta[k]; !ok || got != want {
			return false
		}
	}
	return true
}

// instance converts one entry, whose Node and Service are not nil.
func (c converter) instance(e *api.ServiceEntry) registry.Instance {
	i := registry.Instance{
		ID:       instanceID(e),
		Tags:     e.Service.Tags,
		Meta:     c.instanceMeta(e),
		Locality: locality(e),
		Node:     e.Node.Node,
	}
	i.Address, i.Ports = c.endpoint(e)
	status := ""
	i.Health, i.Disabled, status = health(e.Checks)
	i.Check = checkProtocol(e.Checks)
	i.Weight = weight(e.Service.Weights, status)
	return i
}

// instanceID returns the ID of an instance: a service ID is unique only on its
// node.
func instanceID(e *api.ServiceEntry) string { return e.Node.Node + "/" + e.Service.ID }

// endpoint returns the address and ports of the instance: of the preferred
// tagged address, else of the service, else of the node.
func (c converter) endpoint(e *api.ServiceEntry) (string, []registry.Port) {
	address, ports := e.Service.Address, ports(e.Service)
	if c.taggedAddress != "" {
		if tagged, ok := e.Service.TaggedAddresses[c.taggedAddress]; ok && tagged.Address != "" {
			// The port of a tagged address replaces the service's only port. It
			// does not apply to named ports.
			if tagged.Port > 0 && len(e.Service.Ports) == 0 {
				ports = []registry.Port{{Number: tagged.Port}}
			}
			return tagged.Address, ports
		}
		if address == "" {
			address = e.Node.TaggedAddresses[c.taggedAddress]
		}
	}
	return cmp.Or(address, e.Node.Address), ports
}

// ports returns the instance's ports: the named ones (Consul 1.22 and later),
// the default one first, else the only one.
func ports(s *api.AgentService) []registry.Port {
	if len(s.Ports) == 0 {
		if s.Port == 0 {
			return nil
		}
		return []registry.Port{{Number: s.Port}}
	}
	out := make([]registry.Port, 0, len(s.Ports))
	for _, p := range s.Ports {
		port := registry.Port{Name: p.Name, Number: p.Port}
		if p.Default {
			out = slices.Insert(out, 0, port)
		} else {
			out = append(out, port)
		}
	}
	return out
}

// instanceMeta returns the selected metadata of the node, overridden by the
// service's metadata.
func (c converter) instanceMeta(e *api.ServiceEntry) map[string]string {
	if len(c.nodeMeta) == 0 {
		return e.Service.Meta
	}
	meta := make(map[string]string, len(e.Service.Meta)+len(e.Node.Meta))
	for k, v := range e.Node.Meta {
		if c.nodeMeta.Match(k) {
			meta[k] = v
		}
	}
	maps.Copy(meta, e.Service.Meta)
	return meta
}

// health returns the health of the instance, whether it or its node is in
// maintenance, and Consul's status apart from maintenance ("" without checks).
// The worst check decides, as in api.HealthChecks.AggregatedStatus.
func health(checks api.HealthChecks) (h registry.Health, disabled bool, status string) {
	rest := make(api.HealthChecks, 0, len(checks))
	for _, c := range checks {
		switch {
		case c == nil:
		case c.Status == api.HealthMaint: // the checks of an imported instance, as one
			disabled = true
		case c.CheckID == api.NodeMaint || strings.HasPrefix(c.CheckID, api.ServiceMaintPrefix):
			disabled = true
		default:
			rest = append(rest, c)
		}
	}
	if len(rest) == 0 {
		return registry.HealthUnknown, disabled, ""
	}
	switch status = rest.AggregatedStatus(); status {
	case api.HealthPassing:
		h = registry.HealthPassing
	case api.HealthWarning:
		h = registry.HealthWarning
	case api.HealthCritical:
		h = registry.HealthCritical
	}
	return h, disabled, status
}

// checkProtocol returns the protocol of the service's checks, "" for none. The
// most specific one takes precedence.
func checkProtocol(checks api.HealthChecks) string {
	for _, p := range [...]struct{ checkType, protocol string }{{"grpc", "grpc"}, {"h2ping", "http2"}, {"http", "http"}, {"tcp", "tcp"}} {
		for _, c := range checks {
			if c != nil && c.ServiceID != "" && c.Type == p.checkType {
				return p.protocol
			}
		}
	}
	return ""
}

// weight returns Consul's weight of the instance in the given status. Consul
// refuses a passing weight below 1, so a lower one means that the registration
// has no weights. The critical status has no weight, as Consul's DNS omits such
// instances.
func weight(w api.AgentWeights, status string) *float64 {
	switch {
	case w.Passing < 1, status == api.HealthCritical:
		return nil
	case status == api.HealthWarning:
		return new(float64(max(w.Warning, 0)))
	default:
		return new(float64(w.Passing))
	}
}

// locality returns the service's locality, else the node's.
func locality(e *api.ServiceEntry) registry.Locality {
	for _, l := range []*api.Locality{e.Service.Locality, e.Node.Locality} {
		if l != nil && (l.Region != "" || l.Zone != "") {
			return registry.Locality{Region: l.Region, Zone: l.Zone}
		}
	}
	return registry.Locality{}
}
