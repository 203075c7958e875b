// Package collection names the kinds of resource that Isthmus carries.
//
// A collection is all resources of one kind. Its name is the API group and the kind, "networking.istio.io/ServiceEntry",
// without an API version: sinks of different ages ask for the same collection under different versions, while the body
// that travels is the same message. The package imports the standard library only.
package collection

import "strings"

// The collections that adapters which speak in registry words produce.
const (
	ServiceEntry  = "networking.istio.io/ServiceEntry"
	WorkloadEntry = "networking.istio.io/WorkloadEntry"
)

// bodies maps the full name of a body's message to its collection, for every kind that an adapter may publish. The message
// is istio.<group>.<version>.<Kind>, and its version is the one that all releases of Istio put on the wire.
var bodies = map[string]string{
	"istio.networking.v1alpha3.ServiceEntry":       ServiceEntry,
	"istio.networking.v1alpha3.WorkloadEntry":      WorkloadEntry,
	"istio.networking.v1alpha3.WorkloadGroup":      "networking.istio.io/WorkloadGroup",
	"istio.networking.v1alpha3.VirtualService":     "networking.istio.io/VirtualService",
	"istio.networking.v1alpha3.DestinationRule":    "networking.istio.io/DestinationRule",
	"istio.networking.v1alpha3.Gateway":            "networking.istio.io/Gateway",
	"istio.networking.v1alpha3.Sidecar":            "networking.istio.io/Sidecar",
	"istio.networking.v1alpha3.EnvoyFilter":        "networking.istio.io/EnvoyFilter",
	"istio.networking.v1beta1.ProxyConfig":         "networking.istio.io/ProxyConfig",
	"istio.security.v1beta1.AuthorizationPolicy":   "security.istio.io/AuthorizationPolicy",
	"istio.security.v1beta1.PeerAuthentication":    "security.istio.io/PeerAuthentication",
	"istio.security.v1beta1.RequestAuthentication": "security.istio.io/RequestAuthentication",
}

// All returns the names of all collections that an adapter may publish to, in no order.
func All() []string {
	all := make([]string, 0, len(bodies))
	for _, c := range bodies {
		all = append(all, c)
	}
	return all
}

// OfBody returns the collection of a resource whose body has the given Any type URL ("type.googleapis.com/" may be missing),
// or "" if no adapter may publish that kind.
func OfBody(typeURL string) string {
	return bodies[strings.TrimPrefix(typeURL, "type.googleapis.com/")]
}

// OfKind returns the collection of a Kubernetes-style apiVersion ("networking.istio.io/v1") and kind, and the full name of
// the message that its spec is written in; both are "" if no adapter may publish that kind.
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

// OfTypeURL returns the collection that an xDS type URL as istiod writes it asks for: group/version/Kind without the version.
// The URL need not be known; a URL of another form is returned as it is.
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
