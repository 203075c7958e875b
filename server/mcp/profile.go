package mcp

import (
	"fmt"
	"slices"
	"strings"

	"github.com/isthmus-mesh/isthmus/plugin/collection"
	"github.com/isthmus-mesh/isthmus/server/encode"
)

// Profile describes a range of sink versions.
type Profile struct {
	// Name is the profile's name in configuration, metrics and the admin page.
	Name string
	// Versions names these versions for people.
	Versions string
	// Form is the encoding of resources. The shape is always inline: Pilots
	// handle WorkloadEntries over MCP only at their start.
	Form encode.Form
	// Barrier holds one collection until the ServiceEntries are acknowledged.
	Barrier bool
	// Why explains the profile in a sentence.
	Why string

	// collections are all that these sinks request; nil if that varies.
	collections []string
	// id is the node id of these sinks; most have none.
	id string
}

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
var profiles = []*Profile{
	{
		Name: "pilot-1.1", Versions: "Pilot 1.1 and 1.3",
		Form:        encode.Form{Legacy: encode.LegacyDrop},
		Why:         "A STATIC entry without endpoints is rejected, so it is removed while it has none. Both versions ask for the same 16 collections.",
		collections: set(networkingCollections, clientCollections, rbacCollections, authnCollections),
	},
	{
		Name: "pilot-1.2", Versions: "Pilot 1.2",
		Form:        encode.Form{Legacy: encode.LegacyDrop},
		Why:         "As 1.1; asks for rbac authorizationpolicies, too.",
		collections: set(networkingCollections, clientCollections, rbacCollections, authnCollections, []string{rbacPolicies}),
	},
	{
		Name: "pilot-1.4", Versions: "Pilot 1.4",
		Form:        encode.Form{Legacy: encode.LegacyDrop},
		Why:         "As 1.1; asks for security authorizationpolicies, too.",
		collections: set(networkingCollections, clientCollections, rbacCollections, authnCollections, []string{authorizations}),
	},
	{
		Name: "pilot-1.5", Versions: "Pilot 1.5",
		Form:        encode.Form{Legacy: encode.LegacyEndpoints},
		Why:         "Loses the last endpoint of an entry, and pushes the service's port in place of an endpoint's, unless create_time changes.",
		collections: set(networkingCollections, clientCollections, rbacCollections, authnCollections, securityCollections),
	},
	{
		Name: "pilot-1.6", Versions: "Pilot 1.6",
		Form:        encode.Form{Legacy: encode.LegacyEndpoints},
		Why:         "As 1.5; takes incremental responses.",
		collections: set(networkingCollections, clientCollections, rbacCollections, securityCollections, []string{workloadEntries}),
	},
	{
		Name: "pilot-1.7", Versions: "Pilot 1.7",
		Form: encode.Form{Legacy: encode.LegacyEmpty}, Barrier: true,
		Why:         "Loses the last endpoint of an entry unless create_time changes; is ready before a first load is applied.",
		collections: set(networkingCollections, rbacCollections, securityCollections, []string{workloadEntries}),
	},
	{
		Name: "pilot-1.8", Versions: "Pilot 1.8",
		Form: encode.Form{Legacy: encode.LegacyEmpty}, Barrier: true,
		Why:         "As 1.7; asks for workloadgroups.",
		collections: set(networkingCollections, securityCollections, []string{workloadEntries, workloadGroups}),
	},
	{
		Name: "synthetic", Versions: "the second stream of Pilot 1.4 and 1.5",
		Form:        encode.Form{Legacy: encode.LegacyDrop, Synthetic: true},
		Why:         "Takes changes of endpoints without a full push; ignores an empty response and pushes no removal, so removals go as full state.",
		collections: []string{syntheticEntries}, id: "SSEMCP",
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
func Profiles() []string {
	out := make([]string, len(profiles))
	for i, p := range profiles {
		out[i] = p.Name
	}
	return out
}

// Asks returns what sinks of a profile request, sorted, and their node id. Both
// are empty if that varies or the profile is unknown.
func Asks(profile string) (collections []string, id string) {
	p, err := profileOf(profile)
	if err != nil {
		return nil, ""
	}
	return slices.Clone(p.collections), p.id
}

func profileOf(name string) (*Profile, error) {
	i := slices.IndexFunc(profiles, func(p *Profile) bool { return p.Name == name })
	if i < 0 {
		return nil, fmt.Errorf("profile %q: there is no such profile; there are %s", name, strings.Join(Profiles(), ", "))
	}
	return profiles[i], nil
}

func mustProfile(name string) *Profile {
	p, err := profileOf(name)
	if err != nil {
		panic("BUG: " + err.Error())
	}
	return p
}

var mixer, tools = mustProfile("mixer"), mustProfile("mcp-tools")

// classify returns the profile that matches a set of collections, and whether
// further collections cannot change it.
func classify(asked map[string]bool) (p *Profile, final bool) {
	final = true
	for _, q := range profiles {
		if len(q.collections) == 0 || !containsAll(q.collections, asked) {
			continue
		}
		if len(q.collections) == len(asked) {
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
func containsAll(all []string, asked map[string]bool) bool {
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

// collectionOf returns the name in package collection. A name without one is
// returned as it is. With synthetic entries, services go to the stream that
// requests those and not to the main stream of 1.4 and 1.5.
func collectionOf(name string, p *Profile, synthetic bool) string {
	switch {
	case name == syntheticEntries && synthetic:
		return collection.ServiceEntry
	case name == serviceEntries && synthetic && (p.Name == "pilot-1.4" || p.Name == "pilot-1.5"):
		return name
	}
	if c := collections[name]; c != "" {
		return c
	}
	return name
}
