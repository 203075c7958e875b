package mcp

import (
	"slices"
	"strings"

	"github.com/isthmus-mesh/isthmus/plugin/collection"
	"github.com/isthmus-mesh/isthmus/server/encode"
	"github.com/isthmus-mesh/isthmus/server/stream"
)

func names(prefix string, plurals ...string) []string {
	out := make([]string, len(plurals))
	for i, p := range plurals {
		out[i] = prefix + p
	}
	return out
}

// Names of collections.
const (
	serviceEntries   = "istio/networking/v1alpha3/serviceentries"
	syntheticEntries = "istio/networking/v1alpha3/synthetic/serviceentries"
	workloadEntries  = "istio/networking/v1alpha3/workloadentries"
	workloadGroups   = "istio/networking/v1alpha3/workloadgroups"
	authorizations   = "istio/security/v1beta1/authorizationpolicies"
	rbacPolicies     = "istio/rbac/v1alpha1/authorizationpolicies"
)

// Groups of collections that appeared and disappeared together.
var (
	networkingCollections = names("istio/networking/v1alpha3/", "virtualservices", "gateways", "serviceentries", "destinationrules", "envoyfilters", "sidecars")
	clientCollections     = slices.Concat(names("istio/mixer/v1/config/client/", "quotaspecs", "quotaspecbindings"), names("istio/config/v1alpha2/", "httpapispecs", "httpapispecbindings"))
	rbacCollections       = names("istio/rbac/v1alpha1/", "clusterrbacconfigs", "rbacconfigs", "serviceroles", "servicerolebindings")
	authnCollections      = names("istio/authentication/v1alpha1/", "policies", "meshpolicies")
	securityCollections   = names("istio/security/v1beta1/", "authorizationpolicies", "peerauthentications", "requestauthentications")
)

func set(groups ...[]string) []string { return slices.Sorted(slices.Values(slices.Concat(groups...))) }

// profiles is the table, oldest first.
var profiles = stream.Profiles{
	{
		Name: "pilot-1.1", Versions: "Pilot 1.1 and 1.3",
		Form:        encode.Form{Legacy: encode.LegacyDrop},
		Why:         "A STATIC entry without endpoints is rejected, so it is removed while it has none. Both versions ask for the same 16 collections.",
		Collections: set(networkingCollections, clientCollections, rbacCollections, authnCollections),
	},
	{
		Name: "pilot-1.2", Versions: "Pilot 1.2",
		Form:        encode.Form{Legacy: encode.LegacyDrop},
		Why:         "As 1.1; asks for rbac authorizationpolicies, too.",
		Collections: set(networkingCollections, clientCollections, rbacCollections, authnCollections, []string{rbacPolicies}),
	},
	{
		Name: "pilot-1.4", Versions: "Pilot 1.4",
		Form:        encode.Form{Legacy: encode.LegacyDrop},
		Why:         "As 1.1; asks for security authorizationpolicies, too.",
		Collections: set(networkingCollections, clientCollections, rbacCollections, authnCollections, []string{authorizations}),
	},
	{
		Name: "pilot-1.5", Versions: "Pilot 1.5",
		Form:        encode.Form{Legacy: encode.LegacyEndpoints},
		Why:         "Loses the last endpoint of an entry, and pushes the service's port in place of an endpoint's, unless create_time changes.",
		Collections: set(networkingCollections, clientCollections, rbacCollections, authnCollections, securityCollections),
	},
	{
		Name: "pilot-1.6", Versions: "Pilot 1.6",
		Form:        encode.Form{Legacy: encode.LegacyEndpoints},
		Why:         "As 1.5; takes incremental responses.",
		Collections: set(networkingCollections, clientCollections, rbacCollections, securityCollections, []string{workloadEntries}),
	},
	{
		Name: "pilot-1.7", Versions: "Pilot 1.7",
		Form: encode.Form{Legacy: encode.LegacyEmpty}, Barrier: true,
		Why:         "Loses the last endpoint of an entry unless create_time changes; is ready before a first load is applied.",
		Collections: set(networkingCollections, rbacCollections, securityCollections, []string{workloadEntries}),
	},
	{
		Name: "pilot-1.8", Versions: "Pilot 1.8",
		Form: encode.Form{Legacy: encode.LegacyEmpty}, Barrier: true,
		Why:         "As 1.7; asks for workloadgroups.",
		Collections: set(networkingCollections, securityCollections, []string{workloadEntries, workloadGroups}),
	},
	{
		Name: "synthetic", Versions: "the second stream of Pilot 1.4 and 1.5",
		Form:        encode.Form{Legacy: encode.LegacyDrop, Synthetic: true},
		Why:         "Takes changes of endpoints without a full push; ignores an empty response and pushes no removal, so removals go as full state.",
		Collections: []string{syntheticEntries}, ID: "SSEMCP",
	},
	{
		Name: "mixer", Versions: "Mixer",
		Form: encode.Form{Legacy: encode.LegacyEmpty},
		Why:  "Asks for some 60 collections of policy and templates, all of which are empty here.",
	},
	{
		Name: "mcp-tools", Versions: "whatever asks for another set",
		Form: encode.Form{Legacy: encode.LegacyEmpty},
		Why:  "Tools, and Pilots built from changed sources: what suits 1.8, without its barrier.",
	},
}

