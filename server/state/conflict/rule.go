package conflict

import (
	"path"
	"slices"
	"strings"
)

// Policy is the handling of a host that several services have.
type Policy string

// Policies of a [Rule].
const (
	// Priority serves the entry of the first registry that has the host.
	Priority Policy = "priority"
	// Isolate serves the entry of each registry in its own namespace.
	Isolate Policy = "isolate"
	// Merge serves the entry of the first registry with the endpoints of all.
	Merge Policy = "merge"
)

// DefaultPolicy applies to hosts that match no rule.
const DefaultPolicy = Priority

// Policies are all policies.
var Policies = []Policy{Priority, Isolate, Merge}

// Rule sets the policy of hosts that several registries have, or several
// services of one.
type Rule struct {
	// Registry is the registry whose services have the host. Empty: services of
	// several registries.
	Registry string
	// Hosts are patterns of [path.Match]; * matches any run of characters, dots
	// included. The case of letters does not matter.
	Hosts  []string
	Policy Policy
	// Weights are the shares of traffic by registry, for Merge. Nil keeps the
	// weights of the endpoints.
	Weights map[string]uint32
}

func (r *Rule) fits(host string) bool {
	return slices.ContainsFunc(r.Hosts, func(pattern string) bool {
		ok, _ := path.Match(strings.ToLower(pattern), HostKey(host))
		return ok
	})
}

func (r *Rule) total() (n uint64) {
	for _, w := range r.Weights {
		n += uint64(w)
	}
	return n
}

var defaultRule = Rule{Policy: DefaultPolicy}

// Rules are in the order of the configuration; the first that fits a host
// applies.
type Rules []Rule

// of returns the rule that applies to a host of services of a registry, of
// several if that is empty, and its index, -1 for the default.
func (r Rules) of(host, registry string) (*Rule, int) {
	for n := range r {
		if r[n].Registry == registry && r[n].fits(host) {
			return &r[n], n
		}
	}
	return &defaultRule, -1
}

// HostKey returns what hosts are compared by. Proxies route requests, and DNS
// resolves names, whatever the case of the letters: of two hosts that differ
// only in it, istiod gives a route to one.
func HostKey(host string) string { return strings.ToLower(host) }

// HostKeys returns the keys of hosts, each once.
func HostKeys(hosts []string) []string {
	if len(hosts) == 1 && HostKey(hosts[0]) == hosts[0] {
		return hosts
	}
	keys := make([]string, 0, len(hosts))
	for _, host := range hosts {
		if key := HostKey(host); !slices.Contains(keys, key) {
			keys = append(keys, key)
		}
	}
	return keys
}
