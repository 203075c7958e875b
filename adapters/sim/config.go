package sim

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"math"
	"net/netip"
	"strings"

	"github.com/isthmus-mesh/isthmus/plugin"
	"github.com/isthmus-mesh/isthmus/plugin/registry"
)

// Config is the config block of a registry of type sim. The zero value is an
// empty registry without changes. Missing fields have the values of [Defaults].
//
// The state after k changes is a function of k and of all fields but
// ChangesPerSecond, ChangesTotal and Stamp.
type Config struct {
	Services         int               `json:"services,omitempty" jsonschema:"minimum=0,maximum=1000000" jsonschema_description:"Number of services at the start. Default: 10."`
	Instances        int               `json:"instances,omitempty" jsonschema:"minimum=0,maximum=100000" jsonschema_description:"Number of instances of each service at the start. Changes keep every service within a fifth of it, but at least one, either way. Default: 3."`
	ChangesPerSecond float64           `json:"changes_per_second,omitempty" jsonschema:"minimum=0,maximum=1000000" jsonschema_description:"Changes per second, over the whole registry; may be a fraction. 0: nothing changes. Default: 1."`
	Seed             uint64            `json:"seed,omitempty" jsonschema_description:"Seed of everything that is drawn: the same configuration and seed give the same world and the same changes in the same order. Default: 1."`
	Changes          *Changes          `json:"changes,omitempty" jsonschema_description:"How often each kind of change is drawn, relative to the others. If the block is given, kinds that it does not name are never drawn. Default: instance_added 20, instance_removed 20, health 30, weight 15, port 5, label 10."`
	Protocols        *Protocols        `json:"protocols,omitempty" jsonschema_description:"How often each protocol is drawn for a service, relative to the others. If the block is given, protocols that it does not name are never drawn. Default: http 6, grpc 3, tcp 1."`
	CIDR             string            `json:"cidr,omitempty" jsonschema_description:"Network that the instances' addresses are taken from, in order; no two instances share one. Default: 10.0.0.0/8."`
	Zones            []string          `json:"zones,omitempty" jsonschema_description:"Localities that instances are spread over, each region, region/zone or region/zone/subzone. Default: sim-1/sim-1a, sim-1/sim-1b, sim-1/sim-1c."`
	Meta             map[string]string `json:"meta,omitempty" jsonschema_description:"Metadata of every instance, besides version, which the change label rewrites. Default: none."`
	Flags            []string          `json:"flags,omitempty" jsonschema_description:"Load flags of nacos-istio, as on its command line: --mockServiceCount=1000. They replace services, instances, changes_per_second, changes and protocols. Default: none."`

	ChangesTotal int64 `json:"changes_total,omitempty" jsonschema:"minimum=0" jsonschema_description:"Number of changes after which nothing changes any more. 0: no limit. Default: 0."`
	Stamp        bool  `json:"stamp,omitempty" jsonschema_description:"Give an instance that is added or changed the metadata changed-at, the time of the change in nanoseconds since 1970, so that whoever receives it knows how long that took. With it, two worlds are never the same. Default: false."`

	// By flags only.
	prefix string // of services' names; the number follows behind a dot
	large  bool   // every largeEvery-th service has largeInstances
}

// What flags of nacos-istio make of some services.
const (
	largeEvery     = 10_000
	largeInstances = 20_000
)

// Expand returns the configuration that the flags stand for, or the error of
// the first one that is wrong.
func (c Config) Expand() (Config, error) {
	if len(c.Flags) == 0 {
		return c, nil
	}
	f := flag.NewFlagSet("flags", flag.ContinueOnError)
	f.SetOutput(io.Discard)
	mock := f.Bool("mock", true, "")
	services, endpoints := f.Int("mockServiceCount", 0, ""), f.Int("mockAvgEndpointCount", 20, "")
	delay, prefix := f.Int64("mockPushDelay", 10, ""), f.String("mockServiceNamePrefix", "mock.service", "")
	incremental, ratio := f.Bool("mockTestIncremental", false, ""), f.Int("mockIncrementalRatio", 0, "")
	err := f.Parse(c.Flags)
	switch {
	case err != nil:
	case f.NArg() > 0:
		err = fmt.Errorf("%q is no flag; write --name=value", f.Arg(0))
	case !*mock:
		err = errors.New("--mock=false is nothing to generate; leave it out")
	case *delay < 1:
		err = fmt.Errorf("--mockPushDelay=%d: must be at least 1 (milliseconds)", *delay)
	case *ratio < 0 || *ratio > 100:
		err = fmt.Errorf("--mockIncrementalRatio=%d: must be 0 to 100 (percent)", *ratio)
	case *prefix == "":
		err = errors.New("--mockServiceNamePrefix is empty; name one")
	}
	if err != nil {
		return c, &plugin.FieldError{Field: "flags", Reason: err.Error()}
	}
	c.Services, c.Instances, c.prefix, c.large = *services, *endpoints, *prefix, true
	c.Changes, c.Protocols = &Changes{Weight: 1}, &Protocols{HTTP: 1}
	// A push of everything is what one change is to a sink of the state of the
	// world; an incremental one holds a share of the services.
	changed := 1.0
	if *incremental {
		changed = float64(*services) * float64(*ratio) / 100
	}
	c.ChangesPerSecond = changed * 1000 / float64(*delay)
	return c, nil
}

