package nacos

import (
	"cmp"
	"fmt"
	"math"
	"net"
	"strconv"

	"github.com/nacos-group/nacos-sdk-go/v2/model"

	"github.com/isthmus-mesh/isthmus/plugin"
	"github.com/isthmus-mesh/isthmus/plugin/registry"
)

// defaultCluster is the cluster of an instance without one.
const defaultCluster = "DEFAULT"

// converter converts instances of Nacos to instances of package registry.
type converter struct {
	ports    []PortKey
	locality string
}

func newConverter(c Config) converter { return converter{ports: c.Ports, locality: c.ClusterLocality} }

// answer is the state of a service that a server has reported.
type answer struct {
	instances []registry.Instance
	problem   string // what cannot be used, "" for nothing
	reference uint64 // time of the server's clock
	protected bool   // whether protectThreshold is reached
}

// answer converts an answer or a push.
func (c converter) answer(info *model.Service) answer {
	a := answer{instances: c.instances(info.Hosts), reference: info.LastRefTime, protected: info.ReachProtectionThreshold}
	a.problem = c.badPorts(a.instances)
	return a
}

// instances converts the hosts of an answer, sorted by ID. Of hosts with the
// same identity in Nacos the last one counts.
func (c converter) instances(hosts []model.Instance) []registry.Instance {
	out := make([]registry.Instance, 0, len(hosts))
	for i := range hosts {
		out = append(out, c.instance(&hosts[i]))
	}
	return plugin.SortInstances(out)
}

// badPorts describes invalid port metadata: the first such value and the number
// of instances with one. It returns "" for none.
func (c converter) badPorts(instances []registry.Instance) string {
	first, n := "", 0
	for i := range instances {
		for _, p := range c.ports {
			text, ok := instances[i].Meta[p.Key]
			if !ok {
				continue
			}
			if _, ok := portOf(text); ok {
				continue
			}
			if n++; n == 1 {
				first = fmt.Sprintf("instance %s has %q as %s in its metadata, which is no port number, so it is served without the port %q: register it with 1 to 65535, "+
					"or change config.ports", instances[i].ID, plugin.Excerpt(text), p.Key, p.Name)
			}
		}
	}
	if n > 1 {
		return fmt.Sprintf("%s (and %d more like it)", first, n-1)
	}
	return first
}

// portOf parses a port number.
func portOf(text string) (number int, ok bool) {
	n, err := strconv.Atoi(text)
	return n, err == nil && n >= 1 && n <= math.MaxUint16
}

// instance converts one host. Its ID has address, port and cluster, which
// identify an instance within a service of Nacos; the instanceId of Nacos is
// missing in some versions.
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
		if n, ok := portOf(h.Metadata[p.Key]); ok && n != port {
			i.Ports = append(i.Ports, registry.Port{Name: p.Name, Number: n, Protocol: p.Protocol})
		}
	}
	if cluster == defaultCluster {
		return i // not a locality
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
