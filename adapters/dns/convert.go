package dns

import (
	"cmp"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/isthmus-mesh/isthmus/plugin/registry"
)

// host is the addresses of a name. target is the SRV record that names it.
type host struct {
	target target
	addrs  []netip.Addr
}

// instances returns those of a name with addresses of its own.
func (n Name) instances(addrs []netip.Addr) []registry.Instance {
	out := make([]registry.Instance, 0, len(addrs))
	for _, a := range addrs {
		out = append(out, n.instance(a, n.Port))
	}
	return out
}

// srvInstances returns those of a name with SRV records. A record's weight is
// divided among the addresses of its host.
func (n Name) srvInstances(hosts []host, all bool) []registry.Instance {
	weighted := slices.ContainsFunc(hosts, func(h host) bool { return h.target.weight > 0 })
	var out []registry.Instance
	for _, h := range hosts {
		for _, a := range h.addrs {
			i := n.instance(a, int(h.target.port))
			i.Node = strings.TrimSuffix(h.target.host, ".")
			if weighted {
				// RFC 2782: weight 0 is a very small chance, not none.
				i.Weight = new(float64(max(h.target.weight, 1)) / float64(len(h.addrs)))
			}
			if all {
				i.Meta = maps.Clone(i.Meta)
				if i.Meta == nil {
					i.Meta = map[string]string{}
				}
				i.Meta["priority"] = fmt.Sprint(h.target.priority)
			}
			out = append(out, i)
		}
	}
	return out
}

func (n Name) instance(addr netip.Addr, port int) registry.Instance {
	i := registry.Instance{ID: addr.String(), Address: addr.String(), Meta: n.Metadata}
	if port != 0 {
		i.ID = net.JoinHostPort(i.Address, strconv.Itoa(port))
		i.Ports = []registry.Port{{Name: n.PortName, Number: port, Protocol: n.Protocol}}
	}
	return i
}

// merge sorts instances and makes one of those with one ID, with the sum of
// their weights.
func merge(all []registry.Instance) []registry.Instance {
	slices.SortStableFunc(all, func(a, b registry.Instance) int { return cmp.Compare(a.ID, b.ID) })
	var out []registry.Instance
	for _, i := range all {
		if len(out) == 0 || out[len(out)-1].ID != i.ID {
			out = append(out, i)
			continue
		}
		if last := &out[len(out)-1]; last.Weight != nil && i.Weight != nil {
			last.Weight = new(*last.Weight + *i.Weight)
		}
	}
	return out
}
