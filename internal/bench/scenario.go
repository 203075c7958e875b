package bench

import (
	"errors"
	"fmt"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/isthmus-mesh/isthmus/adapters/sim"
)

// Options are the options of a benchmark.
type Options struct {
	// Services and Instances are the number of services and of instances of
	// each of them.
	Services, Instances int
	// Rate is the number of changes in a second.
	Rate float64
	// Flags are load flags of nacos-istio, as the block of a sim registry takes
	// them. They replace Services, Instances and Rate.
	Flags []string
	// Sinks is the number of sinks, each on a connection of its own, or on one
	// with 99 others if there are more than a hundred.
	Sinks int
	// Protocol is that of the sinks: delta, sotw, mcp or mcp-incremental.
	Protocol string
	// Shards is the number of listeners that share the services, each with a
	// shard; 0 means one listener with everything. Each has its part of the
	// sinks. Delta and sotw only.
	Shards int `json:",omitempty"`
	// Names is the number of workloads that each sink asks for, a different
	// part of them each; 0 means everything. Delta only.
	Names int
	// Duration is how long changes go on.
	Duration time.Duration
	// Profile is a folder for profiles of the bridge: its processor time while
	// changes go on, and its memory then. Empty means none.
	Profile string
	// Runs is the number of runs; the medians of them are reported.
	Runs int

	// Registry is the type of the registry, "" for sim, consul or nacos.
	// Address is that of its server, CAFile the authority of its certificate,
	// and TokenFile has a token for it. The benchmark registers its services
	// there, whose names begin with [Prefix], and removes them.
	Registry, Address, CAFile, TokenFile string `json:",omitempty"`

	peer     *Peer         // instead of a bridge
	upstream *upstream     // of Registry
	slack    time.Duration // how long after the first change the first one may arrive
}

// Scenario is a named set of options.
type Scenario struct {
	Name, Summary string
	Options
}

// Scenarios are the scenarios, in the order of the help.
var Scenarios = []Scenario{
	{"change", "one change at a time, 20 a second, among 100,000 instances, to one delta sink", Options{
		Services: 10_000, Instances: 10, Rate: 20, Sinks: 1, Protocol: delta, Duration: 30 * time.Second,
	}},
	{"busy", "5,000 changes a second among 100,000 instances, to ten delta sinks", Options{
		Services: 10_000, Instances: 10, Rate: 5000, Sinks: 10, Protocol: delta, Duration: 20 * time.Second,
	}},
	{"flood", "50,000 changes a second among 100,000 instances, to ten delta sinks", Options{
		Services: 10_000, Instances: 10, Rate: 50_000, Sinks: 10, Protocol: delta, Duration: 20 * time.Second,
	}},
	{"sinks", "one change at a time, 20 a second, to 32 delta sinks", Options{
		Services: 10_000, Instances: 10, Rate: 20, Sinks: 32, Protocol: delta, Duration: 20 * time.Second,
	}},
	{"streams", "5,000 delta streams with 20 names each, 5,000 changes a second", Options{
		Services: 10_000, Instances: 10, Rate: 5000, Sinks: 5000, Names: 20, Protocol: delta, Duration: 20 * time.Second,
	}},
	{"sotw", "one change a second among 100,000 inline endpoints, to a sink that takes everything each time, as istiod does", Options{
		Services: 10_000, Instances: 10, Rate: 1, Sinks: 1, Protocol: sotw, Duration: 30 * time.Second,
	}},
	{"legacy", "one change at a time, 20 a second, to a sink of the legacy Mesh Configuration Protocol, incrementally", Options{
		Services: 10_000, Instances: 10, Rate: 20, Sinks: 1, Protocol: mcpIncremental, Duration: 20 * time.Second,
	}},
	{"consul", "one change at a time, 20 a second, among 5,000 services of 20 instances in a Consul, to one delta sink", Options{
		Services: 5000, Instances: 20, Rate: 20, Sinks: 1, Protocol: delta, Duration: 30 * time.Second, Registry: "consul", Address: "http://127.0.0.1:8500",
	}},
	{"nacos", "one change at a time, 20 a second, among 5,000 services of 20 instances in a Nacos, to one delta sink", Options{
		Services: 5000, Instances: 20, Rate: 20, Sinks: 1, Protocol: delta, Duration: 30 * time.Second, Registry: "nacos", Address: "http://127.0.0.1:8848",
	}},
}

// The protocols of sinks.
const (
	delta          = "delta"
	sotw           = "sotw"
	mcp            = "mcp"
	mcpIncremental = "mcp-incremental"
)

// Protocols are the protocols that sinks can have.
var Protocols = []string{delta, sotw, mcp, mcpIncremental}

// expand sets what the load flags stand for.
func (o Options) expand() (Options, error) {
	if len(o.Flags) == 0 {
		return o, nil
	}
	c, err := sim.Config{Flags: o.Flags}.Expand()
	o.Services, o.Instances, o.Rate = c.Services, c.Instances, c.ChangesPerSecond
	return o, err
}

// protocol is what the sinks speak. Peers have instances only, for a
// LinearCache has one type.
func (o Options) protocol() protocol {
	p := protocolOf(o.Protocol)
	if o.peer != nil && o.Protocol == delta {
		p.types = []string{workloadEntry}
	}
	return p
}

// listeners is the number of listeners with sinks.
func (o Options) listeners() int { return max(o.Shards, 1) }

// total is the number of changes that are made: some before they count, and
// some after.
func (o Options) total() int64 { return int64(o.Rate*(o.Duration+2*lead+o.slack).Seconds()) + 1 }

// Validate returns all errors of the options, by the names of the program's
// flags.
func (o Options) Validate() error {
	var errs []error
	check := func(ok bool, format string, args ...any) {
		if !ok {
			errs = append(errs, fmt.Errorf(format, args...))
		}
	}
	check(slices.Contains(Protocols, o.Protocol), "--protocol %s: must be one of %s", o.Protocol, strings.Join(Protocols, ", "))
	check(o.Rate > 0 && o.Rate <= 1_000_000, "--rate %v: must be above 0 and at most 1000000", o.Rate)
	check(o.Sinks > 0 && o.Sinks <= 20_000, "--sinks %d: must be 1 to 20000", o.Sinks)
	check(o.Services > 0, "--services %d: must be above 0", o.Services)
	check(o.Instances > 0, "--instances %d: must be above 0", o.Instances)
	check(o.Names >= 0, "--names %d: must not be below 0", o.Names)
	check(o.Names == 0 || o.Protocol == delta, "--names: only delta sinks ask for names; add --protocol delta")
	check(o.Shards >= 0 && o.Shards <= o.Sinks, "--shards %d: must be 0 to --sinks, so that each has one", o.Shards)
	check(o.Shards == 0 || o.Protocol == delta || o.Protocol == sotw, "--shards: the listener of the legacy protocol has no views; add --protocol delta")
	check(o.Duration >= time.Second, "--duration %v: must be 1s or more", o.Duration)
	if o.Registry != "" {
		u, err := url.Parse(o.Address)
		check(err == nil && (u.Scheme == "http" || u.Scheme == "https") && u.Host != "", "--address %s: must be http://HOST:PORT or https://HOST:PORT", o.Address)
		check(o.Services*o.Instances <= 1<<24, "--services %d of --instances %d: more than there are addresses", o.Services, o.Instances)
	}
	check(o.Runs > 0, "--runs %d: must be above 0", o.Runs)
	return errors.Join(errs...)
}
