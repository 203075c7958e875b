package translate

import (
	"cmp"
	"fmt"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/isthmus-mesh/isthmus/plugin/registry"
)

// servicePort is one served port of a service.
type servicePort struct {
	key      string // the registry's name, made legal; "" for the port without a name
	name     string
	number   uint32
	first    bool   // leads to the first port of each instance, whatever its key
	alone    bool   // the service has a single key
	protocol string // lower case
}

// maxPorts bounds the served ports of a service.
const maxPorts = 100

// namedPort is a port of an instance or a service, with its key.
type namedPort struct {
	key      string
	number   int
	protocol string
}

// portGroup collects the ports of one key while the service's ports are
// derived.
type portGroup struct {
	key       string
	fixed     int // the service's number stated by the registry, or 0
	total     int // instances with the port
	candidate int // the number of more than half of them, if any (Boyer-Moore)
	lead      int
	agree     int // instances with the candidate
	protocols votes
	stated    bool         // the service states the protocol; instances are ignored
	numbers   map[int]bool // of the instances; for the policy instance only

	name     string
	number   int
	protocol string
	// Why the protocol and the number are so, if the call is explained.
	ofProtocol, ofNumber Step
}

// validPorts returns what is wrong with an instance's ports, or "".
func validPorts(ports []registry.Port) string {
	if len(ports) == 0 {
		return "has no port: left out; register it with the port that it listens on"
	}
	for _, p := range ports {
		if !validPort(p.Number) {
			return fmt.Sprintf("has the port number %d: left out; register it with a port from 1 to 65535", p.Number)
		}
	}
	return ""
}

func validPort(n int) bool { return 1 <= n && n <= math.MaxUint16 }

// namePorts appends ports with unique keys and calls report, if not nil, for
// each name that is not used unchanged. The order of ports does not matter.
func namePorts(buf []namedPort, ports []registry.Port, report func(name, reason string)) []namedPort {
	if len(ports) == 1 && ports[0].Name == "" {
		return append(buf, namedPort{"", ports[0].Number, ports[0].Protocol})
	}
	if report == nil {
		report = func(string, string) {}
	}
	if !slices.IsSortedFunc(ports, comparePorts) {
		ports = slices.Clone(ports)
		slices.SortFunc(ports, comparePorts)
	}
	start := len(buf)
	var again []registry.Port
	for _, p := range ports {
		key := p.Name
		if key != "" {
			key = mendPortName(key)
			switch {
			case key == "":
				key = "port-" + strconv.Itoa(p.Number)
				report(p.Name, fmt.Sprintf("the name has no letter or digit: served as %q; rename the port, or set translate.port_name", key))
			case key != lower(p.Name):
				report(p.Name, fmt.Sprintf("the name is not a DNS label: served as %q; rename the port, or set translate.port_name", key))
			}
		}
		i := slices.IndexFunc(buf[start:], func(q namedPort) bool { return q.key == key })
		switch {
		case i < 0:
			buf = append(buf, namedPort{key, p.Number, p.Protocol})
		case buf[start+i].number != p.Number:
			again = append(again, registry.Port{Name: key, Number: p.Number, Protocol: p.Protocol})
		}
	}
	for _, p := range again {
		name := p.Name
		if name == "" {
			name = "port"
		}
		key := withHash(name, strconv.Itoa(p.Number), maxLabel)
		i := slices.IndexFunc(buf[start:], func(q namedPort) bool { return q.key == key })
		if i >= 0 {
			if buf[start+i].number != p.Number {
				report(p.Name, fmt.Sprintf("one instance has several ports of this name, and %q is taken too: number %d is left out; name the ports", key, p.Number))
			}
			continue
		}
		report(p.Name, fmt.Sprintf("one instance has several ports of this name: number %d is served as %q; name the ports", p.Number, key))
		buf = append(buf, namedPort{key, p.Number, p.Protocol})
	}
	return buf
}

func comparePorts(a, b registry.Port) int {
	return cmp.Or(cmp.Compare(a.Name, b.Name), cmp.Compare(a.Number, b.Number), cmp.Compare(a.Protocol, b.Protocol))
}

