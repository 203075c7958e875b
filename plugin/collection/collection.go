// Package collection names the kinds of resource that Isthmus carries.
//
// A collection is all resources of one kind. Its name is the API group and kind
// without a version, "networking.istio.io/ServiceEntry", because sinks of
// different releases request one collection under different versions of the
// same message. The package imports the standard library only.
package collection

import "strings"

// Collections produced by adapters that report services.
const (
	ServiceEntry    = "networking.istio.io/ServiceEntry"
	WorkloadEntry   = "networking.istio.io/WorkloadEntry"
	DestinationRule = "networking.istio.io/DestinationRule"
)

// bodies maps the full name of a body message to its collection, for every kind
// that an adapter may publish. The message is istio.<group>.<version>.<Kind>,
// in the version that all releases of Istio put on the wire.
var bodies = map[string]string{
	"istio.networking.v1alpha3.ServiceEntry":       ServiceEntry,
	"istio.networking.v1alpha3.WorkloadEntry":      WorkloadEntry,
	"istio.networking.v1alpha3.WorkloadGroup":      "networking.istio.io/WorkloadGroup",
	"istio.networking.v1alpha3.VirtualService":     "networking.istio.io/VirtualService",
	"istio.networking.v1alpha3.DestinationRule":    DestinationRule,
	"istio.networking.v1alpha3.Gateway":            "networking.istio.io/Gateway",
	"istio.networking.v1alpha3.Sidecar":            "networking.istio.io/Sidecar",
	"istio.networking.v1alpha3.EnvoyFilter":        "networking.istio.io/EnvoyFilter",
	"istio.networking.v1beta1.ProxyConfig":         "networking.istio.io/ProxyConfig",
	"istio.security.v1beta1.AuthorizationPolicy":   "security.istio.io/AuthorizationPolicy",
	"istio.security.v1beta1.PeerAuthentication":    "security.istio.io/PeerAuthentication",
	"istio.security.v1beta1.RequestAuthentication": "security.istio.io/RequestAuthentication",
}

// All returns the collections that an adapter may publish to, in no order.
func All() []string {
	all := make([]string, 0, len(bodies))
	for _, c := range bodies {
		all = append(all, c)
	}
	return all
}

// OfBody returns the collection of a resource by the Any type URL of its body,
// with or without "type.googleapis.com/", or "" if adapters may not publish
// that kind.
func OfBody(typeURL string) string {
	return bodies[strings.TrimPrefix(typeURL, "type.googleapis.com/")]
}

// OfKind returns the collection of a Kubernetes-style apiVersion
// ("networking.istio.io/v1") and kind, and the full name of the message of its
// spec; both are "" if adapters may not publish that kind.
func OfKind(apiVersion, kind string) (name, message string) {
	group, _, _ := strings.Cut(apiVersion, "/")
	want := group + "/" + kind
	for message, name := range bodies {
		if name == want {
			return name, message
		}
	}
	return "", ""
}

// OfTypeURL returns the collection of an xDS type URL in istiod's form, known
// or not: group/version/Kind without the version. A URL in another form is
// returned unchanged.
func OfTypeURL(typeURL string) string {
	group, rest, ok := strings.Cut(typeURL, "/")
	if !ok {
		return typeURL
	}
	_, kind, ok := strings.Cut(rest, "/")
	if !ok || kind == "" || strings.Contains(kind, "/") {
		return typeURL
	}
	return group + "/" + kind
}
