package consul

import (
	"maps"
	"slices"
	"strings"
	"sync"

	"github.com/hashicorp/consul/api"

	"github.com/isthmus-mesh/isthmus/plugin"
	"github.com/isthmus-mesh/isthmus/plugin/registry"
)

// sidecars publishes the services of a scope at the addresses of their sidecars
// in Consul's own mesh. A sidecar is an instance of a service of its own, whose
// watch finds it; several of these may be in front of one service. So no
// service is requested more often than without sidecars.
type sidecars struct {
	s *scope

	mu sync.Mutex // guards everything below; taken before scope.mu
	of map[string]*behind
}

// behind is what is known of one service behind sidecars.
type behind struct {
	datacenter string
	instances  map[*watch][]registry.Instance
	published  bool
}

// destination returns the service that an instance accepts connections for in
// Consul's mesh, "" if it is none of that mesh.
func destination(service *api.AgentService) string {
	switch {
	case service.Kind == api.ServiceKindConnectProxy && service.Proxy != nil:
		return service.Proxy.DestinationServiceName
	case service.Kind == api.ServiceKindTypical && service.Connect != nil && service.Connect.Native:
		return service.Service
	}
	return ""
}

// destined is the service that a sidecar is in front of, and its datacenter.
type destined struct{ service, datacenter string }

// destinations returns those of instances, by ID: of an answer, or those known.
func destinations(entries []*api.ServiceEntry, of []registry.Instance, known map[string]destined) map[string]destined {
	all := make(map[string]destined, len(of))
	for _, i := range of {
		all[i.ID] = known[i.ID]
	}
	for _, e := range entries {
		if e == nil || e.Node == nil || e.Service == nil {
			continue
		}
		if _, selected := all[instanceID(e)]; selected {
			all[instanceID(e)] = destined{destination(e.Service), e.Node.Datacenter}
		}
	}
	return all
}

// set replaces the instances that a watch has found.
func (c *sidecars) set(w *watch, instances []registry.Instance) {
	next := map[string][]registry.Instance{}
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, i := range instances {
		d := w.destinations[i.ID]
		next[d.service] = append(next[d.service], i)
		if c.of[d.service] == nil {
			c.of[d.service] = &behind{instances: map[*watch][]registry.Instance{}}
		}
		c.of[d.service].datacenter = d.datacenter
	}
	for name, b := range c.of {
		if _, was := b.instances[w]; !was && next[name] == nil {
			continue
		}
		if delete(b.instances, w); next[name] != nil {
			b.instances[w] = next[name]
		}
		c.tellLocked(name)
	}
}

// tell publishes services again, for what is stated of them besides their
// instances. The names are in lower case.
func (c *sidecars) tell(names ...string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for name := range c.of {
		if slices.Contains(names, strings.ToLower(name)) {
			c.tellLocked(name)
		}
	}
}

// tellAll publishes every service again.
func (c *sidecars) tellAll() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for name := range c.of {
		c.tellLocked(name)
	}
}

// tellLocked updates one service in the catalog.
func (c *sidecars) tellLocked(name string) {
	b, key := c.of[name], c.s.key(name)
	snapshot, ok := c.snapshotLocked(name)
	switch {
	case ok:
		b.published = true
		c.s.catalog.Set(snapshot.Service, snapshot.Instances)
	case b.published:
		b.published = false
		c.s.catalog.Remove(key)
	}
	if len(b.instances) == 0 {
		delete(c.of, name)
	}
}

// snapshotLocked returns a service as it is to be in the catalog, if it is.
func (c *sidecars) snapshotLocked(name string) (plugin.Snapshot, bool) {
	b, key := c.of[name], c.s.key(name)
	if b == nil || len(b.instances) == 0 || !c.s.config.Services.Match(name) || !c.s.wants(key) {
		return plugin.Snapshot{}, false
	}
	service := c.s.service(name)
	service.SubjectAltNames = []string{c.s.spiffe(name, b.datacenter)}
	return plugin.Snapshot{Service: service, Instances: plugin.SortInstances(slices.Concat(slices.Collect(maps.Values(b.instances))...))}, true
}

// recall returns a service as it is in the catalog.
func (c *sidecars) recall(key registry.Key) (plugin.Snapshot, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if key != c.s.key(key.Name) {
		return plugin.Snapshot{}, false
	}
	return c.snapshotLocked(key.Name)
}

// spiffe returns the name in the certificates of a service's sidecars.
func (s *scope) spiffe(name, datacenter string) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	namespace, partition := "default", ""
	if s.namespace != "" {
		namespace = s.namespace
	}
	if p := s.config.Partition; p != "" && p != "default" {
		partition = "/ap/" + p
	}
	return "spiffe://" + s.facts.trustDomain + partition + "/ns/" + namespace + "/dc/" + datacenter + "/svc/" + name
}
