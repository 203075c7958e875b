package conflict

import (
	"fmt"
	"slices"
	"strings"

	"github.com/isthmus-mesh/isthmus/server/encode"
)

// Outcome is what a conflict means for a ServiceEntry.
type Outcome uint8

// Outcomes of a conflict.
const (
	Beside   Outcome = iota // both are served
	Shadowed                // not served
	Merged                  // served as part of the other
)

// String returns the outcome as logs and pages show it.
func (o Outcome) String() string { return [...]string{"served too", "shadowed", "merged"}[o] }

// Verdict is the decision on a ServiceEntry that conflicts with another one.
type Verdict[ID comparable] struct {
	Outcome Outcome
	By      ID     // the entry that takes precedence
	Own     bool   // that one is of the same registry
	Host    string // shared by both; "" if only the name is
	Rule    int    // index of the rule that applies, -1 for none
	Policy  Policy // of that rule
	Why     string // reason why it is not merged despite the rule
	Notes   string // differences between the two
}

// IsDisputed reports whether the entry is listed as a problem although it is
// served.
func (v *Verdict[ID]) IsDisputed() bool { return v != nil && v.Outcome != Shadowed && v.Notes != "" }

// IsAside reports whether the entry is not served on its own.
func (v *Verdict[ID]) IsAside() bool { return v != nil && v.Outcome != Beside }

// Says returns in words what sets the policy.
func (v *Verdict[ID]) Says() string {
	switch {
	case v.Rule >= 0:
		return fmt.Sprintf("conflicts[%d] says %s", v.Rule, v.Policy)
	case v.Own:
		return "no rule of conflicts with this registry fits the host, so the first service by name has it"
	}
	return "no rule of conflicts fits the host, so the first registry of the configuration has it"
}

// Problem describes the conflict of an entry and its remedy; "" means that
// there is no problem. The registry and the name are those of the entry that
// takes precedence.
func (v *Verdict[ID]) Problem(name, byRegistry, byName string) string {
	other := fmt.Sprintf("registry %q, which comes first in the configuration, has the host %s too (%s)", byRegistry, v.Host, byName)
	merge := "conflicts with policy merge serves the endpoints of both, and its weights move traffic from one to the other"
	isolate := "with policy isolate each is served in its namespace"
	if v.Own {
		other = fmt.Sprintf("%s of the same registry %q, which comes first by name, has the host %s too", byName, byRegistry, v.Host)
		merge = fmt.Sprintf("a rule of conflicts with registry %s and policy merge serves the endpoints of both", byRegistry)
	}
	if namespace(byName) == namespace(name) {
		isolate = "with policy isolate and another namespace (translate.namespace) each is served in its own"
	}
	rule := v.Says()
	switch {
	case v.Host == "":
		return fmt.Sprintf("registry %q, which comes first in the configuration, has a resource of the same name; shadowed. "+
			"Give it another name (translate.name), or remove one of the two", byRegistry)
	case v.Outcome == Shadowed && v.Why != "":
		return fmt.Sprintf("%s; %s, but %s; shadowed", other, rule, v.Why)
	case v.Outcome == Shadowed:
		return fmt.Sprintf("%s; %s; shadowed. If both are one service, %s; %s; if they are not, give it another host (translate.host)", other, rule, merge, isolate)
	case v.Outcome == Merged && v.Notes != "":
		return fmt.Sprintf("%s; merged, as %s; %s", other, rule, v.Notes)
	case v.Notes != "":
		return fmt.Sprintf("%s; both are served, as %s. Give both the same exportTo, or write a rule of conflicts with policy isolate if that is meant", other, v.Notes)
	}
	return ""
}

func namespace(name string) string {
	ns, _, _ := strings.Cut(name, "/")
	return ns
}

// visibility is the set of namespaces that see a ServiceEntry.
type visibility struct {
	all bool
	in  []string
}

func visibilityOf(se *encode.Entry, namespace string) (v visibility) {
	v.all = len(se.ExportTo) == 0
	for _, to := range se.ExportTo {
		switch to {
		case "*":
			v.all = true
		case ".":
			v.in = append(v.in, namespace)
		case "~":
		default:
			v.in = append(v.in, to)
		}
	}
	return v
}

// overlaps reports whether a namespace sees both.
func (v *visibility) overlaps(w *visibility) bool {
	switch {
	case v.all:
		return w.all || len(w.in) > 0
	case w.all:
		return len(v.in) > 0
	}
	return slices.ContainsFunc(v.in, func(ns string) bool { return slices.Contains(w.in, ns) })
}