// matchPort returns the index of the instance's port that a service port leads
// to, or -1. A single port on each side matches whatever the names.
func matchPort(ofInstance []namedPort, p *servicePort) int {
	if p.first {
		return 0
	}
	for i := range ofInstance {
		if ofInstance[i].key == p.key {
			return i
		}
	}
	if p.alone && len(ofInstance) == 1 {
		return 0
	}
	return -1
}

// ports derives the service's ports, if any; see "Ports" and "Protocol" in the
// package comment.
func (c *call) ports(instances []*registry.Instance) []servicePort {
	report := func(name, reason string) { c.about("port "+quote(name), reason) }
	groups, valid := c.groupPorts(instances, report)
	if len(groups) == 0 {
		return nil
	}
	alone := len(groups) == 1
	slices.SortFunc(groups, func(a, b *portGroup) int { return cmp.Compare(a.key, b.key) })
	c.protocols(groups, instances)
	namePortGroups(groups)
	if c.t.o.PortPolicy == "instance" {
		groups = c.eachNumber(groups)
	}
	groups = c.numberPorts(groups)

	ports := make([]servicePort, len(groups), len(groups)+len(c.t.o.ExtraPorts))
	for i, g := range groups {
		ports[i] = servicePort{key: g.key, name: g.name, number: uint32(g.number), protocol: g.protocol, alone: alone}
		if g.total < valid {
			c.about("port "+quote(g.name), fmt.Sprintf("not every instance has it; what lacks it is reached on the service's number %d, "+
				"as Istio does; register the port on all instances, make two services of them, or choose instances by translate.instances", g.number))
		}
	}
	if c.t.portName != nil {
		c.renamePorts(ports)
	}
	if c.trace != nil {
		c.explainPorts(groups, ports)
	}
	return c.extraPorts(ports)
}

// eachNumber makes a group for each number of the instances, unless the number
// is fixed.
func (c *call) eachNumber(groups []*portGroup) (out []*portGroup) {
	more := 0
	for _, g := range groups {
		if c.fixedNumber(g) != 0 {
			out = append(out, g)
			continue
		}
		for i, number := range slices.Sorted(maps.Keys(g.numbers)) {
			if len(out) >= maxPorts {
				more++
				continue
			}
			each := *g
			each.fixed = number
			if i > 0 {
				each.name = withHash(g.name, strconv.Itoa(number), maxLabel)
			}
			out = append(out, &each)
		}
	}
	if more > 0 {
		c.about("ports", fmt.Sprintf("its instances have more than %d numbers: %d are left out as ports of the service; set translate.port_policy to auto or fixed", maxPorts, more))
	}
	return out
}

// fixedNumber returns the number fixed by the configuration or the registry, or
// 0.
func (c *call) fixedNumber(g *portGroup) int {
	for _, name := range [...]string{g.name, g.key} {
		if rule, ok := c.t.portRules[name]; ok && rule.Number != 0 {
			return rule.Number
		}
	}
	return g.fixed
}

// renamePorts applies the configured template of port names.
func (c *call) renamePorts(ports []servicePort) {
	taken := make(map[string]bool, len(ports))
	for i := range ports {
		p := &ports[i]
		raw, err := execute(c.t.portName, &PortData{p.key, int(p.number), p.protocol})
		raw = strings.TrimSpace(raw)
		name := mendPortName(raw)
		switch {
		case err != nil:
			c.about("port "+quote(p.name), fmt.Sprintf("keeps its name, as the template fails: %s; correct translate.port_name", quote(err.Error())))
			name = p.name
		case name == "":
			c.about("port "+quote(p.name), fmt.Sprintf("keeps its name, as %s cannot be made legal; correct translate.port_name", quote(raw)))
			name = p.name
		case strings.ContainsRune(raw, '_') && strings.ReplaceAll(lower(raw), "_", "-") == name:
			// http_proxy: the protocol has a character that is illegal in a
			// name.
		case name != lower(raw):
			c.about("port "+quote(p.name), fmt.Sprintf("the name %s is not legal: served as %s; correct translate.port_name", quote(raw), quote(name)))
		}
		for n := 0; taken[name]; n++ {
			name = withHash(name, strconv.Itoa(int(p.number)+n), maxLabel)
		}
		taken[name] = true
		p.name = name
	}
}

