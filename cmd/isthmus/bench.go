package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/isthmus-mesh/isthmus/internal/bench"
)

// loadFlags are the load flags of nacos-istio, as it has them, by their names
// here.
var loadFlags = map[string]string{
	"mock-service-count": "mockServiceCount", "mock-avg-endpoint-count": "mockAvgEndpointCount",
	"mock-push-delay": "mockPushDelay", "mock-service-name-prefix": "mockServiceNamePrefix",
	"mock-test-incremental": "mockTestIncremental", "mock-incremental-ratio": "mockIncrementalRatio",
}

func newBench() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "bench SCENARIO",
		Short: "Measure how long a change takes, and what it costs",
		Long: `Measure how long a change takes from a registry to a sink, and what it costs.

A scenario starts 'isthmus serve' with a registry, sim or the one in its name,
and sinks that connect to it. Each change carries the time at which it was made.
Flags change what a scenario does. The figures are the medians of the runs; for
comparison there is a bare ping-pong of gRPC messages of 100 bytes between two
processes at the same pace, at most 1,000 a second.`,
		Args: usageArgs(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	for _, s := range bench.Scenarios {
		cmd.AddCommand(newScenario(s))
	}
	cmd.AddCommand(newCompare(), &cobra.Command{
		Use: "echo", Short: "The other end of the ping-pong", Hidden: true, Args: usageArgs(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return bench.ServeEcho(cmd.Context(), cmd.OutOrStdout())
		},
	})
	return cmd
}

func newCompare() *cobra.Command {
	o := bench.Scenarios[0].Options
	var xds, legacy string
	output := &oneOf{"text", []string{"text", "json"}}
	cmd := &cobra.Command{
		Use: "compare", Short: "Run the scenario change, alternately with other servers", Args: usageArgs(cobra.NoArgs),
		Long: `Run the scenario change, alternately with other servers. 'make bench-compare'
builds them and runs this.`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := o.Validate(); err != nil {
				return usageError(cmd, err)
			}
			peers := bench.Peers(xds, legacy)
			if len(peers) == 0 {
				return usageError(cmd, errors.New("--peers FILE is missing, the program of tools/peers; 'make bench-compare' builds it"))
			}
			program, err := os.Executable()
			if err != nil {
				return err
			}
			all, err := bench.Compare(cmd.Context(), program, peers, o, cmd.ErrOrStderr())
			if err != nil {
				return err
			}
			if output.value == "json" {
				e := json.NewEncoder(cmd.OutOrStdout())
				e.SetIndent("", "  ")
				return e.Encode(all)
			}
			return bench.WriteComparison(cmd.OutOrStdout(), o, all)
		},
	}
	f := cmd.Flags()
	f.StringVar(&xds, "peers", "", "the program of tools/peers: LinearCache, SnapshotCache, bare grpc-go")
	f.StringVar(&legacy, "legacy", "", "the program of tools/pilot-1.8/cmd/legacy: Istio 1.8's own source")
	sizeFlags(f, &o, output)
	return cmd
}

// sizeFlags adds the flags that every scenario has.
func sizeFlags(f *pflag.FlagSet, o *bench.Options, output *oneOf) {
	f.IntVar(&o.Services, "services", o.Services, "how many services")
	f.IntVar(&o.Instances, "instances", o.Instances, "how many instances each service has")
	f.Float64Var(&o.Rate, "rate", o.Rate, "changes per second")
	f.IntVar(&o.Sinks, "sinks", o.Sinks, "how many sinks")
	f.DurationVar(&o.Duration, "duration", o.Duration, "how long changes go on")
	f.IntVar(&o.Runs, "runs", 3, "how many runs; the figures are their medians")
	f.Var(output, "output", "how the result is printed")
}

func newScenario(s bench.Scenario) *cobra.Command {
	o := s.Options
	protocol, output := &oneOf{o.Protocol, bench.Protocols}, &oneOf{"text", []string{"text", "json"}}
	cmd := &cobra.Command{
		Use: s.Name, Short: strings.ToUpper(s.Summary[:1]) + s.Summary[1:], Args: usageArgs(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			o.Protocol = protocol.value
			for name, theirs := range loadFlags {
				if f := cmd.Flags().Lookup(name); f != nil && f.Changed {
					o.Flags = append(o.Flags, "--"+theirs+"="+f.Value.String())
				}
			}
			if err := o.Validate(); err != nil {
				return usageError(cmd, err)
			}
			program, err := os.Executable()
			if err != nil {
				return err
			}
			results, err := bench.Run(cmd.Context(), program, o, cmd.ErrOrStderr())
			if err != nil {
				return err
			}
			median := bench.Median(results)
			if output.value == "json" {
				e := json.NewEncoder(cmd.OutOrStdout())
				e.SetIndent("", "  ")
				err = e.Encode(struct {
					Scenario string         `json:"scenario"`
					Options  bench.Options  `json:"options"`
					Median   bench.Result   `json:"median"`
					Runs     []bench.Result `json:"runs"`
				}{s.Name, o, median, results})
			} else {
				err = bench.Write(cmd.OutOrStdout(), o, median)
			}
			if median.Differences > 0 {
				err = errors.Join(err, fmt.Errorf("sinks hold %d resources otherwise than a new sink", median.Differences))
			}
			return err
		},
	}
	f := cmd.Flags()
	sizeFlags(f, &o, output)
	f.Var(protocol, "protocol", "protocol of the sinks")
	f.IntVar(&o.Names, "names", o.Names, "how many workloads each sink asks for; 0: everything")
	f.IntVar(&o.Shards, "shards", 0, "how many listeners share the services, and the sinks; 0: one listener with everything")
	f.StringVar(&o.Profile, "profile", "", "write profiles of the bridge into this `FOLDER`, for go tool pprof")
	if o.Registry != "" {
		f.StringVar(&o.Address, "address", o.Address, "`URL` of the server; its own services stay, those of the benchmark are removed at the end")
	}
	if o.Registry == "consul" {
		f.StringVar(&o.CAFile, "ca-file", "", "PEM `FILE` of the authority of the server's certificate")
		f.StringVar(&o.TokenFile, "token-file", "", "`FILE` with a token that may register services and nodes, and read the agent's metrics")
	}
	if o.Registry != "" {
		return cmd
	}
	f.Int("mock-service-count", 0, "as in nacos-istio: number of services")
	f.Int("mock-avg-endpoint-count", 20, "as in nacos-istio: instances of each service; every 10,000th has 20,000")
	f.Int64("mock-push-delay", 10, "as in nacos-istio: `milliseconds` from one change to the next")
	f.String("mock-service-name-prefix", "mock.service", "as in nacos-istio: prefix of the names of services")
	f.Bool("mock-test-incremental", false, "as in nacos-istio: change a share of the services each time")
	f.Int("mock-incremental-ratio", 0, "as in nacos-istio: that share, in percent")
	return cmd
}
