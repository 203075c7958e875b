package kubernetes

import (
	"cmp"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"google.golang.org/protobuf/proto"
	mcp "istio.io/api/mcp/v1alpha1"
	networking "istio.io/api/networking/v1alpha3"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/isthmus-mesh/isthmus/plugin/collection"
	"github.com/isthmus-mesh/isthmus/server/encode"
	"github.com/isthmus-mesh/isthmus/server/state"
)

// Labels of EndpointSlices.
const (
	serviceNameLabel = "kubernetes.io/service-name"
	managedByLabel   = "endpointslice.kubernetes.io/managed-by"
	headlessLabel    = "service.kubernetes.io/headless"
	// managedBy keeps the controllers of Kubernetes off.
	managedBy = "isthmus"
	// noAddress is the address of a headless Service.
	noAddress = "None"
)

// maxEndpoints is the number of endpoints of a slice, as the controller of
// Kubernetes has it.
const maxEndpoints = 100

// Services says how Services and their EndpointSlices are made, for gateways
// and other programs that know nothing of Istio.
type Services struct {
	Meta
	// ClusterIP gives each Service an address of the cluster. Otherwise it is
	// headless.
	ClusterIP bool
}

// Reads implements [Maker]: instances count.
func (s *Services) Reads() state.Kind {
	return state.Kind{Collection: collection.ServiceEntry, Shape: encode.Inline}
}

func (s *Services) kinds() []kind { return []kind{services, endpointSlices} }

// Plan implements [Maker].
func (s *Services) Plan(r *state.Record) Plan {
	e, err := entryOf(r)
	if err != nil {
		return Plan{Without: map[string]string{r.Name(): err.Error()}}
	}
	return s.plan(e)
}

// entry is a ServiceEntry with its instances.
type entry struct {
	namespace, name string
	spec            *networking.ServiceEntry
	instances       []instance
}

// instance is an endpoint of a service. Its name is its own.
type instance struct {
	name string // namespace/name of its WorkloadEntry
	*networking.WorkloadEntry
}

// entryOf decodes the ServiceEntry of a service with its instances.
func entryOf(r *state.Record) (*entry, error) {
	var res mcp.Resource
	encoded := r.Encode(stubLayout)
	if err := proto.Unmarshal(encoded.Append(nil), &res); err != nil {
		return nil, err
	}
	e := &entry{spec: new(networking.ServiceEntry), instances: make([]instance, 0, r.Endpoints())}
	e.namespace, e.name, _ = strings.Cut(r.Name(), "/")
	if err := res.GetBody().UnmarshalTo(e.spec); err != nil {
		return nil, err
	}
	if r.Service() == "" { // a ServiceEntry as it is
		if e.spec.GetWorkloadSelector() != nil {
			return nil, errors.New("its endpoints are those that a selector finds")
		}
		e.inline()
	}
	for i := range r.Instances() {
		w := new(networking.WorkloadEntry)
		if err := proto.Unmarshal(i.Spec(), w); err != nil {
			return nil, err
		}
		e.instances = append(e.instances, instance{i.Name(), w})
	}
	return e, nil
}

// host returns the first host, "" without any.
func (e *entry) host() string { return append(e.spec.GetHosts(), "")[0] }

// inline takes the endpoints out of the ServiceEntry.
func (e *entry) inline() {
	for _, w := range e.spec.GetEndpoints() {
		e.instances = append(e.instances, instance{fmt.Sprintf("%s/%s at %s %v", e.namespace, e.name, w.GetAddress(), w.GetPorts()), w})
	}
	e.spec.Endpoints = nil
}

// routable returns the address of an instance that other machines can reach.
func (i *instance) routable() (netip.Addr, error) {
	a, err := netip.ParseAddr(i.GetAddress())
	switch a = a.Unmap(); {
	case err != nil || a.Zone() != "":
		return a, fmt.Errorf("its address %q is no IP address", i.GetAddress())
	case a.IsUnspecified() || a.IsLoopback() || a.IsLinkLocalUnicast() || a.IsLinkLocalMulticast():
		return a, fmt.Errorf("its address %s is one of its own machine or link (unspecified, loopback, link-local)", a)
	}
	return a, nil
}

// static reports why the instances of a service are not those that the bridge
// has, nil if they are.
func (e *entry) static() error {
	if r := e.spec.GetResolution(); r != networking.ServiceEntry_STATIC {
		return fmt.Errorf("its resolution is %s; objects are for instances that are addresses (STATIC)", r)
	}
	return nil
}

// member is an endpoint of a slice.
type member struct {
	name    string
	at      uint64 // its place, which its name alone gives it
	address netip.Addr
	zone    string
}

// group is what the endpoints of a slice have in common.
type group struct {
	family string
	ports  string // numbers in the order of the service's ports
}

