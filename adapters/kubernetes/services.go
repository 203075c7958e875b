package kubernetes

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"maps"
	"net"
	"reflect"
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

// serviceObject is the part of a Service that matters.
type serviceObject struct {
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

// The labels by which an EndpointSlice names its Service, or its ServiceImport
// and the cluster that the endpoints are in.
const (
	ofService = "kubernetes.io/service-name"
	ofImport  = "multicluster.kubernetes.io/service-name"
	ofCluster = "multicluster.kubernetes.io/source-cluster"
)

// exportObject is the part of a ServiceExport that matters.
type exportObject struct {
	Status struct {
		Conditions []struct{ Type, Status, Message string }
	}
}

// export is a ServiceExport, converted: why it counts for nothing, or "".
type export string

// service is a Service, converted.
type service struct {
	registry.Service
	uid      string
	external string // address of one of type ExternalName
	family   string // the first one
	other    string // ports that are not TCP
}

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
	found    []source
	leftOut  plugin.Unselected
	services map[name]*service
	slices   map[name]*part
	parts    map[name]map[name]*part // slices, by Service
	others   map[name]string         // service.other
	exports  map[name]export
	pods     *pods // nil if they are not watched
	// bad is why an object cannot be read, by kind and name.
	bad map[string]string
	// cluster is the UID of the Service that every cluster has.
	cluster string
}

func newState(a *Adapter, found []source) *state {
	s := &state{
		Adapter: a, found: found, services: map[name]*service{}, slices: map[name]*part{}, parts: map[name]map[name]*part{},
		others: map[name]string{}, exports: map[name]export{}, bad: map[string]string{},
	}
	if a.config.Pods.watched() {
		s.pods = newPods(a.config.Pods)
	}
	return s
}

// sources implements follower.
func (s *state) sources() []source { return s.found }

// read implements follower.
func (s *state) read(kind string, o *object) {
	if o.raw == nil {
		return
	}
	switch kind {
	case "EndpointSlice":
		readInto(o, s.part)
	case "ServiceExport":
		readInto(o, (*exportObject).export)
	case "Pod":
		readInto(o, s.pods.convert)
	default:
		readInto(o, (*serviceObject).service)
	}
}

// readInto reads an object by way of the part of it that matters.
func readInto[T, V any](o *object, convert func(*T) V) {
	var part T
	if err := json.Unmarshal(o.raw, &part); err != nil {
		o.err = err
	} else {
		o.value = convert(&part)
	}
	o.raw = nil
}

// put implements follower.
func (s *state) put(kind string, o *object, touched map[registry.Key]bool) {
	n := o.name()
	if o.err == nil && (n.name == "" || n.namespace == "") {
		o.err = errors.New("the object has no name and namespace")
	}
	s.badly(kind+" "+n.String(), o.err)
	switch v := o.value.(type) {
	case *service:
		s.putService(n, v, touched)
	case *part:
		s.putSlice(n, v, touched)
	case export:
		if was, ok := s.exports[n]; !ok || was != v {
			s.exports[n] = v
			touched[n.key()] = true
		}
	case *pod:
		s.touchSlices(s.pods.put(n, v), touched)
	}
}

// badly notes that an object cannot be read, or can.
func (s *state) badly(id string, err error) {
	if err != nil {
		s.bad[id] = fmt.Sprintf("%s; what it said before is kept", plugin.Excerpt(err.Error()))
	} else if s.bad[id] != "" {
		s.bad[id] = "" // clears it, see plugin.Listing
	}
}

// service converts a Service.
func (o *serviceObject) service() *service {
	svc := &service{Service: registry.Service{Key: o.Metadata.name().key(), Meta: o.Metadata.Labels}, uid: o.Metadata.UID}
	var other []string
	for _, p := range o.Spec.Ports {
		if !isTCP(p.Protocol) {
			other = append(other, fmt.Sprintf("%d/%s", p.Port, plugin.Excerpt(p.Protocol)))
			continue
		}
		svc.Ports = append(svc.Ports, registry.Port{Name: p.Name, Number: p.Port, Protocol: appProtocol(p.AppProtocol)})
	}
	svc.other = strings.Join(other, ", ")
	if o.Spec.Type == "ExternalName" {
		svc.external = o.Spec.ExternalName
	}
	if len(o.Spec.IPFamilies) > 0 {
		svc.family = o.Spec.IPFamilies[0]
	}
	return svc
}

func (s *state) putService(n name, svc *service, touched map[registry.Key]bool) {
	if n == (name{"default", "kubernetes"}) {
		s.cluster = svc.uid
	}
	if !s.env.Wants(svc.Key) || !s.leftOut.Match(s.config.Select, n.String()) {
		return
	}
	if was := s.services[n]; was != nil && reflect.DeepEqual(was, svc) {
		return
	}
	s.removeService(n)
	touched[svc.Key] = true
	if svc.other != "" {
		s.others[n] = svc.other
		if len(svc.Ports) == 0 {
			return
		}
	}
	s.services[n] = svc
}

func (s *state) removeService(n name) {
	delete(s.services, n)
	delete(s.others, n)
}

