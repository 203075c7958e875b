package nacos

import (
	"cmp"
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
	ports    plugin.PortKeys
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
	a.problem = c.ports.Problem(a.instances)
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
	i.Ports = c.ports.Append(i.Ports, h.Metadata)
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
