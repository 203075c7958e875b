package conflict

import (
	"fmt"
	"slices"

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
func (o Outcome) String() string { return [...]string{"served too", "kept back", "merged"}[o] }

// Verdict is the decision on a ServiceEntry that conflicts with another
// registry's.
type Verdict[ID comparable] struct {
	Outcome Outcome
	By      ID     // the entry that takes precedence
	Host    string // shared by both; "" if only the name is
	Rule    int    // index of the rule that applies, -1 for none
	Why     string // reason why it is not merged despite the rule
	Notes   string // differences between the two
}

// IsDisputed reports whether the entry is listed as a problem although it is
// served.
func (v *Verdict[ID]) IsDisputed() bool { return v != nil && v.Outcome != Shadowed && v.Notes != "" }

// IsAside reports whether the entry is not served on its own.
func (v *Verdict[ID]) IsAside() bool { return v != nil && v.Outcome != Beside }

// Problem describes the conflict of an entry and its remedy; "" means that
// there is no problem. The registry and the name are those of the entry that
// takes precedence.
func (v *Verdict[ID]) Problem(name, byRegistry, byName string, rules Rules) string {
	other := fmt.Sprintf("registry %q, which comes first in the configuration, has the host %s too (%s)", byRegistry, v.Host, byName)
	policy, rule := rules.Says(v.Rule)
	isolate := "with policy isolate each is served in its namespace"
	if byName == name {
		isolate = "with policy isolate and another namespace (translate.namespace) each is served in its own"
	}
	switch {
	case v.Host == "":
		return fmt.Sprintf("registry %q, which comes first in the configuration, has a resource of the same name; kept back. "+
			"Give it another name (translate.name), or remove one of the two", byRegistry)
	case v.Outcome == Shadowed && v.Why != "":
		return fmt.Sprintf("%s; %s, but %s; kept back", other, rule, v.Why)
	case v.Outcome == Shadowed && v.Rule >= 0 && policy == Isolate:
		return fmt.Sprintf("%s; %s, but both have one name; kept back. Give one of the two another namespace (translate.namespace)", other, rule)
	case v.Outcome == Shadowed:
		return fmt.Sprintf("%s; %s; kept back. If both are one service, conflicts with policy merge serves the endpoints of both, "+
			"and its weights move traffic from one to the other; %s; if they are not, give it another host (translate.host)", other, rule, isolate)
	case v.Outcome == Merged && v.Notes != "":
		return fmt.Sprintf("%s; merged, as %s; %s", other, rule, v.Notes)
	case v.Notes != "":
		return fmt.Sprintf("%s; both are served, as %s. Give both the same exportTo, or write a rule of conflicts with policy isolate if that is meant", other, v.Notes)
	}
	return ""
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
	Owner           int    // entries of one owner do not conflict
	Registry        string // its name
	Namespace, Name string // of the entry; Name includes the namespace
	Composed        bool   // its endpoints are resources of their own
	Spec            encode.Entry

	// The decision.

	Verdict *Verdict[ID]  // nil: served, without a conflict
	Members []*Member[ID] // merged into it, without itself
	Lead    Member[ID]    // itself as a member, if it has any
	visible visibility    // in which namespaces
}

// Decide sets the verdicts of contenders, which are in order of precedence, and
// returns the contested hosts with their policies.
func Decide[ID comparable](all []*Contender[ID], rules Rules) (contested map[string]Policy) {
	contested = make(map[string]Policy)
	hosts, names := make(map[string][]*Contender[ID]), make(map[string]*Contender[ID])
	for _, e := range all {
		e.visible = visibilityOf(&e.Spec, e.Namespace)
		owner := names[e.Name]
		var into *Contender[ID]
		var part *Member[ID]
		keys := HostKeys(e.Spec.Hosts)
		for _, host := range keys {
			rule, n := rules.of(host)
			for _, o := range hosts[host] {
				if o.Owner == e.Owner || !o.visible.overlaps(&e.visible) {
					continue
				}
				contested[host] = rule.Policy
				if owner != nil && o != owner {
					continue // the name decides
				}
				v, m := oppose(e, o, host, rule, n)
				if owner != nil && v.Outcome == Beside {
					v.Outcome, v.Notes = Shadowed, ""
				}
				if e.Verdict == nil || e.Verdict.Outcome == Beside && v.Outcome != Beside {
					e.Verdict, into, part = v, o, m
				}
			}
		}
		switch {
		case part != nil:
			if len(into.Members) == 0 {
				rule, _ := rules.of(e.Verdict.Host)
				into.Lead = lead(into, rule)
			}
			into.Members = append(into.Members, part)
			continue
		case owner != nil && e.Verdict == nil:
			e.Verdict = &Verdict[ID]{Outcome: Shadowed, By: owner.ID, Rule: -1}
			continue
		case e.Verdict.IsAside():
			continue
		}
		names[e.Name] = e
		for _, host := range keys {
			hosts[host] = append(hosts[host], e)
		}
	}
	return contested
}

// oppose returns the verdict on e, given that o takes precedence and has the
// same host. If e is merged, it also returns e as a member.
func oppose[ID comparable](e, o *Contender[ID], host string, rule *Rule, n int) (*Verdict[ID], *Member[ID]) {
	v := &Verdict[ID]{Outcome: Beside, By: o.ID, Host: host, Rule: n}
	switch {
	case rule.Policy == Isolate:
	case !o.visible.covers(&e.visible):
		v.Notes = "it is visible in namespaces that do not see the other one"
	case rule.Policy == Priority:
		v.Outcome = Shadowed
	default:
		m, notes, err := newMember(e, o, rule, n)
		if err != nil {
			v.Outcome, v.Why = Shadowed, err.Error()
			break
		}
		v.Outcome, v.Notes = Merged, notes
		return v, m
	}
	return v, nil
}