// export converts a ServiceExport.
func (o *exportObject) export() export {
	for _, c := range o.Status.Conditions {
		if c.Type == "Valid" && c.Status == "False" {
			return export(cmp.Or(plugin.Excerpt(c.Message), "it is not valid"))
		}
	}
	return ""
}

// part converts an EndpointSlice.
func (s *state) part(o *endpointSlice) *part {
	p := &part{service: name{o.Metadata.Namespace, o.Metadata.Labels[ofService]}, family: o.AddressType, instances: o.instances()}
	if s.config.Follow == followImports {
		p.service.name = o.Metadata.Labels[ofImport]
		if cluster := o.Metadata.Labels[ofCluster]; cluster != "" {
			for i := range p.instances {
				in := &p.instances[i]
				in.ID, in.Cluster = cluster+"/"+in.ID, cluster
			}
		}
	}
	return p
}

func (s *state) putSlice(n name, p *part, touched map[registry.Key]bool) {
	if p.service.name == "" || !s.config.Select.Match(p.service.String()) || !s.env.Wants(p.service.key()) {
		s.removeSlice(n, touched)
		return
	}
	if was := s.slices[n]; was != nil && was.service == p.service && was.family == p.family && plugin.EqualInstances(was.instances, p.instances) {
		return
	}
	s.pods.refer(n, p) // first, so that pods that are in both stay known
	s.removeSlice(n, touched)
	s.slices[n] = p
	of := s.parts[p.service]
	if of == nil {
		of = map[name]*part{}
		s.parts[p.service] = of
	}
	of[n] = p
	touched[p.service.key()] = true
}

func (s *state) removeSlice(n name, touched map[registry.Key]bool) {
	p := s.slices[n]
	if p == nil {
		return
	}
	delete(s.slices, n)
	s.pods.release(n, p)
	of := s.parts[p.service]
	if delete(of, n); len(of) == 0 {
		delete(s.parts, p.service)
	}
	touched[p.service.key()] = true
}

// remove implements follower.
func (s *state) remove(kind string, n name, touched map[registry.Key]bool) {
	s.badly(kind+" "+n.String(), nil)
	switch kind {
	case "EndpointSlice":
		s.removeSlice(n, touched)
	case "ServiceExport":
		delete(s.exports, n)
		touched[n.key()] = true
	case "Pod":
		s.pods.remove(n)
	default:
		s.removeService(n)
		s.leftOut.Forget(n.String())
		touched[n.key()] = true
	}
}

// touchSlices adds the services of some EndpointSlices.
func (s *state) touchSlices(slices []name, touched map[registry.Key]bool) {
	for _, n := range slices {
		if p := s.slices[n]; p != nil {
			touched[p.service.key()] = true
		}
	}
}

// unexported returns why a Service is not exported, "" if it is, or need not
// be.
func (s *state) unexported(n name, svc *service) string {
	if s.config.Follow != followExports {
		return ""
	}
	why, ok := s.exports[n]
	switch {
	case !ok:
		return "there is no ServiceExport"
	case svc.external != "":
		return "a Service of type ExternalName cannot be exported"
	}
	return string(why)
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
		if svc := s.services[n]; svc != nil && s.unexported(n, svc) == "" {
			l.Services = append(l.Services, plugin.Snapshot{Service: svc.Service, Instances: s.instances(n, svc)})
		} else {
			l.Removed = append(l.Removed, key)
		}
	}
	return l
}

// instances returns the instances of a Service, sorted by ID.
func (s *state) instances(n name, svc *service) []registry.Instance {
	if svc.external != "" {
		// It has ports only if they are written down, as is usual for others.
		return []registry.Instance{{ID: svc.external, Address: svc.external, Ports: svc.Ports}}
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
		if svc.family == "" || p.family == svc.family || p.family == "FQDN" {
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
				s.pods.describe(n.namespace, &in)
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
	catalog.LeftOut("ports", few("ports of %d Services are not TCP, which no ServiceEntry can have: %s", s.others))
	if s.config.Follow == followExports {
		why := map[name]string{}
		for n := range s.exports {
			if svc := s.services[n]; svc == nil {
				why[n] = "there is no such Service, or it is left out"
			} else if text := s.unexported(n, svc); text != "" {
				why[n] = text
			}
		}
		catalog.LeftOut("exports", few("%d ServiceExports count for nothing: %s", why))
	}
}

// few returns a text with the number of names, and what is said of the first.
func few(format string, all map[name]string) string {
	const most = 5
	var some []string
	for _, n := range slices.SortedFunc(maps.Keys(all), func(a, b name) int { return cmp.Compare(a.String(), b.String()) }) {
		if len(some) == most {
			some = append(some, "...")
			break
		}
		some = append(some, n.String()+" "+all[n])
	}
	if len(some) == 0 {
		return ""
	}
	return fmt.Sprintf(format, len(all), strings.Join(some, "; "))
}

// identity implements follower.
func (s *state) identity() string { return s.cluster }

// name returns the name of an object.
func (m metadata) name() name { return name{m.Namespace, m.Name} }

// name returns the name of an object.
func (o *object) name() name { return name{o.Namespace, o.Name} }