func (s *Services) plan(e *entry) Plan {
	without := map[string]string{}
	entryName := e.namespace + "/" + e.name
	if err := e.static(); err != nil {
		return Plan{Without: map[string]string{entryName: err.Error()}}
	}
	if len(validation.IsDNS1035Label(e.name)) > 0 {
		return Plan{Without: map[string]string{entryName: "its name can be no Service's, which begins with a letter and has at most 63 lower-case letters, digits and dashes; translate.name gives it another"}}
	}
	if len(e.spec.GetPorts()) == 0 {
		return Plan{Without: map[string]string{entryName: "it has no port"}}
	}
	annotations := map[string]string{HostAnnotation: e.host()}

	service := services.new(e.namespace, e.name)
	spec := map[string]any{"type": "ClusterIP"}
	if !s.ClusterIP {
		spec["clusterIP"] = noAddress
	}
	ports := make([]any, 0, len(e.spec.GetPorts()))
	for _, p := range e.spec.GetPorts() {
		port := portOf(p)
		port["port"] = int64(p.GetNumber())
		ports = append(ports, port)
	}
	spec["ports"] = ports
	service.Object["spec"] = spec

	groups := make(map[group][]member)
	for i := range e.instances {
		in := &e.instances[i]
		address, err := in.routable()
		if err != nil {
			without[in.name] = err.Error()
			continue
		}
		g := group{"IPv6", ""}
		if address.Is4() {
			g.family = "IPv4"
		}
		for _, p := range e.spec.GetPorts() {
			g.ports += fmt.Sprint(cmp.Or(in.GetPorts()[p.GetName()], p.GetTargetPort(), p.GetNumber()), " ")
		}
		sum := sha256.Sum256([]byte(in.name))
		_, zone, _ := strings.Cut(in.GetLocality(), "/")
		zone, _, _ = strings.Cut(zone, "/")
		groups[g] = append(groups[g], member{in.name, binary.BigEndian.Uint64(sum[:]), address, zone})
	}
	objects := []*unstructured.Unstructured{service}
	for g, all := range groups {
		slices.SortFunc(all, func(a, b member) int { return cmp.Or(cmp.Compare(a.at, b.at), strings.Compare(a.name, b.name)) })
		split(all, 0, func(place string, members []member) {
			objects = append(objects, s.slice(e, g, place, members))
		})
	}
	slices.SortFunc(objects[1:], func(a, b *unstructured.Unstructured) int { return strings.Compare(a.GetName(), b.GetName()) })
	for i, o := range objects {
		labels := map[string]string{}
		if i > 0 {
			labels = map[string]string{serviceNameLabel: e.name, managedByLabel: managedBy}
			if !s.ClusterIP {
				labels[headlessLabel] = "" // kube-proxy passes over it
			}
		}
		if err := s.finish(o, labels, annotations); err != nil {
			return Plan{Without: map[string]string{entryName: err.Error()}}
		}
	}
	return Plan{Objects: objects, Without: without}
}

// split divides members, which are sorted, by the bits of their places until no
// part is too large. So which slice an instance is in depends on the instances
// that there are alone, and one that comes or goes changes one slice; at times
// one becomes two, or two become one.
func split(all []member, depth int, part func(place string, members []member)) {
	switch {
	case len(all) == 0:
	case len(all) <= maxEndpoints:
		part(fmt.Sprintf("%d %x", depth, all[0].at>>(64-depth)), all)
	case depth == 64: // no hash of names is so
		for i := 0; len(all) > 0; i++ {
			n := min(maxEndpoints, len(all))
			part(fmt.Sprintf("%d %x %d", depth, all[0].at, i), all[:n])
			all = all[n:]
		}
	default:
		n, _ := slices.BinarySearchFunc(all, uint64(1), func(m member, bit uint64) int { return cmp.Compare(m.at>>(63-depth)&1, bit) })
		split(all[:n], depth+1, part)
		split(all[n:], depth+1, part)
	}
}

// slice makes an EndpointSlice of members.
func (s *Services) slice(e *entry, g group, place string, members []member) *unstructured.Unstructured {
	sum := sha256.Sum256([]byte(g.family + "\n" + g.ports + "\n" + place))
	o := endpointSlices.new(e.namespace, e.name+"-"+hex.EncodeToString(sum[:5]))
	o.Object["addressType"] = g.family
	numbers := strings.Fields(g.ports)
	ports := make([]any, 0, len(numbers))
	for i, p := range e.spec.GetPorts() {
		port := portOf(p)
		var number int64
		_, _ = fmt.Sscan(numbers[i], &number) // it was printed
		port["port"] = number
		ports = append(ports, port)
	}
	o.Object["ports"] = ports
	members = slices.SortedFunc(slices.Values(members), func(a, b member) int {
		return cmp.Or(a.address.Compare(b.address), strings.Compare(a.name, b.name))
	})
	endpoints := make([]any, 0, len(members))
	for _, m := range members {
		// What is not fit for traffic is not served.
		endpoint := map[string]any{
			"addresses":  []any{m.address.String()},
			"conditions": map[string]any{"ready": true, "serving": true, "terminating": false},
		}
		if m.zone != "" {
			endpoint["zone"] = m.zone
		}
		endpoints = append(endpoints, endpoint)
	}
	o.Object["endpoints"] = endpoints
	return o
}

// portOf returns name and protocols of a port, which Services and
// EndpointSlices have alike.
func portOf(p *networking.ServicePort) map[string]any {
	protocol := strings.ToUpper(p.GetProtocol())
	name := p.GetName()
	if len(validation.IsDNS1123Label(name)) > 0 {
		name = fmt.Sprintf("port-%d", p.GetNumber())
	}
	port := map[string]any{"name": name, "protocol": "TCP"}
	if protocol == "UDP" {
		port["protocol"] = "UDP"
	}
	if app := appProtocols[protocol]; app != "" {
		port["appProtocol"] = app
	}
	return port
}

// appProtocols are the standard ones of Kubernetes (KEP-3726) and IANA's, by
// Istio's names. Gateways refuse those that they do not know, so a port without
// more than TCP has none.
var appProtocols = map[string]string{
	"HTTP": "http", "HTTPS": "https", "HTTP2": "kubernetes.io/h2c", "GRPC": "kubernetes.io/h2c", "GRPC-WEB": "http",
	"TLS": "tls", "MONGO": "mongo", "MYSQL": "mysql", "REDIS": "redis",
}