// covers reports whether each namespace that sees w also sees v.
func (v *visibility) covers(w *visibility) bool {
	return v.all || !w.all && !slices.ContainsFunc(w.in, func(ns string) bool { return !slices.Contains(v.in, ns) })
}

// Contender is a ServiceEntry that may conflict with others.
type Contender[ID comparable] struct {
	ID              ID
	Owner           int    // its registry's place in the configuration
	Registry        string // its name
	Namespace, Name string // of the entry; Name includes the namespace
	Composed        bool   // its endpoints are resources of their own
	Spec            encode.Entry

	// The decision.

	Verdict *Verdict[ID]   // nil: served, without a conflict
	Members []*Member[ID]  // merged into it, without itself
	Lead    Member[ID]     // itself as a member, if it has any
	visible visibility     // in which namespaces
	into    *Contender[ID] // that it is merged into
	owners  []int          // of Members
}

// Decide sets the verdicts of contenders, which are in order of precedence, and
// returns the contested hosts with their policies.
//
// An entry is compared with those of its own registry first, as far as both are
// services: what a registry says of a host in resources of its own, Istio gets.
func Decide[ID comparable](all []*Contender[ID], rules Rules) (contested map[string]Policy) {
	contested = make(map[string]Policy)
	hosts, names := make(map[string][]*Contender[ID]), make(map[string]*Contender[ID])
	for _, e := range all {
		e.visible = visibilityOf(&e.Spec, e.Namespace)
		owner := names[e.Name]
		keys := HostKeys(e.Spec.Hosts)
		compare := func(own bool) {
			registry := ""
			if own {
				registry = e.Registry
			}
			for _, host := range keys {
				rule, n := rules.of(host, registry)
				for _, o := range hosts[host] {
					switch {
					case (o.Owner == e.Owner) != own, !o.visible.overlaps(&e.visible):
						continue
					case own && !(o.Composed && e.Composed), !own && o.into != nil:
						continue
					}
					if _, known := contested[host]; !known || !own {
						contested[host] = rule.Policy
					}
					if owner != nil && o != owner && o.into != owner {
						continue // the name decides
					}
					v, into, part := oppose(e, o, host, rule, n)
					if owner != nil && v.Outcome == Beside {
						v.Outcome, v.Notes = Shadowed, ""
					}
					if e.Verdict == nil || e.Verdict.Outcome == Beside && v.Outcome != Beside {
						e.Verdict = v
						if e.into = into; into != nil {
							into.add(e, part, rule)
						}
					}
				}
			}
		}
		if compare(true); !e.Verdict.IsAside() {
			compare(false)
		}
		switch {
		case e.into != nil: // what follows of its registry is compared with it
		case owner != nil && e.Verdict == nil:
			e.Verdict = &Verdict[ID]{Outcome: Shadowed, By: owner.ID, Rule: -1, Policy: DefaultPolicy}
			continue
		case e.Verdict.IsAside():
			continue
		default:
			names[e.Name] = e
		}
		for _, host := range keys {
			hosts[host] = append(hosts[host], e)
		}
	}
	return contested
}

// add makes e a member.
func (o *Contender[ID]) add(e *Contender[ID], part *Member[ID], rule *Rule) {
	if len(o.Members) == 0 {
		o.Lead = lead(o, rule)
	}
	o.Members, o.owners = append(o.Members, part), append(o.owners, e.Owner)
}

// oppose returns the verdict on e, given that o takes precedence and has the
// same host. If e is merged, it also returns the entry that it is merged into,
// and e as a member of it.
func oppose[ID comparable](e, o *Contender[ID], host string, rule *Rule, n int) (v *Verdict[ID], into *Contender[ID], part *Member[ID]) {
	v = &Verdict[ID]{Outcome: Beside, By: o.ID, Own: o.Owner == e.Owner, Host: host, Rule: n, Policy: rule.Policy}
	switch {
	case rule.Policy == Isolate && o.Namespace == e.Namespace:
		v.Outcome, v.Why = Shadowed, fmt.Sprintf("both are in the namespace %s; give one of the two another (translate.namespace)", e.Namespace)
	case rule.Policy == Isolate:
	case !o.visible.covers(&e.visible):
		v.Notes = "it is visible in namespaces that do not see the other one"
	case rule.Policy == Priority:
		v.Outcome = Shadowed
	default:
		if into = o; o.into != nil {
			into = o.into
		}
		m, notes, err := newMember(e, into, rule, n)
		if err != nil {
			v.Outcome, v.Why = Shadowed, err.Error()
			return v, nil, nil
		}
		v.Outcome, v.Notes, v.By = Merged, notes, into.ID
		return v, into, m
	}
	return v, nil, nil
}
