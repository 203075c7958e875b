package sim

import (
	"errors"
	"fmt"
	"math"
	"net/netip"
	"strings"

	"github.com/isthmus-mesh/isthmus/plugin"
	"github.com/isthmus-mesh/isthmus/plugin/registry"
)

// Config is the config block of a registry of type sim. The zero value is an empty registry in which nothing changes; the
// configuration file is laid over [Defaults].
//
// The state after k changes depends on k and on every field but ChangesPerSecond, and on nothing else.
type Config struct {
	Services         int               `json:"services,omitempty" jsonschema:"minimum=0,maximum=1000000" jsonschema_description:"Number of services at the start. Default: 10."`
	Instances        int               `json:"instances,omitempty" jsonschema:"minimum=0,maximum=100000" jsonschema_description:"Number of instances of each service at the start. Changes keep every service within a fifth of it, but at least one, either way. Default: 3."`
	ChangesPerSecond float64           `json:"changes_per_second,omitempty" jsonschema:"minimum=0,maximum=1000000" jsonschema_description:"Changes in a second, over the whole registry; may be a fraction. 0: nothing changes. Default: 1."`
	Seed             uint64            `json:"seed,omitempty" jsonschema_description:"Seed of everything that is drawn: the same configuration and seed give the same world and the same changes in the same order. Default: 1."`
	Changes          *Changes          `json:"changes,omitempty" jsonschema_description:"How often each kind of change is drawn, relative to the others. A kind that is not named in a block that is given is never drawn. Default: instance_added 20, instance_removed 20, health 30, weight 15, port 5, label 10."`
	Protocols        *Protocols        `json:"protocols,omitempty" jsonschema_description:"How often each protocol is drawn for a service, relative to the others. A protocol that is not named in a block that is given is never drawn. Default: http 6, grpc 3, tcp 1."`
	CIDR             string            `json:"cidr,omitempty" jsonschema_description:"Network that the instances' addresses are taken from, in order; no two instances share one. Default: 10.0.0.0/8."`
	Zones            []string          `json:"zones,omitempty" jsonschema_description:"Localities that instances are spread over, each region, region/zone or region/zone/subzone. Default: sim-1/sim-1a, sim-1/sim-1b, sim-1/sim-1c."`
	Meta             map[string]string `json:"meta,omitempty" jsonschema_description:"Metadata of every instance, besides version, which the change label rewrites. Default: none."`
}

// Changes says how often each kind of change is drawn, relative to the others.
type Changes struct {
	InstanceAdded   float64 `json:"instance_added,omitempty" jsonschema:"minimum=0" jsonschema_description:"A service gains an instance."`
	InstanceRemoved float64 `json:"instance_removed,omitempty" jsonschema:"minimum=0" jsonschema_description:"A service loses an instance."`
	Health          float64 `json:"health,omitempty" jsonschema:"minimum=0" jsonschema_description:"An instance begins to fail or to warn, or passes again."`
	Weight          float64 `json:"weight,omitempty" jsonschema:"minimum=0" jsonschema_description:"An instance gets another weight, 1 to 10."`
	Port            float64 `json:"port,omitempty" jsonschema:"minimum=0" jsonschema_description:"An instance moves to another port, 20000 to 29999."`
	Label           float64 `json:"label,omitempty" jsonschema:"minimum=0" jsonschema_description:"An instance gets another value of the metadata key version, v1 to v5."`
	ServiceAdded    float64 `json:"service_added,omitempty" jsonschema:"minimum=0" jsonschema_description:"A service appears, with all its instances."`
	ServiceRemoved  float64 `json:"service_removed,omitempty" jsonschema:"minimum=0" jsonschema_description:"A service goes, with all its instances."`
}

// Protocols says how often each protocol is drawn for a service, relative to the others.
type Protocols struct {
	HTTP float64 `json:"http,omitempty" jsonschema:"minimum=0" jsonschema_description:"Services that speak http, on port 8080."`
	GRPC float64 `json:"grpc,omitempty" jsonschema:"minimum=0" jsonschema_description:"Services that speak grpc, on port 9090."`
	TCP  float64 `json:"tcp,omitempty" jsonschema:"minimum=0" jsonschema_description:"Services that speak tcp, on port 7000."`
}

// Defaults is what the configuration file is laid over. What it leaves empty has its default in the field's description.
var Defaults = Config{Services: 10, Instances: 3, ChangesPerSecond: 1, Seed: 1}

const defaultCIDR = "10.0.0.0/8"