// Profiles returns the names of all profiles, oldest sinks first.
func Profiles() []string { return profiles.Names() }

// Asks returns what sinks of a profile request, sorted, and their node id. Both
// are empty if that varies or the profile is unknown.
func Asks(profile string) (collections []string, id string) {
	p, err := profiles.Find(profile)
	if err != nil {
		return nil, ""
	}
	return slices.Clone(p.Collections), p.ID
}

var mixer, tools = profiles.Must("mixer"), profiles.Must("mcp-tools")

// classify returns the profile that matches a set of collections, and whether
// further collections cannot change it.
func classify[T any](asked map[string]T) (p *stream.Profile, final bool) {
	final = true
	for _, q := range profiles {
		if len(q.Collections) == 0 || !containsAll(q.Collections, asked) {
			continue
		}
		if len(q.Collections) == len(asked) {
			p = q
		} else {
			final = false // the set may still grow into that of q
		}
	}
	if p != nil {
		return p, final
	}
	for c := range asked {
		if strings.HasPrefix(c, "istio/policy/") || strings.HasPrefix(c, "istio/config/v1alpha2/") && !slices.Contains(clientCollections, c) {
			return mixer, false
		}
	}
	return tools, false
}

// containsAll reports whether all contains every requested collection.
func containsAll[T any](all []string, asked map[string]T) bool {
	if len(asked) > len(all) {
		return false
	}
	for c := range asked {
		if _, found := slices.BinarySearch(all, c); !found {
			return false
		}
	}
	return true
}

// collections maps the sinks' names of collections to those of package
// collection.
var collections = map[string]string{
	serviceEntries: collection.ServiceEntry,
	"istio/networking/v1alpha3/virtualservices":     "networking.istio.io/VirtualService",
	"istio/networking/v1alpha3/gateways":            "networking.istio.io/Gateway",
	"istio/networking/v1alpha3/destinationrules":    "networking.istio.io/DestinationRule",
	"istio/networking/v1alpha3/envoyfilters":        "networking.istio.io/EnvoyFilter",
	"istio/networking/v1alpha3/sidecars":            "networking.istio.io/Sidecar",
	workloadEntries:                                 collection.WorkloadEntry,
	workloadGroups:                                  "networking.istio.io/WorkloadGroup",
	authorizations:                                  "security.istio.io/AuthorizationPolicy",
	"istio/security/v1beta1/peerauthentications":    "security.istio.io/PeerAuthentication",
	"istio/security/v1beta1/requestauthentications": "security.istio.io/RequestAuthentication",
}

// collectionOf returns the name in package collection, of a profile unless that
// is nil. A name without one is
// returned as it is. With synthetic entries, services go to the stream that
// requests those and not to the main stream of 1.4 and 1.5.
func collectionOf(name string, p *stream.Profile, synthetic bool) string {
	switch {
	case name == syntheticEntries && synthetic:
		return collection.ServiceEntry
	case name == serviceEntries && synthetic && p != nil && (p.Name == "pilot-1.4" || p.Name == "pilot-1.5"):
		return name
	}
	if c := collections[name]; c != "" {
		return c
	}
	return name
}
