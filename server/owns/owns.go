// Package owns decides what a registry may say: kinds, hosts, namespaces,
// addresses and labels that are not its own are refused.
package owns

import (
	"cmp"
	"encoding/json"
	"fmt"
	"net"
	"net/netip"
	"path"
	"slices"
	"strings"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protopath"
	"google.golang.org/protobuf/reflect/protorange"
	"google.golang.org/protobuf/reflect/protoreflect"
	networking "istio.io/api/networking/v1alpha3"

	"github.com/isthmus-mesh/isthmus/plugin/collection"
	"github.com/isthmus-mesh/isthmus/server/config"
	"github.com/isthmus-mesh/isthmus/server/encode"
	"github.com/isthmus-mesh/isthmus/translate"
)

// Rules are those of one registry. They are safe for concurrent use.
type Rules struct {
	hosts, namespaces, collections []string
	addresses                      []netip.Prefix
	everyAddress                   bool // addresses excludes no ordinary one
	domains                        []string
	root                           string
	labels                         []string          // patterns
	configured                     translate.Options // whose labels are the operator's
}

// New returns the rules of a registry in a mesh.
func New(r *config.Registry, mesh config.Mesh) *Rules {
	out := &Rules{
		namespaces: r.Owns.Namespaces, collections: r.Owns.Collections, labels: r.Owns.Labels, root: mesh.RootNamespace,
		domains: []string{lower(mesh.ClusterDomain), "svc"},
	}
	for _, pattern := range r.Owns.Hosts {
		out.hosts = append(out.hosts, lower(pattern))
	}
	for _, text := range r.Owns.Addresses {
		p, _ := config.ParseCIDR(text) // validated
		out.addresses = append(out.addresses, unmapped(p))
		out.everyAddress = out.everyAddress || p.Bits() == 0
	}
	// The plugin refuses a block that does not decode, and sends nothing.
	_ = json.Unmarshal(r.Translate, &out.configured)
	if len(out.collections) == 0 {
		out.collections = []string{collection.ServiceEntry, collection.WorkloadEntry}
		if out.configured.Subsets.DestinationRule {
			out.collections = append(out.collections, collection.DestinationRule)
		}
	}
	return out
}

// Outside is the refusal of something that the registry does not own.
type Outside struct {
	What  string // such as "host db.example.org"
	Field string // of the registry's block, which would permit it; "" for none
	Why   string
}

// Error implements error.
func (e *Outside) Error() string {
	cure := "no field permits it"
	if e.Field != "" {
		cure = fmt.Sprintf("name it in owns.%s if it is", e.Field)
	}
	return fmt.Sprintf("%s is not the registry's: %s; %s", e.What, e.Why, cure)
}

// onWorkloads are the kinds that are about the workloads of a namespace instead
// of hosts.
var onWorkloads = map[string]bool{
	"networking.istio.io/Gateway":               true,
	"networking.istio.io/Sidecar":               true,
	"networking.istio.io/EnvoyFilter":           true,
	"networking.istio.io/ProxyConfig":           true,
	"networking.istio.io/WorkloadGroup":         true,
	"security.istio.io/AuthorizationPolicy":     true,
	"security.istio.io/PeerAuthentication":      true,
	"security.istio.io/RequestAuthentication":   true,
	"networking.istio.io/ServiceEntry/selector": true,
}

// Check returns an *[Outside] for a resource that says something of others than
// the registry.
func (r *Rules) Check(p *encode.Part, body proto.Message) error {
	if !slices.ContainsFunc(r.collections, func(pattern string) bool { return config.MatchName(pattern, p.Collection) }) {
		return &Outside{"kind " + p.Collection, "collections", "owns.collections has " + list(r.collections)}
	}
	if err := r.namespace(p.Collection, p.Namespace()); err != nil {
		return err
	}
	for key, value := range p.LabelsAndAnnotations() {
		// A revision hides the resource from the istiods of others.
		if key != "istio.io/rev" {
			if err := r.label(key, value); err != nil {
				return err
			}
		}
	}
	return r.body(p.Namespace(), body)
}

// namespace checks the namespace of a resource. What is about workloads reaches
// those of others there, so it needs a namespace that is named; in the root
// namespace it reaches those of the whole mesh, which no wildcard names.
func (r *Rules) namespace(coll, namespace string) error {
	match := func(pattern string) bool { return config.MatchName(pattern, namespace) }
	outside := func(why string) error { return &Outside{"namespace " + namespace, "namespaces", why} }
	named := slices.ContainsFunc(r.namespaces, match)
	switch {
	case len(r.namespaces) > 0 && !named:
		return outside("owns.namespaces has " + list(r.namespaces))
	case !onWorkloads[coll]:
	case !named:
		return outside("what is about workloads, as this " + path.Base(coll) + " is, reaches those of others there")
	case namespace == r.root && !slices.Contains(r.namespaces, namespace):
		return outside("it is the root namespace, where a " + path.Base(coll) + " reaches the whole mesh")
	}
	return nil
}