var (
	defaultChanges   = Changes{InstanceAdded: 20, InstanceRemoved: 20, Health: 30, Weight: 15, Port: 5, Label: 10}
	defaultProtocols = Protocols{HTTP: 6, GRPC: 3, TCP: 1}
	defaultZones     = []string{"sim-1/sim-1a", "sim-1/sim-1b", "sim-1/sim-1c"}
)

// The order of these two lists is part of what a seed means.

func (c *Changes) weights() []float64 {
	if c == nil {
		c = &defaultChanges
	}
	return []float64{c.InstanceAdded, c.InstanceRemoved, c.Health, c.Weight, c.Port, c.Label, c.ServiceAdded, c.ServiceRemoved}
}

func (p *Protocols) weights() []float64 {
	if p == nil {
		p = &defaultProtocols
	}
	return []float64{p.HTTP, p.GRPC, p.TCP}
}

// Validate returns everything that is wrong with c at once, each as a *[plugin.FieldError].
func (c Config) Validate() error {
	var errs []error
	bad := func(field, format string, args ...any) {
		errs = append(errs, &plugin.FieldError{Field: field, Reason: fmt.Sprintf(format, args...)})
	}
	if c.Services < 0 || c.Services > 1_000_000 {
		bad("services", "%d is not between 0 and 1000000", c.Services)
	}
	if c.Instances < 0 || c.Instances > 100_000 {
		bad("instances", "%d is not between 0 and 100000", c.Instances)
	}
	if !(c.ChangesPerSecond >= 0 && c.ChangesPerSecond <= 1_000_000) {
		bad("changes_per_second", "%v is not between 0 and 1000000", c.ChangesPerSecond)
	}
	if !usable(c.Changes.weights()) {
		bad("changes", "no kind of change can be drawn; give at least one of them a finite number above 0 and none a negative one")
	}
	if !usable(c.Protocols.weights()) {
		bad("protocols", "no protocol can be drawn; give at least one of them a finite number above 0 and none a negative one")
	}
	for i, zone := range c.Zones {
		if _, err := parseLocality(zone); err != nil {
			bad(fmt.Sprintf("zones[%d]", i), "%v", err)
		}
	}
	if prefix, err := c.prefix(); err != nil {
		bad("cidr", "%q is not a network such as 10.0.0.0/8", c.CIDR)
	} else if need, have := c.mostAddresses(), addressCount(prefix); len(errs) == 0 && need > have {
		bad("cidr", "%s holds %d addresses, and up to %d are needed; take a wider network, or fewer services or instances", prefix, have, need)
	}
	return errors.Join(errs...)
}

// usable says whether something can be drawn by weights.
func usable(weights []float64) bool {
	sum := 0.0
	for _, w := range weights {
		if !(w >= 0) {
			return false
		}
		sum += w
	}
	return sum > 0 && !math.IsInf(sum, 0)
}

func (c Config) prefix() (netip.Prefix, error) {
	s := c.CIDR
	if s == "" {
		s = defaultCIDR
	}
	p, err := netip.ParsePrefix(s)
	return p.Masked(), err
}

func (c Config) localities() []registry.Locality {
	zones := c.Zones
	if len(zones) == 0 {
		zones = defaultZones
	}
	all := make([]registry.Locality, len(zones))
	for i, zone := range zones {
		all[i], _ = parseLocality(zone) // Validate has seen it
	}
	return all
}

func parseLocality(s string) (registry.Locality, error) {
	parts := strings.Split(s, "/")
	if len(parts) > 3 || parts[0] == "" {
		return registry.Locality{}, fmt.Errorf("%q is not region, region/zone or region/zone/subzone", s)
	}
	parts = append(parts, "", "")
	return registry.Locality{Region: parts[0], Zone: parts[1], SubZone: parts[2]}, nil
}

// instanceBounds returns the fewest and the most instances that changes leave a service with.
func (c Config) instanceBounds() (fewest, most int) {
	d := max(1, c.Instances/5)
	return max(0, c.Instances-d), c.Instances + d
}

// serviceBounds returns the fewest and the most services that changes leave. A registry that begins with services never loses
// the last one.
func (c Config) serviceBounds() (fewest, most int) {
	if w := c.Changes.weights(); c.Services == 0 || w[serviceAdded]+w[serviceRemoved] == 0 {
		return c.Services, c.Services
	}
	d := max(1, c.Services/10)
	return max(1, c.Services-d), c.Services + d
}

// mostAddresses returns how many addresses are in use at most.
func (c Config) mostAddresses() uint64 {
	_, services := c.serviceBounds()
	instances := c.Instances
	if c.ChangesPerSecond > 0 {
		_, instances = c.instanceBounds()
	}
	return uint64(services) * uint64(instances)
}
