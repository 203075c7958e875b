package consul

import (
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
	parts      map[*watch]part
}

// part is what one watch knows of a service, and what an answer since the last
// outage listed. It is answered if that was all.
type part struct {
	known, listed []registry.Instance
	answered      bool
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

// set replaces what a watch knows, and what its last answer listed of that,
// which is all if it is whole.
func (c *sidecars) set(w *watch, listed, known []registry.Instance, whole bool) {
	next := map[string]part{}
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, i := range known {
		d := w.destinations[i.ID]
		p := next[d.service]
		p.known, p.answered = append(p.known, i), whole
		next[d.service] = p
		if c.of[d.service] == nil {
			c.of[d.service] = &behind{parts: map[*watch]part{}}
		}
		c.of[d.service].datacenter = d.datacenter
	}
	for _, i := range listed {
		d := w.destinations[i.ID]
		p := next[d.service]
		p.listed = append(p.listed, i)
		next[d.service] = p
	}
	for name, b := range c.of {
		_, was := b.parts[w]
		p, is := next[name]
		if !was && !is {
			continue
		}
		if delete(b.parts, w); is {
			b.parts[w] = p
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

// question puts in question what some watches, or all, have found.
func (c *sidecars) question(some ...*watch) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for name, b := range c.of {
		for w, p := range b.parts {
			if len(some) > 0 && !slices.Contains(some, w) {
				continue
			}
			b.parts[w] = part{known: p.known}
			if len(some) > 0 {
				c.s.grace.Question(c.s.key(name))
			}
		}
	}
}

// removeOthers tells grace which services are behind no sidecar any more.
func (c *sidecars) removeOthers() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.s.grace.RemoveOthers(func(key registry.Key) bool { return c.of[key.Name] != nil })
}

// tellLocked passes on one service.
func (c *sidecars) tellLocked(name string) {
	b, key := c.of[name], c.s.key(name)
	if len(b.parts) == 0 {
		delete(c.of, name)
	}
	if len(b.parts) == 0 || !c.s.config.Services.Match(name) || !c.s.wants(key) {
		c.s.grace.Remove(key)
		return
	}
	service := c.s.service(name)
	service.SubjectAltNames = []string{c.s.spiffe(name, b.datacenter)}
	var listed, open []registry.Instance
	answered := false
	for _, p := range b.parts {
		listed, _ = plugin.UnionInstances(listed, p.listed)
		if answered = answered || p.answered; !p.answered {
			open, _ = plugin.UnionInstances(open, p.known)
		}
	}
	if answered {
		c.s.grace.SetPart(service, listed, open)
	} else {
		c.s.grace.Add(service, listed)
	}
}

// spiffe returns the name in the certificates of a service's sidecars.
func (s *scope) spiffe(name, datacenter string) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	namespace, partition := "default", ""
	if s.namespace != "" {
		namespace = s.namespace
	}
	if p := s.partition; p != "" && p != "default" {
		partition = "/ap/" + p
	}
	return "spiffe://" + s.facts.trustDomain + partition + "/ns/" + namespace + "/dc/" + datacenter + "/svc/" + name
}
