package status

import (
	"cmp"
	"slices"
	"strings"
	"time"

	"github.com/isthmus-mesh/isthmus/server/changelog"
	"github.com/isthmus-mesh/isthmus/server/state/conflict"
)

// Removal is a resource that is still served after its registry removed it.
type Removal struct {
	Registry   string    `json:"registry"`
	Collection string    `json:"collection"`
	Name       string    `json:"name"`
	Service    string    `json:"service,omitempty"` // of an endpoint
	Reason     string    `json:"reason"`
	Since      time.Time `json:"since"`
	Until      time.Time `json:"until,omitzero"` // time of the removal; zero if refused
}

// Wait describes a registry that collections wait for.
type Wait struct {
	Registry    string    `json:"registry"`
	Collections []string  `json:"collections"` // sorted
	Since       time.Time `json:"since"`
}

// Claim is a ServiceEntry of a registry, with what became of it.
type Claim struct {
	Registry  string   `json:"registry"`
	Name      string   `json:"name"`
	Hosts     []string `json:"hosts"`
	Endpoints int      `json:"endpoints"`
	Version   string   `json:"version"`
	// Outcome is served, served too, merged or shadowed.
	Outcome string `json:"outcome"`
	// Rule is the configuration field that decided on a conflict, Reason what
	// it decided and the remedy. Both are empty without a conflict.
	Rule   string `json:"rule,omitempty"`
	Reason string `json:"reason,omitempty"`
	// Owner is the registry that takes precedence, and OwnerName the name of
	// its ServiceEntry.
	Owner     string `json:"owner,omitempty"`
	OwnerName string `json:"owner_name,omitempty"`
	// Rejected is why the registry's newest version is not served.
	Rejected string `json:"rejected,omitempty"`
	// Removals is what is served of it after its registry removed it, at most
	// 100 of RemovalCount.
	Removals     []Removal `json:"removals,omitempty"`
	RemovalCount int       `json:"removal_count,omitempty"`
	// The same under the names that these fields had before, for this release.
	Refused   string    `json:"refused,omitempty"`
	Kept      []Removal `json:"kept,omitempty"`
	KeptCount int       `json:"kept_count,omitempty"`
	// Inline and Workload are the revisions of the newest change, in each
	// shape.
	Inline   changelog.Revision `json:"-"`
	Workload changelog.Revision `json:"-"`
}

// maxRemovals bounds the paused removals of a claim that are listed.
const maxRemovals = 100

// SetRemovals sets what is served of the claim after it was removed.
func (c *Claim) SetRemovals(all []Removal) {
	slices.SortFunc(all, func(a, b Removal) int { return strings.Compare(a.Name, b.Name) })
	c.RemovalCount, c.Removals = len(all), all[:min(len(all), maxRemovals)]
	c.Refused, c.Kept, c.KeptCount = c.Rejected, c.Removals, c.RemovalCount
}

// SetConflict sets what the decision on a conflict means, where "conflicts[0]
// says merge" is the rule, and the problem may be empty.
func (c *Claim) SetConflict(rule, problem string) {
	c.Reason = cmp.Or(problem, rule)
	if c.Rule = "conflicts"; strings.HasPrefix(rule, "conflicts[") {
		c.Rule, _, _ = strings.Cut(rule, " ")
	}
}

// Service is a service as the admin pages show it.
type Service struct {
	Registry  string   `json:"registry"`
	Name      string   `json:"name"` // of its ServiceEntry
	Hosts     []string `json:"hosts"`
	Endpoints int      `json:"endpoints"`
	Version   string   `json:"version"`
	// ShadowedBy is who owns the host or the name while the service is
	// shadowed: a registry, or a service (namespace/name) of the same registry.
	// It is empty if the service is served.
	ShadowedBy string `json:"shadowed_by,omitempty"`
	// MergedWith are the registries, or services of the same registry, that are
	// merged with this one, the lead first.
	MergedWith []string `json:"merged_with,omitempty"`
	// Beside is the registry, or the service of the same registry, with the
	// same host that is served as well.
	Beside string `json:"beside,omitempty"`
}

// Conflict is a host that a second service has, of another registry or of the
// same one.
type Conflict struct {
	Host     string
	Policy   conflict.Policy
	Registry string // the second one's
	Name     string // of its ServiceEntry
	Outcome  string // shadowed, merged or served too
	// Owner is the registry that takes precedence, and OwnerName the name of
	// its ServiceEntry.
	Owner, OwnerName string
}