// extraPorts adds the configured extra ports.
func (c *call) extraPorts(ports []servicePort) []servicePort {
	for i, e := range c.t.o.ExtraPorts {
		if len(ports) == 0 || slices.ContainsFunc(ports, func(p servicePort) bool { return int(p.number) == e.Number }) {
			continue
		}
		to := 0
		if e.To != "" {
			if to = slices.IndexFunc(ports, func(p servicePort) bool { return p.key == e.To && !p.first }); to < 0 {
				c.about("port "+quote(e.Name), fmt.Sprintf("is left out, since the service has no port %s; correct translate.extra_ports[%d]", quote(e.To), i))
				continue
			}
		}
		extra := servicePort{key: e.To, name: e.Name, number: uint32(e.Number), protocol: ports[to].protocol, first: e.To == "", alone: ports[to].alone}
		if e.Protocol != "" {
			extra.protocol, _ = normalProtocol(e.Protocol)
		}
		for slices.ContainsFunc(ports, func(p servicePort) bool { return p.name == extra.name }) {
			extra.name = withHash(extra.name, strconv.Itoa(e.Number), maxLabel)
		}
		ports = append(ports, extra)
	}
	return ports
}

// groupPorts returns a group for each port of the service, and the number of
// instances with valid ports.
func (c *call) groupPorts(instances []*registry.Instance, report func(name, reason string)) (groups []*portGroup, valid int) {
	ofService := false
	find := func(key string, ofInstance int) *portGroup {
		for _, g := range groups {
			if g.key == key {
				return g
			}
		}
		if ofService && len(groups) == 1 && ofInstance == 1 {
			return groups[0]
		}
		return nil
	}
	// Ports stated by the service itself take precedence.
	var own []registry.Port
	for _, p := range c.svc.Ports {
		if validPort(p.Number) {
			own = append(own, p)
			continue
		}
		report(p.Name, fmt.Sprintf("the service states the port number %d: left out; state one from 1 to 65535", p.Number))
	}
	for _, p := range namePorts(nil, own, report) {
		g := &portGroup{key: p.key, fixed: p.number}
		g.protocols.add(p.protocol)
		g.stated = g.protocols.winner() != ""
		groups = append(groups, g)
	}
	ofService = len(groups) > 0
	each := c.t.o.PortPolicy == "instance"

	var buf []namedPort
	for _, inst := range instances {
		if validPorts(inst.Ports) != "" {
			continue
		}
		valid++
		buf = namePorts(buf[:0], inst.Ports, report)
		for _, p := range buf {
			g := find(p.key, len(buf))
			if g == nil {
				if ofService {
					report(p.key, "instances have it and the service does not: left out; add it to the service")
					continue
				}
				g = &portGroup{key: p.key}
				groups = append(groups, g)
			}
			g.total++
			if each {
				if g.numbers == nil {
					g.numbers = map[int]bool{}
				}
				g.numbers[p.number] = true
			}
			switch {
			case g.lead == 0:
				g.candidate, g.lead = p.number, 1
			case g.candidate == p.number:
				g.lead++
			default:
				g.lead--
			}
			if !g.stated {
				g.protocols.add(p.protocol)
			}
		}
	}
	if ofService {
		return groups, valid
	}
	for _, inst := range instances {
		if validPorts(inst.Ports) != "" {
			continue
		}
		buf = namePorts(buf[:0], inst.Ports, nil)
		for _, p := range buf {
			if g := find(p.key, len(buf)); g.candidate == p.number {
				g.agree++
			}
		}
	}
	return groups, valid
}

