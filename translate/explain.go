package translate

import (
	"cmp"
	"fmt"
	"regexp"
	"slices"
	"strings"

	"github.com/isthmus-mesh/isthmus/plugin/registry"
)

// Step is one rule that decided something about a service or an instance.
type Step struct {
	// Rule is the field of the configuration, as in "translate.health". What
	// the registry alone decides is named by its word: "maintenance", "weight",
	// "address", "port".
	Rule string
	// Subject is the part that it is about, "" for the whole: "host", "port
	// http".
	Subject string
	// Text describes the outcome.
	Text string
}

// Explanation describes how a service was translated.
type Explanation struct {
	// Host and Name are those of the ServiceEntry; both may be set although the
	// service is not served.
	Host, Name string
	Served     bool
	Steps      []Step // of the service, in the order of the rules
	// Instances are those of the service by ID, without those that have no ID.
	Instances []ExplainedInstance
}

// ExplainedInstance describes how an instance was translated.
type ExplainedInstance struct {
	registry.Instance
	// Resource is the name of its WorkloadEntry, "" if it is left out.
	Resource string
	Steps    []Step
}

// trace collects the steps of one call. A nil trace collects nothing.
type trace struct {
	steps     []Step
	instances map[string][]Step // by ID
	resources map[string]string // names of WorkloadEntries by ID
}

// step adds a step about the service.
func (c *call) step(rule, subject, format string, args ...any) {
	c.trace.steps = append(c.trace.steps, Step{rule, subject, fmt.Sprintf(format, args...)})
}

// stepOf adds a step about an instance.
func (c *call) stepOf(id, rule, text string) {
	c.trace.instances[id] = append(c.trace.instances[id], Step{Rule: rule, Text: text})
}

// Host returns the host of the service, or "".
func (r *Result) Host() string { return r.names.host }

// HasHost reports whether the service has a host, by its name or an alias.
func (r *Result) HasHost(host string) bool {
	return strings.EqualFold(r.names.host, host) && host != "" ||
		r.names.more != nil && slices.ContainsFunc(r.names.more.aliases, func(a string) bool { return strings.EqualFold(a, host) })
}

// Explain translates a service and describes each step. It costs a full
// translation and keeps nothing.
func (t *Translator) Explain(svc registry.Service, instances []registry.Instance) *Explanation {
	c := &call{t: t, svc: &svc, trace: &trace{instances: make(map[string][]Step), resources: make(map[string]string)}}
	c.labels.call = c
	r := c.service(instances, nil)
	e := &Explanation{Host: r.names.host, Steps: c.trace.steps, Served: r.Entry != nil}
	if r.names.name != "" {
		e.Name = r.names.namespace + "/" + r.names.name
	}
	for _, p := range slices.Concat(r.LeftOut, r.Problems) {
		if id, ok := strings.CutPrefix(p.ID, "service "+c.key()); ok && !strings.HasPrefix(id, "/") {
			e.Steps = append(e.Steps, Step{cmp.Or(FieldOf(p.Reason), "registry"), strings.TrimSpace(id), p.Reason})
		}
	}
	seen := make(map[string]bool, len(instances))
	for i := range instances {
		inst := &instances[i]
		if inst.ID == "" || seen[inst.ID] {
			continue
		}
		seen[inst.ID] = true
		e.Instances = append(e.Instances, ExplainedInstance{Instance: *inst, Resource: c.trace.resources[inst.ID], Steps: c.trace.instances[inst.ID]})
	}
	slices.SortFunc(e.Instances, func(a, b ExplainedInstance) int { return cmp.Compare(a.ID, b.ID) })
	return e
}

var fieldInReason = regexp.MustCompile(`\b(?:translate|limits|owns)(?:\.[a-z_]+(?:\[[0-9]+\])?)+`)

// FieldOf returns the last field of the configuration that a reason names, or
// "".
func FieldOf(reason string) string {
	all := fieldInReason.FindAllString(reason, -1)
	if len(all) == 0 {
		return ""
	}
	return all[len(all)-1]
}

// idleRule returns the rule of [Translator.idle].
func idleRule(inst *registry.Instance) string {
	switch {
	case inst.Disabled:
		return "maintenance"
	case inst.Health == registry.HealthCritical || inst.Health == registry.HealthWarning:
		return "translate.health"
	default:
		return "weight"
	}
}

// explainNames describes the names of a service.
func (c *call) explainNames(n *names, rawHost string) {
	if n.leftOut != "" {
		return // listed with the reason
	}
	if n.host != "" {
		c.step("translate.host", "host", "%s", changedText(rawHost, n.host))
	}
	if n.namespace != "" {
		c.step("translate.namespace", "namespace", "%s", n.namespace)
	}
	if n.name != "" {
		c.step("translate.name", "name", "%s", n.name)
	}
	if n.more != nil && len(n.more.aliases) > 0 {
		c.step("translate.aliases", "hosts", "%s", strings.Join(n.more.aliases, ", "))
	}
}

func changedText(raw, now string) string {
	if lower(raw) == lower(now) {
		return now
	}
	return fmt.Sprintf("%s, made legal from %s", now, quote(raw))
}

// explainPorts describes the ports of a service.
func (c *call) explainPorts(groups []*portGroup, ports []servicePort) {
	for i, p := range ports {
		g := groups[i]
		c.step(g.ofNumber.Rule, "port "+p.name, "number %d, %s", p.number, g.ofNumber.Text)
		c.step(g.ofProtocol.Rule, "protocol of port "+p.name, "%s, %s", wireProtocol(p.protocol), g.ofProtocol.Text)
	}
}

// numberStep describes the source of a port's number, of a rank in
// [call.numberPorts].
func (c *call) numberStep(g *portGroup, rank, number int) Step {
	switch {
	case rank == 0:
		return Step{Rule: "translate.ports", Text: "as configured"}
	case rank == 1 && number == g.fixed && c.t.o.PortPolicy == "instance":
		return Step{Rule: "translate.port_policy", Text: "as instances have it"}
	case rank == 1 && number == g.fixed:
		return Step{Rule: "registry", Text: "as the registry states it of the service"}
	case rank == 1 && number == g.candidate:
		return Step{Rule: "translate.port_policy", Text: "that of most instances"}
	default:
		return Step{Rule: "translate.fallback_port", Text: "as the instances do not agree on one; proxies reach each instance on its own"}
	}
}

// explainInstance describes what an instance is served with.
func (c *call) explainInstance(id, name string, out *workload) {
	c.trace.resources[id] = name
	if len(out.labels) > 0 {
		var all []string
		for _, l := range out.labels {
			all = append(all, l.key+"="+l.value)
		}
		c.stepOf(id, "translate.labels", "labels "+strings.Join(all, ", "))
	}
	if out.locality != "" {
		c.stepOf(id, "translate.locality", "locality "+out.locality)
	}
	if out.weight > 0 {
		c.stepOf(id, "translate.weights", fmt.Sprintf("weight %d", out.weight))
	}
}
