package kubernetes

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"maps"
	"net"
	"slices"
	"strconv"
	"strings"

	"github.com/isthmus-mesh/isthmus/plugin"
	"github.com/isthmus-mesh/isthmus/plugin/registry"
)

// metadata is the part of an object's metadata that matters.
type metadata struct {
	Name        string            `json:"name"`
	Namespace   string            `json:"namespace"`
	UID         string            `json:"uid"`
	Labels      map[string]string `json:"labels"`
	Annotations map[string]string `json:"annotations"`
	Created     string            `json:"creationTimestamp"`
}

// name identifies an object of one kind.
type name struct{ namespace, name string }

// String returns namespace/name.
func (n name) String() string { return n.namespace + "/" + n.name }

// service is the part of a Service that matters.
type service struct {
	Metadata metadata `json:"metadata"`
	Spec     struct {
		Type         string   `json:"type"`
		ExternalName string   `json:"externalName"`
		IPFamilies   []string `json:"ipFamilies"`
		Ports        []struct {
			Name        string `json:"name"`
			Protocol    string `json:"protocol"`
			AppProtocol string `json:"appProtocol"`
			Port        int    `json:"port"`
		} `json:"ports"`
	} `json:"spec"`
}

// endpointSlice is the part of an EndpointSlice that matters.
type endpointSlice struct {
	Metadata    metadata `json:"metadata"`
	AddressType string   `json:"addressType"`
	Endpoints   []struct {
		Addresses  []string `json:"addresses"`
		Conditions struct {
			Ready       *bool `json:"ready"`
			Terminating *bool `json:"terminating"`
		} `json:"conditions"`
		TargetRef struct {
			Kind string `json:"kind"`
			Name string `json:"name"`
		} `json:"targetRef"`
		NodeName string `json:"nodeName"`
		Zone     string `json:"zone"`
	} `json:"endpoints"`
	Ports []struct {
		Name        string `json:"name"`
		Protocol    string `json:"protocol"`
		AppProtocol string `json:"appProtocol"`
		Port        int    `json:"port"`
	} `json:"ports"`
}

// ofService is the label by which an EndpointSlice names its Service.
const ofService = "kubernetes.io/service-name"

// part is an EndpointSlice, converted.
type part struct {
	service   name
	family    string
	instances []registry.Instance
}

// state is what the cluster's Services and EndpointSlices say. It is used by
// one goroutine at a time.
type state struct {
	*Adapter
	leftOut  plugin.Unselected
	services map[name]*registry.Service
	external map[name]string // addresses of Services of type ExternalName
	families map[name]string // the first one of a Service
	slices   map[name]*part
	parts    map[name]map[name]*part // slices, by Service
	// others are the ports of Services that are not TCP.
	others map[name]string
	// bad is why an object cannot be read, by kind and name.
	bad map[string]string
	// cluster is the UID of the Service that every cluster has.
	cluster string
}

func newState(a *Adapter) *state {
	return &state{
		Adapter: a, services: map[name]*registry.Service{}, external: map[name]string{}, families: map[name]string{},
		slices: map[name]*part{}, parts: map[name]map[name]*part{}, others: map[name]string{}, bad: map[string]string{},
	}
}

// sources implements follower.
func (s *state) sources() (all []source) {
	for _, ns := range s.config.namespaces() {
		all = append(all,
			source{path: "/api/v1" + ns + "/services", labels: s.config.Labels, kind: "Service"},
			source{path: "/apis/discovery.k8s.io/v1" + ns + "/endpointslices", kind: "EndpointSlice"})
	}
	return all
}

// put implements follower.
func (s *state) put(kind string, object json.RawMessage, touched map[registry.Key]bool) {
	var err error
	var m metadata
	if kind == "Service" {
		m, err = s.putService(object, touched)
	} else {
		m, err = s.putSlice(object, touched)
	}
	s.badly(kind+" "+m.Namespace+"/"+m.Name, err)
}

// badly notes that an object cannot be read, or can.
func (s *state) badly(id string, err error) {
	if err != nil {
		s.bad[id] = fmt.Sprintf("%s; what it said before is kept", plugin.Excerpt(err.Error()))
	} else if s.bad[id] != "" {
		s.bad[id] = "" // clears it, see plugin.Listing
	}
}

