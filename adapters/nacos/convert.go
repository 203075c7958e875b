package nacos

import (
	"cmp"
	"math"
	"net"
	"slices"
	"strconv"

	"github.com/nacos-group/nacos-sdk-go/v2/model"

	"github.com/isthmus-mesh/isthmus/plugin/registry"
)

// defaultCluster is the cluster of an instance that names none.
const defaultCluster = "DEFAULT"

// converter turns Nacos' words into the neutral ones.
type converter struct {
	ports    []PortKey
	locality string
}

func newConverter(c Config) converter { return converter{ports: c.Ports, locality: c.ClusterLocality} }

// instances converts the hosts of an answer, sorted by ID. Of hosts that Nacos cannot tell apart itself the last one counts.
func (c converter) instances(hosts []model.Instance) []registry.Instance {
	out := make([]registry.Instance, 0, len(hosts))
	for i := range hosts {
		out = append(out, c.instance(&hosts[i]))
	}
	slices.SortStableFunc(out, func(a, b registry.Instance) int { return cmp.Compare(a.ID, b.ID) })
	n := 0
	for i := range out {
		if i+1 < len(out) && out[i].ID == out[i+1].ID {
			continue
		}
		out[n] = out[i]
		n++
	}
	clear(out[n:])
	return out[:n]
}

// instance converts one host. Within a service Nacos tells instances apart by address, port and cluster, and so does the ID; its own
// instanceId is missing in some versions.
func (c converter) instance(h *model.Instance) registry.Instance {
	port := int(min(h.Port, math.MaxInt32))
	cluster := cmp.Or(h.ClusterName, defaultCluster)
	i := registry.Instance{
		ID:       net.JoinHostPort(h.Ip, strconv.Itoa(port)),
		Address:  h.Ip,
		Ports:    []registry.Port{{Number: port}},
		Meta:     h.Metadata,
		Weight:   new(h.Weight),
		Health:   registry.HealthPassing,
		Disabled: !h.Enable,
		Cluster:  cluster,
	}
	if cluster != defaultCluster {
		i.ID += "/" + cluster
	}
	if !h.Healthy {
		i.Health = registry.HealthCritical
	}
	for _, p := range c.ports {
		if n, err := strconv.Atoi(h.Metadata[p.Key]); err == nil && n != port {
			i.Ports = append(i.Ports, registry.Port{Name: p.Name, Number: n, Protocol: p.Protocol})
		}
	}
	switch c.locality {
	case "region":
		i.Locality.Region = cluster
	case "zone":
		i.Locality.Zone = cluster
	case "sub_zone":
		i.Locality.SubZone = cluster
	}
	return i
}
