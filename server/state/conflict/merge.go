package conflict

import (
	"errors"
	"fmt"
	"math/bits"
	"slices"
	"strings"

	"github.com/isthmus-mesh/isthmus/server/encode"
)

// Member is an entry whose endpoints are served as those of the lead.
type Member[ID comparable] struct {
	ID ID
	Role
}

// Role is how the endpoints of a member are served.
type Role struct {
	Ports []Port // nil: those of the endpoints
	Share uint64
	Total uint64 // sum of the shares of all registries; 0: no weights
}

// Port maps a port of the lead to a port of a member's endpoints.
type Port struct {
	Name  string // of the lead's port
	From  string // of the member's port
	Other uint32 // its number if an endpoint states none
}

// Weights of endpoints. The share of a registry is divided among its endpoints
// by their own weights:
//
//	weightScale * share / (sum of shares) * own weight / (sum of own weights)
//
// The sum of own weights is rounded to 7 significant bits, exact up to 128 and
// off by at most 0.8%, so that adding or removing one instance does not change
// the weights of all others. The sum over all endpoints of a host is about
// weightScale, which leaves istiod room to multiply weights by a small factor,
// as it does between networks.
const (
	weightScale = 1 << 28
	weightBits  = 7
	// maxOwnWeight is the most that an endpoint weighs.
	maxOwnWeight = 1 << 20
)

// roundWeight rounds a sum of weights to 7 significant bits; the result is at
// least 1.
func roundWeight(sum uint64) uint64 {
	drop := bits.Len64(sum) - weightBits
	if drop <= 0 {
		return max(sum, 1)
	}
	return (sum + 1<<(drop-1)) >> drop << drop
}

// weightOf returns the weight of an endpoint, given its own weight and the
// rounded sum of those of the member.
func (m *Role) weightOf(own, unit uint64) uint32 {
	divisor := m.Total * unit
	return uint32(max((weightScale*m.Share*own+divisor/2)/divisor, 1)) //nolint:gosec // at most weightScale
}

// portsOf returns the ports of an endpoint under the lead's names, nil for
// those of the endpoint.
func (m *Role) portsOf(endpoint []byte) []encode.NamedPort {
	if m.Ports == nil {
		return nil
	}
	out := make([]encode.NamedPort, 0, len(m.Ports))
	for _, p := range m.Ports {
		number := encode.PortOf(endpoint, p.From)
		if number == 0 {
			number = p.Other
		}
		out = append(out, encode.NamedPort{Name: p.Name, Number: number})
	}
	return out
}

var (
	errNotService = errors.New("one of the two is served as it is (its endpoints are part of it, or selected)")
	errMoreHosts  = errors.New("it has other hosts besides")
	errWeights    = errors.New("weights are those of registries, and of this one, or of the other one, several services have the host")
)

// newMember returns e as a member of o, and the differences between the two.
// The error is the reason why it cannot be one.
func newMember[ID comparable](e, o *Contender[ID], rule *Rule, n int) (*Member[ID], string, error) {
	first, own := &o.Spec, &e.Spec
	switch {
	case !o.Composed || !e.Composed:
		return nil, "", errNotService
	case slices.ContainsFunc(HostKeys(own.Hosts), func(h string) bool { return !slices.Contains(HostKeys(first.Hosts), h) }):
		return nil, "", errMoreHosts
	case first.Resolution != own.Resolution:
		return nil, "", fmt.Errorf("its resolution is %s and that of the other one %s", own.Resolution, first.Resolution)
	}
	if len(o.Members) > 0 && (o.Lead.Total > 0) != (rule.Weights != nil) || rule.Weights != nil && slices.Contains(o.owners, e.Owner) {
		return nil, "", errWeights
	}
	m := &Member[ID]{ID: e.ID}
	for _, of := range []*Contender[ID]{o, e} {
		if err := m.weigh(of.Registry, rule, n); err != nil {
			return nil, "", err
		}
	}
	ports, notes, err := mapPorts(first.Ports, own.Ports)
	if err != nil {
		return nil, "", err
	}
	m.Ports = ports
	if first.Location != own.Location {
		notes = append(notes, fmt.Sprintf("its location is %s and that of the other one %s, which holds", own.Location, first.Location))
	}
	return m, strings.Join(notes, "; "), nil
}

// lead returns an entry as the first of its members.
func lead[ID comparable](e *Contender[ID], rule *Rule) Member[ID] {
	m := Member[ID]{ID: e.ID}
	_ = m.weigh(e.Registry, rule, 0) // newMember handled the error
	m.Ports, _, _ = mapPorts(e.Spec.Ports, e.Spec.Ports)
	return m
}

func (m *Role) weigh(registry string, rule *Rule, n int) error {
	if rule.Weights == nil {
		return nil
	}
	share, named := rule.Weights[registry]
	m.Share, m.Total = uint64(share), rule.total()
	if !named {
		return fmt.Errorf("conflicts[%d].weights does not name registry %q", n, registry)
	}
	return nil
}

// mapPorts maps each port of the lead to the port of a member with the same
// name, else the same number, else the only one if both have one. It also
// returns the differences.
func mapPorts(lead, own []encode.ServicePort) (rules []Port, notes []string, err error) {
	if len(lead) == 0 {
		return nil, nil, nil
	}
	used := make(map[int]bool)
	for _, p := range lead {
		i := slices.IndexFunc(own, func(q encode.ServicePort) bool { return q.Name == p.Name })
		if i < 0 {
			i = slices.IndexFunc(own, func(q encode.ServicePort) bool { return q.Number == p.Number })
		}
		if i < 0 && len(lead) == 1 && len(own) == 1 {
			i = 0
		}
		if i < 0 {
			return nil, nil, fmt.Errorf("it has no port %s (%d)", p.Name, p.Number)
		}
		q := own[i]
		used[i] = true
		rules = append(rules, Port{p.Name, q.Name, q.Target})
		if p.Number != q.Number {
			notes = append(notes, fmt.Sprintf("its port %s is %d and that of the other one %d, which holds", q.Name, q.Number, p.Number))
		}
		if !strings.EqualFold(p.Protocol, q.Protocol) {
			notes = append(notes, fmt.Sprintf("its port %s is %s and that of the other one %s, which holds", q.Name, q.Protocol, p.Protocol))
		}
	}
	for i, q := range own {
		if !used[i] {
			notes = append(notes, fmt.Sprintf("its port %s (%d) is not served, as the other one has none such", q.Name, q.Number))
		}
	}
	return rules, notes, nil
}