func (s *state) putService(object json.RawMessage, touched map[registry.Key]bool) (metadata, error) {
	var o service
	if err := json.Unmarshal(object, &o); err != nil {
		return nameOf(object), err
	}
	m := o.Metadata
	n := name{m.Namespace, m.Name}
	if err := m.check(); err != nil {
		return m, err
	}
	if n == (name{"default", "kubernetes"}) {
		s.cluster = m.UID
	}
	if !s.env.Wants(n.key()) || !s.leftOut.Match(s.config.Select, n.String()) {
		return m, nil
	}
	svc := &registry.Service{Key: n.key(), Meta: m.Labels}
	var other []string
	for _, p := range o.Spec.Ports {
		if !isTCP(p.Protocol) {
			other = append(other, fmt.Sprintf("%d/%s", p.Port, plugin.Excerpt(p.Protocol)))
			continue
		}
		svc.Ports = append(svc.Ports, registry.Port{Name: p.Name, Number: p.Port, Protocol: appProtocol(p.AppProtocol)})
	}
	s.removeService(n)
	if len(other) > 0 {
		s.others[n] = strings.Join(other, ", ")
	}
	touched[svc.Key] = true
	if len(svc.Ports) == 0 && len(other) > 0 {
		return m, nil
	}
	s.services[n] = svc
	if o.Spec.Type == "ExternalName" {
		s.external[n] = o.Spec.ExternalName
	}
	if len(o.Spec.IPFamilies) > 0 {
		s.families[n] = o.Spec.IPFamilies[0]
	}
	return m, nil
}

func (s *state) removeService(n name) {
	delete(s.services, n)
	delete(s.external, n)
	delete(s.families, n)
	delete(s.others, n)
}

func (s *state) putSlice(object json.RawMessage, touched map[registry.Key]bool) (metadata, error) {
	var o endpointSlice
	if err := json.Unmarshal(object, &o); err != nil {
		return nameOf(object), err
	}
	m := o.Metadata
	if err := m.check(); err != nil {
		return m, err
	}
	n := name{m.Namespace, m.Name}
	s.removeSlice(n, touched)
	p := &part{service: name{m.Namespace, m.Labels[ofService]}, family: o.AddressType, instances: o.instances()}
	if p.service.name == "" || !s.config.Select.Match(p.service.String()) || !s.env.Wants(p.service.key()) {
		return m, nil
	}
	s.slices[n] = p
	of := s.parts[p.service]
	if of == nil {
		of = map[name]*part{}
		s.parts[p.service] = of
	}
	of[n] = p
	touched[p.service.key()] = true
	return m, nil
}

func (s *state) removeSlice(n name, touched map[registry.Key]bool) {
	p := s.slices[n]
	if p == nil {
		return
	}
	delete(s.slices, n)
	of := s.parts[p.service]
	if delete(of, n); len(of) == 0 {
		delete(s.parts, p.service)
	}
	touched[p.service.key()] = true
}

// remove implements follower.
func (s *state) remove(kind string, object json.RawMessage, touched map[registry.Key]bool) {
	m := nameOf(object)
	n := name{m.Namespace, m.Name}
	s.badly(kind+" "+n.String(), nil)
	if kind == "Service" {
		s.removeService(n)
		s.leftOut.Forget(n.String())
		touched[n.key()] = true
		return
	}
	s.removeSlice(n, touched)
}

// key returns the key of a service.
func (n name) key() registry.Key { return registry.Key{Namespace: n.namespace, Name: n.name} }

// all implements follower.
func (s *state) all() plugin.Listing {
	l := s.changed(func(yield func(registry.Key) bool) {
		for n := range s.services {
			if !yield(n.key()) {
				return
			}
		}
	})
	l.Complete = true
	n := 0
	for _, why := range s.bad {
		if why != "" {
			n++
		}
	}
	if n > 0 {
		l.Doubt = fmt.Errorf("%d objects of the listing cannot be read; nothing is removed", n)
	}
	return l
}

// changed implements follower.
func (s *state) changed(keys iter.Seq[registry.Key]) plugin.Listing {
	l := plugin.Listing{Problems: maps.Clone(s.bad)}
	for key := range keys {
		n := name{key.Namespace, key.Name}
		if svc := s.services[n]; svc != nil {
			l.Services = append(l.Services, plugin.Snapshot{Service: *svc, Instances: s.instances(n)})
		} else {
			l.Removed = append(l.Removed, key)
		}
	}
	return l
}