// protocols sets the protocol of each group.
func (c *call) protocols(groups []*portGroup, instances []*registry.Instance) {
	var common votes
	var of Step
	asked := false
	for _, g := range groups {
		if rule, ok := c.t.portRules[g.key]; ok && rule.Protocol != "" {
			g.protocol, _ = normalProtocol(rule.Protocol)
			g.ofProtocol = Step{Rule: "translate.ports", Text: "as configured"}
			continue
		}
		said := g.protocols
		g.ofProtocol = Step{Rule: "registry", Text: "as the registry states it of the port"}
		if said.empty() && g.key != "" {
			if p, ok := protocolOfName(g.key); ok {
				g.protocol = p
				g.ofProtocol = Step{Rule: "port", Text: "as the port's name begins with it"}
				continue
			}
		}
		if said.empty() {
			if !asked {
				common, of = c.t.commonProtocol(c.svc, instances)
				asked = true
			}
			said, g.ofProtocol = common, of
		}
		g.protocol = said.winner()
		subject := "protocol"
		if g.key != "" {
			subject = "protocol of port " + quote(g.key)
		}
		if said.empty() {
			var from string
			if g.protocol, from = c.t.guess(c.svc, g, instances); g.protocol != "" {
				g.ofProtocol = Step{Rule: "translate.protocol.guess", Text: "guessed from " + from}
				c.about(subject, fmt.Sprintf("nothing says it: served as %s, guessed from %s; register the protocol, fix it under translate.ports, or set translate.protocol.guess", wireProtocol(g.protocol), from))
				continue
			}
		}
		switch {
		case g.protocol == "" && said.unknown != "":
			g.protocol = c.t.defaultProtocol
			g.ofProtocol = Step{Rule: "translate.protocol.default", Text: "as what the registry states is unknown"}
			c.about(subject, fmt.Sprintf("%s is not a protocol that Istio knows: served as %s; correct it, or fix the protocol under translate.ports",
				quote(said.unknown), wireProtocol(g.protocol)))
		case g.protocol == "":
			g.protocol = c.t.defaultProtocol
			g.ofProtocol = Step{Rule: "translate.protocol.default", Text: "as nothing says it: neither the port, nor its name, nor metadata (translate.protocol.keys), nor a tag (translate.protocol.tags)"}
		default:
			if d := said.disputed(); d != "" {
				c.about(subject, fmt.Sprintf("%s: served as %s; make them agree, or fix the protocol under translate.ports", d, wireProtocol(g.protocol)))
			}
		}
	}
}

// namePortGroups sets the name of each group: its key or, if that is empty, its
// protocol.
func namePortGroups(groups []*portGroup) {
	taken := func(name string) bool {
		return slices.ContainsFunc(groups, func(g *portGroup) bool { return g.key == name })
	}
	for _, g := range groups {
		g.name = g.key
		if g.key != "" {
			continue
		}
		base := strings.ReplaceAll(g.protocol, "_", "-")
		g.name = base
		for n := 2; taken(g.name); n++ {
			g.name = base + "-" + strconv.Itoa(n)
		}
	}
}

// numberPorts sets the number of each group and drops groups for which no
// number is left. Configured numbers are assigned first, then the registry's,
// then the fallback, each in the order of keys.
func (c *call) numberPorts(groups []*portGroup) []*portGroup {
	used := make(map[int]bool, len(groups))
	free := func(from int) int {
		for range math.MaxUint16 {
			if !used[from] {
				return from
			}
			if from++; from > math.MaxUint16 {
				from = 1
			}
		}
		return 0
	}
	wanted := func(g *portGroup) (number, rank int) {
		for _, name := range [...]string{g.name, g.key} {
			if rule, ok := c.t.portRules[name]; ok && rule.Number != 0 {
				return rule.Number, 0
			}
		}
		switch {
		case g.fixed != 0:
			return g.fixed, 1
		case g.agree*2 > g.total && c.t.o.PortPolicy == "auto":
			return g.candidate, 1
		}
		return 0, 2
	}
	// The fallback depends on the position among all ports, so that it does not
	// change when other ports gain or lose a majority.
	fallback := func(i int) int { return (c.t.o.FallbackPort-1+i)%math.MaxUint16 + 1 }
	for rank := range 3 {
		for i, g := range groups {
			number, r := wanted(g)
			if r != rank {
				continue
			}
			if number == 0 {
				number = free(fallback(i))
			} else if used[number] {
				taken := number
				number = free(fallback(i))
				c.about("port "+quote(g.name), fmt.Sprintf("its number %d is another port's too: served as %d; fix the numbers under translate.ports", taken, number))
			}
			g.number = number
			g.ofNumber = c.numberStep(g, r, number)
			used[number] = true
		}
	}
	return slices.DeleteFunc(groups, func(g *portGroup) bool {
		if g.number == 0 {
			c.about("port "+quote(g.name), "no number is left for it: left out; serve fewer ports, or set translate.port_policy")
		}
		return g.number == 0
	})
}