// instancesOf is the number of instances of the n-th service at the start.
func (c Config) instancesOf(n int) int {
	if c.large && n%largeEvery == 0 {
		return largeInstances
	}
	return c.Instances
}

// Changes holds the relative frequencies of the kinds of change.
type Changes struct {
	InstanceAdded   float64 `json:"instance_added,omitempty" jsonschema:"minimum=0" jsonschema_description:"A service gains an instance."`
	InstanceRemoved float64 `json:"instance_removed,omitempty" jsonschema:"minimum=0" jsonschema_description:"A service loses an instance."`
	Health          float64 `json:"health,omitempty" jsonschema:"minimum=0" jsonschema_description:"An instance begins to fail or to warn, or passes again."`
	Weight          float64 `json:"weight,omitempty" jsonschema:"minimum=0" jsonschema_description:"An instance gets another weight, 1 to 10."`
	Port            float64 `json:"port,omitempty" jsonschema:"minimum=0" jsonschema_description:"An instance moves to another port, 20000 to 29999."`
	Label           float64 `json:"label,omitempty" jsonschema:"minimum=0" jsonschema_description:"An instance gets another value of the metadata key version, v1 to v5."`
	ServiceAdded    float64 `json:"service_added,omitempty" jsonschema:"minimum=0" jsonschema_description:"A service appears, with all its instances."`
	ServiceRemoved  float64 `json:"service_removed,omitempty" jsonschema:"minimum=0" jsonschema_description:"A service disappears, with all its instances."`
}

// Protocols holds the relative frequencies of the protocols of services.
type Protocols struct {
	HTTP float64 `json:"http,omitempty" jsonschema:"minimum=0" jsonschema_description:"Services that speak http, on port 8080."`
	GRPC float64 `json:"grpc,omitempty" jsonschema:"minimum=0" jsonschema_description:"Services that speak grpc, on port 9090."`
	TCP  float64 `json:"tcp,omitempty" jsonschema:"minimum=0" jsonschema_description:"Services that speak tcp, on port 7000."`
}

// Defaults holds the values of missing fields. The defaults of the rest are in
// the fields' descriptions.
var Defaults = Config{Services: 10, Instances: 3, ChangesPerSecond: 1, Seed: 1}

const defaultCIDR = "10.0.0.0/8"

var (
	defaultChanges   = Changes{InstanceAdded: 20, InstanceRemoved: 20, Health: 30, Weight: 15, Port: 5, Label: 10}
	defaultProtocols = Protocols{HTTP: 6, GRPC: 3, TCP: 1}
	defaultZones     = []string{"sim-1/sim-1a", "sim-1/sim-1b", "sim-1/sim-1c"}
)

// The meaning of a seed depends on the order of these two lists.

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

// Validate returns all errors of c, each as a *[plugin.FieldError].
func (c Config) Validate() error {
	c, err := c.Expand()
	if err != nil {
		return err
	}
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
	if c.ChangesTotal < 0 {
		bad("changes_total", "%d is below 0", c.ChangesTotal)
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
	if prefix, err := c.network(); err != nil {
		bad("cidr", "%q is not a network such as 10.0.0.0/8", c.CIDR)
	} else if need, have := c.mostAddresses(), addressCount(prefix); len(errs) == 0 && need > have {
		bad("cidr", "%s holds %d addresses, and up to %d are needed; take a wider network, or fewer services or instances", prefix, have, need)
	}
	return errors.Join(errs...)
}

// usable reports whether weights allow a draw.
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

func (c Config) network() (netip.Prefix, error) {
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
		all[i], _ = parseLocality(zone) // checked by Validate
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

// instanceBounds returns the least and the greatest number of instances that
// changes leave a service with.
func (c Config) instanceBounds() (fewest, most int) {
	d := max(1, c.Instances/5)
	return max(0, c.Instances-d), c.Instances + d
}

// serviceBounds returns the least and the greatest number of services that
// changes leave. A registry that starts with services never loses the last one.
func (c Config) serviceBounds() (fewest, most int) {
	if w := c.Changes.weights(); c.Services == 0 || w[serviceAdded]+w[serviceRemoved] == 0 {
		return c.Services, c.Services
	}
	d := max(1, c.Services/10)
	return max(1, c.Services-d), c.Services + d
}

// mostAddresses returns the greatest number of addresses in use.
func (c Config) mostAddresses() uint64 {
	_, services := c.serviceBounds()
	instances := c.Instances
	if c.ChangesPerSecond > 0 {
		_, instances = c.instanceBounds()
	}
	n := uint64(services) * uint64(instances)
	if c.large {
		n += uint64(services+largeEvery-1) / largeEvery * largeInstances
	}
	return n
}

// access returns what the adapter needs of its machine: nothing.
func (Config) access() plugin.Access { return plugin.Access{} }
