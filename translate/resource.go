package translate

import (
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"unicode/utf8"

	"google.golang.org/protobuf/proto"
	mcp "istio.io/api/mcp/v1alpha1"
	networking "istio.io/api/networking/v1alpha3"
	_ "istio.io/api/networking/v1beta1" // bodies named by package collection
	_ "istio.io/api/security/v1beta1"

	"github.com/isthmus-mesh/isthmus/plugin/collection"
)

// Resource validates and encodes an Istio resource: its name must be
// "namespace/name", its kind known to package collection, its body decodable
// and, for a ServiceEntry or a WorkloadEntry, acceptable to istiod. All errors
// are joined. The version is omitted and a missing create_time becomes
// [CreateTime]; one that is set must be constant. Equal resources give equal
// bytes. res is not modified.
func Resource(res *mcp.Resource) (Encoded, error) {
	switch {
	case res == nil:
		return Encoded{}, errors.New("there is no resource")
	case res.Metadata == nil:
		return Encoded{}, errors.New("metadata is missing: set metadata.name to namespace/name")
	case res.Body == nil:
		return Encoded{}, fmt.Errorf("%s: the body is missing", quote(res.Metadata.Name))
	}
	name := res.Metadata.Name
	fail := func(err error) (Encoded, error) { return Encoded{}, fmt.Errorf("%s: %w", quote(name), err) }

	if collection.OfBody(res.Body.TypeUrl) == "" {
		return fail(fmt.Errorf("the kind %s is none that can be published", quote(res.Body.TypeUrl)))
	}
	metadata := proto.CloneOf(res.Metadata)
	errs := checkMetadata(metadata)
	body, err := res.Body.UnmarshalNew()
	if err != nil {
		return fail(errors.Join(append(errs, fmt.Errorf("the body is not an %s: %w", strings.TrimPrefix(res.Body.TypeUrl, typePrefix), err))...))
	}
	switch body := body.(type) {
	case *networking.ServiceEntry:
		errs = append(errs, checkServiceEntry(body)...)
	case *networking.WorkloadEntry:
		errs = append(errs, checkWorkloadEntry(body)...)
	}
	if len(errs) > 0 {
		return fail(errors.Join(errs...))
	}
	b, err := encodeResource(metadata, body)
	if err != nil {
		return fail(fmt.Errorf("encode: %w", err))
	}
	return Encoded{Name: name, Resource: b}, nil
}

// CheckName returns why a text cannot be the name of a resource.
func CheckName(text string) error {
	namespace, name, ok := strings.Cut(text, "/")
	switch {
	case !ok:
		return errors.New("metadata.name is not namespace/name")
	case !isDNSLabel(namespace):
		return fmt.Errorf("metadata.name: %s is not a legal namespace: use lower-case letters, digits and dashes, at most 63", quote(namespace))
	case !isSubdomain(name):
		return fmt.Errorf("metadata.name: %s is not a legal name: use lower-case letters, digits, dashes and dots, at most 253", quote(name))
	}
	return nil
}

func checkMetadata(m *mcp.Metadata) (errs []error) {
	if err := CheckName(m.Name); err != nil {
		errs = append(errs, err)
	}
	errs = append(errs, checkLabels("metadata.labels", m.Labels)...)
	for _, a := range sortedPairs(m.Annotations) {
		switch {
		case a.key == healthChecksAnnotation:
			errs = append(errs, fmt.Errorf("metadata.annotations: %s makes Istio expect health from the workload: remove it", a.key))
		case !utf8.ValidString(a.key) || !utf8.ValidString(a.value):
			errs = append(errs, fmt.Errorf("metadata.annotations: %s is not UTF-8", quote(a.key)))
		}
	}
	if m.CreateTime != nil {
		if err := m.CreateTime.CheckValid(); err != nil {
			errs = append(errs, fmt.Errorf("metadata.create_time: %w", err))
		}
	}
	return errs
}

// checkLabels allows empty values, as Kubernetes does.
func checkLabels(field string, labels map[string]string) (errs []error) {
	for _, l := range sortedPairs(labels) {
		if !isLabelKey(l.key) {
			errs = append(errs, fmt.Errorf("%s: %s is not a legal label", field, quote(l.key)))
		} else if l.value != "" && !isLabelValue(l.value) {
			errs = append(errs, fmt.Errorf("%s: %s is not a legal value of label %s", field, quote(l.value), l.key))
		}
	}
	return errs
}

// istioProtocols are the protocols that istiod accepts.
var istioProtocols = map[string]bool{
	"tcp": true, "udp": true, "grpc": true, "grpc-web": true, "http": true, "http_proxy": true, "http2": true, "https": true,
	"tls": true, "mongo": true, "redis": true, "mysql": true,
}

// hostProtocols are the protocols whose connections name the host.
var hostProtocols = map[string]bool{
	"http": true, "http2": true, "http_proxy": true, "grpc": true, "grpc-web": true, "https": true, "tls": true,
}

