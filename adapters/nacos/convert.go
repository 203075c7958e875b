package nacos

import (
	"cmp"
	"fmt"
	"math"
	"net"
	"strconv"
	"strings"

	"github.com/nacos-group/nacos-sdk-go/v2/model"

	"github.com/isthmus-mesh/isthmus/internal/dubbo"
	"github.com/isthmus-mesh/isthmus/plugin"
	"github.com/isthmus-mesh/isthmus/plugin/registry"
)

// defaultCluster is the cluster of an instance without one.
const defaultCluster = "DEFAULT"

// converter converts instances of Nacos to instances of package registry.
type converter struct {
	ports    plugin.PortKeys
	locality string
	dubbo    bool
}

func newConverter(c Config) converter {
	return converter{ports: c.Ports, locality: c.ClusterLocality, dubbo: c.Dubbo}
}

// dubboNamespace is the namespace of the keys of Dubbo's interfaces, as the
// adapter zookeeper has it.
const dubboNamespace = "dubbo"

// service returns the service of an id, without what instances say of it.
func (c converter) service(id serviceID) registry.Service {
	if c.dubbo {
		if n, _, ok := dubbo.ParseName(id.name); ok {
			return n.Service(dubboNamespace, nil)
		}
	}
	return registry.Service{Key: registry.Key{Namespace: canonicalNamespace(id.namespace), Group: id.group, Name: id.name}}
}

// answer is the state of a service that a server has reported.
type answer struct {
	// meta is the metadata of the service, of which most have none.
	meta      map[string]string
	instances []registry.Instance
	problem   string // what cannot be used, "" for nothing
	reference uint64 // time of the server's clock
	protected bool   // whether protectThreshold is reached
}

// answer converts an answer or a push about the service of a name.
func (c converter) answer(name string, info *model.Service) answer {
	a := answer{reference: info.LastRefTime, protected: info.ReachProtectionThreshold}
	if n, _, ok := dubbo.ParseName(name); ok && c.dubbo {
		c.providers(&a, n, info.Hosts)
		return a
	}
	a.instances = c.instances(info.Hosts)
	a.problem = c.ports.Problem(a.instances)
	if p := c.endpointsProblem(a.instances); p != "" {
		a.problem = strings.TrimPrefix(a.problem+"; "+p, "; ")
	}
	return a
}

// endpointsProblem describes the instances of Dubbo's applications whose ports
// cannot be read, "" for none. Their metadata has them still.
func (c converter) endpointsProblem(instances []registry.Instance) string {
	if !c.dubbo {
		return ""
	}
	first, n := "", 0
	for i := range instances {
		if _, err := dubbo.Endpoints(instances[i].Meta); err != nil {
			if n++; n == 1 {
				first = fmt.Sprintf("instance %s: %.200s; it is served with its own port alone: register it again", instances[i].ID, plugin.Excerpt(err.Error()))
			}
		}
	}
	if n > 1 {
		return fmt.Sprintf("%s (and %d more like it)", first, n-1)
	}
	return first
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

// providers converts the providers of an interface of Dubbo. What Nacos says of
// an instance holds for the one that its port is of.
func (c converter) providers(a *answer, n dubbo.Name, hosts []model.Instance) {
	all := make([]dubbo.Provider, 0, len(hosts))
	said := map[string]registry.Instance{}
	for i := range hosts {
		in := c.instance(&hosts[i])
		said[net.JoinHostPort(in.Address, strconv.Itoa(in.Ports[0].Number))] = in
		all = append(all, dubbo.Provider{
			Name: n, Protocol: cmp.Or(hosts[i].Metadata["protocol"], "dubbo"), Address: in.Address, Port: in.Ports[0].Number, Params: hosts[i].Metadata,
		})
	}
	a.instances, a.problem = dubbo.Instances(all)
	a.meta = n.Service(dubboNamespace, all).Meta
	for i := range a.instances {
		in := &a.instances[i]
		of := said[net.JoinHostPort(in.Address, strconv.Itoa(in.Ports[0].Number))]
		switch {
		case in.Weight != nil:
			in.Weight = new(*in.Weight * *of.Weight)
		case *of.Weight != 1:
			in.Weight = of.Weight
		}
		in.Disabled = in.Disabled || of.Disabled
		if of.Health == registry.HealthCritical {
			in.Health = of.Health
		}
		in.Locality = of.Locality
		if of.Cluster != defaultCluster {
			in.Cluster = of.Cluster
		}
	}
	a.instances = plugin.SortInstances(a.instances)
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
	if c.dubbo {
		// One of an application of Dubbo has a port for each protocol.
		if ports, err := dubbo.Endpoints(h.Metadata); err == nil && len(ports) > 0 {
			i.Ports, i.Meta = ports, dubbo.Meta(h.Metadata)
		}
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