// instances returns the instances of a Service, sorted by ID.
func (s *state) instances(n name) []registry.Instance {
	if host := s.external[n]; host != "" {
		// It has ports only if they are written down, as is usual for others.
		return []registry.Instance{{ID: host, Address: host, Ports: s.services[n].Ports}}
	}
	var parts []*part
	for _, slice := range slices.SortedFunc(maps.Keys(s.parts[n]), func(a, b name) int { return cmp.Compare(a.name, b.name) }) {
		parts = append(parts, s.parts[n][slice])
	}
	// A pod with two addresses is one instance, of the family that the Service
	// has first.
	var mine []*part
	filled := 0
	for _, p := range parts {
		if family := s.families[n]; family == "" || p.family == family || p.family == "FQDN" {
			mine = append(mine, p)
			filled += len(p.instances)
		}
	}
	if filled == 0 {
		mine = parts
	}
	// While it moves from one slice to another, an endpoint is in both. The one
	// that takes traffic counts.
	byID := map[string]registry.Instance{}
	for _, p := range mine {
		for _, in := range p.instances {
			if was, ok := byID[in.ID]; !ok || serves(in) && !serves(was) {
				byID[in.ID] = in
			}
		}
	}
	return plugin.SortInstances(slices.Collect(maps.Values(byID)))
}

func serves(in registry.Instance) bool { return !in.Disabled && in.Health == registry.HealthPassing }

// instances returns the endpoints of a slice.
func (o *endpointSlice) instances() (all []registry.Instance) {
	var ports []registry.Port
	least := 0
	for _, p := range o.Ports {
		if isTCP(p.Protocol) {
			if least == 0 || p.Port < least {
				least = p.Port
			}
			ports = append(ports, registry.Port{Name: p.Name, Number: p.Port, Protocol: appProtocol(p.AppProtocol)})
		}
	}
	for _, e := range o.Endpoints {
		if len(e.Addresses) == 0 {
			continue // the server takes none such
		}
		in := registry.Instance{
			ID: e.Addresses[0], Address: e.Addresses[0], Ports: ports, Health: registry.HealthPassing,
			Node: e.NodeName, Locality: registry.Locality{Zone: e.Zone},
		}
		if e.TargetRef.Kind == "Pod" && e.TargetRef.Name != "" {
			in.ID = e.TargetRef.Name
		} else if least > 0 { // one address may have several that are written by hand
			in.ID = net.JoinHostPort(in.Address, strconv.Itoa(least))
		}
		if e.Conditions.Ready != nil && !*e.Conditions.Ready { // nil is to be read as true
			in.Health = registry.HealthCritical
		}
		in.Disabled = e.Conditions.Terminating != nil && *e.Conditions.Terminating
		all = append(all, in)
	}
	return all
}

// isTCP reports whether the protocol of a port, TCP if it is empty, is one that
// an instance can have.
func isTCP(protocol string) bool { return protocol == "" || protocol == "TCP" }

// appProtocol returns the protocol that a port states.
func appProtocol(said string) string {
	switch said {
	case "kubernetes.io/h2c":
		return "http2"
	case "kubernetes.io/ws":
		return "http"
	case "kubernetes.io/wss":
		return "https"
	}
	return said
}

// tell implements follower.
func (s *state) tell(catalog plugin.Catalog) {
	s.leftOut.Tell(catalog, "select", "")
	const most = 5
	text := ""
	if len(s.others) > 0 {
		var some []string
		for _, n := range slices.SortedFunc(maps.Keys(s.others), func(a, b name) int { return cmp.Compare(a.String(), b.String()) }) {
			if len(some) == most {
				some = append(some, "...")
				break
			}
			some = append(some, n.String()+" "+s.others[n])
		}
		text = fmt.Sprintf("ports of %d Services are not TCP, which no ServiceEntry can have: %s", len(s.others), strings.Join(some, "; "))
	}
	catalog.LeftOut("ports", text)
}

// identity implements follower.
func (s *state) identity() string { return s.cluster }

// check reports metadata that no server sends.
func (m metadata) check() error {
	if m.Name == "" || m.Namespace == "" {
		return errors.New("the object has no name and namespace")
	}
	return nil
}

// nameOf returns the metadata of an object that may not be readable otherwise.
func nameOf(object json.RawMessage) metadata {
	var o struct {
		Metadata metadata `json:"metadata"`
	}
	_ = json.Unmarshal(object, &o) // what could be read, or nothing
	return o.Metadata
}