func checkServiceEntry(e *networking.ServiceEntry) (errs []error) {
	bad := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	if len(e.Hosts) == 0 {
		bad("hosts is empty: give one host")
	}
	for _, h := range e.Hosts {
		if !isHost(lower(strings.TrimPrefix(h, "*."))) {
			bad("hosts: %s is not a legal host", quote(h))
		}
	}
	dns := e.Resolution == networking.ServiceEntry_DNS || e.Resolution == networking.ServiceEntry_DNS_ROUND_ROBIN
	for _, a := range e.Addresses {
		_, err := netip.ParseAddr(a)
		_, errPrefix := netip.ParsePrefix(a)
		switch {
		case err != nil && errPrefix != nil:
			bad("addresses: %s is neither an IP address nor a prefix", quote(a))
		case err != nil && dns:
			bad("addresses: %s is a prefix, which resolution DNS cannot use", quote(a))
		}
	}
	names, numbers := map[string]bool{}, map[uint32]bool{}
	tellsHosts := true // connections name their host
	for i, p := range e.Ports {
		if p == nil {
			bad("ports[%d] is null", i)
			continue
		}
		if !isDNSLabel(p.Name) {
			bad("ports[%d].name: %s is not a DNS label", i, quote(p.Name))
		}
		if names[p.Name] {
			bad("ports[%d].name: %s is another port's name too", i, quote(p.Name))
		}
		if !validPort(int(p.Number)) {
			bad("ports[%d].number: %d is not a port number", i, p.Number)
		}
		if numbers[p.Number] {
			bad("ports[%d].number: %d is another port's number too", i, p.Number)
		}
		if p.TargetPort != 0 && !validPort(int(p.TargetPort)) {
			bad("ports[%d].target_port: %d is not a port number", i, p.TargetPort)
		}
		// Istio detects the protocol if none is given.
		if p.Protocol != "" && !istioProtocols[lower(p.Protocol)] {
			bad("ports[%d].protocol: %s", i, unknownProtocol(p.Protocol))
		}
		names[p.Name], numbers[p.Number] = true, true
		tellsHosts = tellsHosts && hostProtocols[lower(p.Protocol)]
	}
	if len(e.Hosts) > 1 && !tellsHosts && e.Resolution != networking.ServiceEntry_NONE {
		bad("hosts are several, which needs protocols of HTTP or TLS on all ports: give one host")
	}
	if e.WorkloadSelector != nil && len(e.Endpoints) > 0 {
		bad("both endpoints and workloadSelector are set: remove one")
	}
	if e.WorkloadSelector != nil {
		errs = append(errs, checkLabels("workloadSelector.labels", e.WorkloadSelector.Labels)...)
	}
	for _, x := range e.ExportTo {
		if !isExportTo(x) {
			bad("exportTo: %s is neither ., *, ~ nor a namespace", quote(x))
		}
	}
	if e.Resolution == networking.ServiceEntry_NONE && len(e.Endpoints) > 0 {
		bad("endpoints are set and resolution is NONE: use STATIC or DNS")
	}
	for i, w := range e.Endpoints {
		if w == nil {
			bad("endpoints[%d] is null", i)
			continue
		}
		for _, err := range checkWorkloadEntry(w) {
			bad("endpoints[%d].%w", i, err)
		}
		_, err := netip.ParseAddr(w.Address)
		unix := strings.HasPrefix(w.Address, "unix://")
		switch {
		case e.Resolution == networking.ServiceEntry_STATIC && err != nil && !unix && w.Address != "":
			bad("endpoints[%d].address: %s is no IP address, which resolution STATIC needs", i, quote(w.Address))
		case dns && unix:
			bad("endpoints[%d].address: %s is a unix socket, which resolution DNS cannot use", i, quote(w.Address))
		}
		for _, name := range sortedNames(w.Ports) {
			if !names[name] {
				bad("endpoints[%d].ports: %s is none of the service's ports", i, quote(name))
			}
		}
	}
	return errs
}

func checkWorkloadEntry(w *networking.WorkloadEntry) (errs []error) {
	bad := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	_, err := netip.ParseAddr(w.Address)
	switch {
	case w.Address == "" && w.Network == "":
		bad("address is empty: give an IP address or a host name")
	case w.Address == "" || err == nil:
	case strings.HasPrefix(w.Address, "unix://"):
		if len(w.Ports) > 0 {
			bad("ports: a unix socket has none")
		}
	case !isHost(lower(strings.TrimSuffix(w.Address, "."))):
		bad("address: %s is neither an IP address nor a host name", quote(w.Address))
	}
	for _, name := range sortedNames(w.Ports) {
		if !isDNSLabel(name) {
			bad("ports: %s is not a DNS label", quote(name))
		}
		if !validPort(int(w.Ports[name])) {
			bad("ports: %d is not a port number (%s)", w.Ports[name], quote(name))
		}
	}
	return append(errs, checkLabels("labels", w.Labels)...)
}
