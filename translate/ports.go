package translate

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/isthmus-mesh/isthmus/plugin/registry"
)

// servicePort is one port of a service as it is served.
type servicePort struct {
	key      string // the name in the registry, made legal; "" is the port without a name
	name     string
	number   uint32
	protocol string // lower case
}

// namedPort is one port of an instance or a service under its key.
type namedPort struct {
	key      string
	number   int
	protocol string
}

// portGroup is what is known of the ports of one key while the service's ports are worked out.
type portGroup struct {
	key       string
	fixed     int // the number that the registry states for the service, or 0
	total     int // instances that have the port
	candidate int // the number that more than half of them state, if any does (Boyer-Moore)
	lead      int
	agree     int // how many state the candidate
	protocols votes
	stated    bool // the service itself states the protocol; what instances say does not count

	name     string
	number   int
	protocol string
}

// validPorts says what is wrong with an instance's ports, or "".
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

// namePorts appends ports under their keys, which are unique in the outcome, and calls report, if it is not nil, for each name
// that is not used as it is. The order of ports does not matter.
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
				report(p.Name, fmt.Sprintf("the name has no letter or digit: served as %q; rename the port", key))
			case key != lower(p.Name):
				report(p.Name, fmt.Sprintf("the name is no DNS label: served as %q; rename the port", key))
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

// matchPort returns the index of the service port that an instance's port belongs to, or -1. Where both sides have a single port
// these belong together whatever they are called.
func matchPort(ports []servicePort, key string, ofInstance int) int {
	for i := range ports {
		if ports[i].key == key {
			return i
		}
	}
	if len(ports) == 1 && ofInstance == 1 {
		return 0
	}
	return -1
}

// ports works out the service's ports; see "Ports" and "Protocol" in the package comment. It returns none if nothing is known.
func (c *call) ports(instances []*registry.Instance) []servicePort {
	report := func(name, reason string) { c.about("port "+quote(name), reason) }
	groups, valid := c.groupPorts(instances, report)
	if len(groups) == 0 {
		return nil
	}
	slices.SortFunc(groups, func(a, b *portGroup) int { return cmp.Compare(a.key, b.key) })
	c.protocols(groups, instances)
	namePortGroups(groups)
	groups = c.numberPorts(groups)

	ports := make([]servicePort, len(groups))
	for i, g := range groups {
		ports[i] = servicePort{g.key, g.name, uint32(g.number), g.protocol}
		if g.total < valid {
			c.about("port "+quote(g.name), fmt.Sprintf("not every instance has it; what lacks it is reached on the service's number %d, "+
				"as Istio does; register the port on all instances or make two services of them", g.number))
		}
	}
	return ports
}

// groupPorts returns a group for each port of the service, and how many instances have valid ports.
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
	// A notion of ports of the service's own, where the registry has it, wins.
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
	asked := false
	for _, g := range groups {
		if rule, ok := c.t.portRules[g.key]; ok && rule.Protocol != "" {
			g.protocol, _ = normalProtocol(rule.Protocol)
			continue
		}
		said := g.protocols
		if said.empty() && g.key != "" {
			if p, ok := protocolOfName(g.key); ok {
				g.protocol = p
				continue
			}
		}
		if said.empty() {
			if !asked {
				common, asked = c.t.commonProtocol(c.svc, instances), true
			}
			said = common
		}
		g.protocol = said.winner()
		subject := "protocol"
		if g.key != "" {
			subject = "protocol of port " + quote(g.key)
		}
		switch {
		case g.protocol == "" && said.unknown != "":
			g.protocol = c.t.defaultProtocol
			c.about(subject, fmt.Sprintf("%s is no protocol that Istio knows: served as %s; correct it, or fix the protocol under translate.ports",
				quote(said.unknown), wireProtocol(g.protocol)))
		case g.protocol == "":
			g.protocol = c.t.defaultProtocol
		default:
			if d := said.disputed(); d != "" {
				c.about(subject, fmt.Sprintf("%s: served as %s; make them agree, or fix the protocol under translate.ports", d, wireProtocol(g.protocol)))
			}
		}
	}
}

// namePortGroups sets the name of each group: its key or, without one, its protocol.
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

// numberPorts sets the number of each group and leaves out those for which none is left. What is configured goes first, then
// what the registry says, then the fallback; within these the order of keys decides who gets a number that two want.
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
		case g.agree*2 > g.total:
			return g.candidate, 1
		}
		return 0, 2
	}
	// The fallback goes by the place among all ports, not among those that need it: whether others agree must not move it.
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
			used[number] = true
		}
	}
	return slices.DeleteFunc(groups, func(g *portGroup) bool {
		if g.number == 0 {
			c.about("port "+quote(g.name), "no number is left for it: left out; serve fewer ports")
		}
		return g.number == 0
	})
}