func (r *Rules) body(namespace string, body proto.Message) error {
	switch b := body.(type) {
	case *networking.ServiceEntry:
		for _, host := range b.GetHosts() {
			if err := r.host(host); err != nil {
				return err
			}
		}
		for _, text := range b.GetAddresses() {
			if err := r.virtual(text); err != nil {
				return err
			}
		}
		for _, e := range b.GetEndpoints() {
			if err := r.workload(e); err != nil {
				return err
			}
		}
		if b.GetWorkloadSelector() != nil {
			return r.namespace(collection.ServiceEntry+"/selector", namespace)
		}
	case *networking.WorkloadEntry:
		return r.workload(b)
	case *networking.WorkloadGroup:
		for _, all := range []map[string]string{b.GetMetadata().GetLabels(), b.GetMetadata().GetAnnotations()} {
			for key, value := range all {
				if err := r.label(key, value); err != nil {
					return err
				}
			}
		}
		if b.GetTemplate() != nil {
			return r.workload(b.GetTemplate())
		}
	case *networking.DestinationRule:
		return r.host(r.full(b.GetHost(), namespace))
	case *networking.VirtualService:
		for _, host := range b.GetHosts() {
			if err := r.host(r.full(host, namespace)); err != nil {
				return err
			}
		}
		return protorange.Range(b.ProtoReflect(), func(v protopath.Values) error {
			if m, ok := v.Index(-1).Value.Interface().(protoreflect.Message); ok {
				if d, ok := m.Interface().(*networking.Destination); ok {
					return r.host(r.full(d.GetHost(), namespace))
				}
			}
			return nil
		})
	case *networking.Gateway:
		for _, s := range b.GetServers() {
			for _, host := range s.GetHosts() {
				if err := r.host(afterSlash(host)); err != nil {
					return err
				}
			}
		}
	case *networking.Sidecar:
		for _, e := range b.GetEgress() {
			for _, host := range e.GetHosts() {
				if err := r.host(afterSlash(host)); err != nil {
					return err
				}
			}
		}
		for _, i := range b.GetIngress() {
			if err := r.listener(i.GetDefaultEndpoint()); err != nil {
				return err
			}
		}
	}
	return nil
}

// workload checks an instance.
func (r *Rules) workload(e *networking.WorkloadEntry) error {
	for key, value := range e.GetLabels() {
		if err := r.label(key, value); err != nil {
			return err
		}
	}
	return r.address(e.GetAddress())
}

// label checks a label or an annotation.
func (r *Rules) label(key, value string) error {
	if !translate.IsIstios(key) || r.configured.Sets(key, value) || slices.ContainsFunc(r.labels, func(pattern string) bool { return config.MatchName(pattern, key) }) {
		return nil
	}
	return &Outside{"label or annotation " + key, "labels", "Istio gives it a meaning"}
}

// full returns the host that a VirtualService or a DestinationRule means by a
// name without dots: a service of its namespace.
func (r *Rules) full(host, namespace string) string {
	if host == "" || strings.ContainsAny(host, ".*") {
		return host
	}
	return host + "." + namespace + ".svc." + r.domains[0]
}

// host checks a host that a resource is for or leads to.
func (r *Rules) host(host string) error {
	if len(r.hosts) > 0 && !slices.ContainsFunc(r.hosts, func(pattern string) bool { return ownsHost(pattern, lower(host)) }) {
		return &Outside{"host " + host, "hosts", "owns.hosts has " + list(r.hosts)}
	}
	return r.cluster(host)
}

// cluster checks that a host is none of the cluster's, unless it is named.
func (r *Rules) cluster(host string) error {
	text := lower(host)
	for _, domain := range r.domains {
		if !reaches(text, domain) || slices.ContainsFunc(r.hosts, func(pattern string) bool {
			return pattern == text || ownsHost(pattern, text) && within(pattern, domain)
		}) {
			continue
		}
		if text == "*" {
			return &Outside{"host " + host, "hosts", "it is every host"}
		}
		return &Outside{"host " + host, "hosts", "hosts of " + domain + " are the cluster's own"}
	}
	return nil
}

// ownsHost reports whether a pattern covers a host in lower case. One with a
// wildcard needs a pattern that covers all of it.
func ownsHost(pattern, host string) bool {
	ok, _ := path.Match(pattern, host) // validated
	return ok && (!strings.HasPrefix(host, "*") || strings.HasPrefix(pattern, "*"))
}

// reaches reports whether a host, or one of those that a wildcard stands for,
// is in a domain.
func reaches(host, domain string) bool {
	rest, ok := strings.CutPrefix(host, "*")
	return within(host, domain) || ok && strings.HasSuffix("."+domain, rest)
}

func within(host, domain string) bool {
	return host == domain || strings.HasSuffix(host, "."+domain)
}

// listener checks the address that a Sidecar passes traffic to, host:port or
// the path of a socket.
func (r *Rules) listener(text string) error {
	if text == "" {
		return nil
	}
	if host, _, err := net.SplitHostPort(text); err == nil {
		text = host
	}
	return r.address(text)
}

// maxListed bounds the patterns that a message names.
const maxListed = 5

func list(all []string) string {
	if len(all) > maxListed {
		return strings.Join(all[:maxListed], ", ") + " and others"
	}
	return strings.Join(all, ", ")
}

// afterSlash returns the host of one that may follow a namespace.
func afterSlash(host string) string {
	_, after, _ := strings.Cut(host, "/")
	return cmp.Or(after, host)
}

// lower returns a host in the form in which hosts are compared.
func lower(host string) string { return strings.ToLower(strings.TrimSuffix(host, ".")) }
