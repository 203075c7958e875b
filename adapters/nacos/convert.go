package nacos

import (
	"cmp"
	"fmt"
	"math"
	"net"
	"slices"
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
	var problem string
	a.instances, problem = c.instances(info.Hosts)
	problems := []string{c.ports.Problem(a.instances), problem}
	a.problem = strings.Join(slices.DeleteFunc(problems, func(p string) bool { return p == "" }), "; ")
	return a
}

// instances converts the hosts of an answer, sorted by ID. Of hosts with the
// same identity in Nacos the last one counts. The problem describes those whose
// metadata cannot be used, "" for none.
func (c converter) instances(hosts []model.Instance) (out []registry.Instance, problem string) {
	out = make([]registry.Instance, 0, len(hosts))
	bad := 0
	for i := range hosts {
		in, err := c.instance(&hosts[i])
		out = append(out, in)
		if err == nil {
			continue
		}
		if bad++; bad == 1 {
			problem = fmt.Sprintf("instance %s: %.200s; it is served with its own port alone: register it again", in.ID, plugin.Excerpt(err.Error()))
		}
	}
	if bad > 1 {
		problem += fmt.Sprintf(" (and %d more like it)", bad-1)
	}
	return plugin.SortInstances(out), problem
}

// providers converts the providers of an interface of Dubbo. What Nacos says of
// an instance holds for the one that its port is of.
func (c converter) providers(a *answer, n dubbo.Name, hosts []model.Instance) {
	all := make([]dubbo.Provider, 0, len(hosts))
	said := map[string]registry.Instance{}
	for i := range hosts {
		in, _ := c.instance(&hosts[i]) // a provider has no ports in its metadata
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
// missing in some versions. One of an application of Dubbo whose ports cannot
// be read has its own, and an error.
func (c converter) instance(h *model.Instance) (registry.Instance, error) {
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
	var problem error
	if c.dubbo {
		// One of an application of Dubbo has a port for each protocol.
		var ports []registry.Port
		if ports, problem = dubbo.Endpoints(h.Metadata); problem == nil && len(ports) > 0 {
			i.Ports, i.Meta = ports, dubbo.Meta(h.Metadata)
		}
	}
	i.Ports = c.ports.Append(i.Ports, h.Metadata)
	if cluster == defaultCluster {
		return i, problem // not a locality
	}
	switch c.locality {
	case "region":
		i.Locality.Region = cluster
	case "zone":
		i.Locality.Zone = cluster
	case "sub_zone":
		i.Locality.SubZone = cluster
	}
	return i, problem
}
