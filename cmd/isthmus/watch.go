package main

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/isthmus-mesh/isthmus/internal/watch"
)

// oneOf is a flag that takes one of some words.
type oneOf struct {
	value   string
	allowed []string
}

func (o *oneOf) String() string { return o.value }
func (o *oneOf) Type() string   { return strings.Join(o.allowed, "|") }

func (o *oneOf) Set(s string) error {
	if !slices.Contains(o.allowed, s) {
		return fmt.Errorf("must be one of %s", strings.Join(o.allowed, ", "))
	}
	o.value = s
	return nil
}

func newWatch() *cobra.Command {
	var (
		protocol = &oneOf{"delta", []string{"sotw", "delta", "mcp"}}
		output   = &oneOf{"text", []string{"text", "json"}}
		shape    = &oneOf{"", []string{"inline", "workload"}}
		address  string
		body     bool
		types    []string

		incremental bool
		listen      string
	)
	cmd := &cobra.Command{
		Use:   "watch --address ADDRESS",
		Short: "Connect as a sink and print each change as one line",
		Long: `Connect as a sink and print each change as one line, until SIGINT or SIGTERM. A stream that breaks is opened again.

With --output json a line is an object:
  time        when the response came in, RFC 3339 with nanoseconds
  push        the number of the response, from 1
  collection  such as networking.istio.io/WorkloadEntry
  name        namespace/name
  version     of the content; equal versions mean equal content
  op          upsert or remove; for sotw worked out from the state before
  resource    with --body, the resource as protobuf JSON`,
		Example: `  isthmus watch --address 127.0.0.1:15051 --protocol delta
  isthmus watch --address 127.0.0.1:15051 --protocol sotw --output json --body --type networking.istio.io/v1/ServiceEntry
  isthmus watch --address 127.0.0.1:15051 --protocol mcp --incremental
  isthmus watch --listen 127.0.0.1:9901 --protocol mcp --type istio/networking/v1alpha3/serviceentries`,
		Args: usageArgs(cobra.NoArgs),
		PreRunE: func(cmd *cobra.Command, _ []string) error {
			if address == "" && listen == "" {
				return usageError(cmd, errors.New("--address ADDRESS is missing, for example --address 127.0.0.1:15051"))
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, _ []string) error {
			return watch.Run(cmd.Context(), watch.Options{
				Address:  address,
				Protocol: protocol.value,
				Output:   output.value,
				Shape:    shape.value,
				Body:     body,
				Types:    types,

				Incremental: incremental,
				Listen:      listen,

				Stderr: cmd.ErrOrStderr(),
			}, cmd.OutOrStdout())
		},
	}
	f := cmd.Flags()
	f.StringVarP(&address, "address", "a", "", "`ADDRESS` of the xDS server, host:port")
	f.Var(protocol, "protocol", "state of the world, changes only, or the legacy protocol of Istio 1.1 to 1.8")
	f.BoolVar(&incremental, "incremental", false, "with --protocol mcp: permit incremental responses")
	f.StringVar(&listen, "listen", "", "with --protocol mcp: wait at `ADDRESS` to be dialled (reverse mode)")
	f.VarP(output, "output", "o", "format of the lines")
	f.Var(shape, "shape", "how services are wanted: with their endpoints, or with a WorkloadEntry for each (default: inline for sotw, workload for delta)")
	f.BoolVar(&body, "body", false, "print the resources themselves too")
	f.StringArrayVar(&types, "type", nil, "type `URL` to subscribe to, may be given several times (default: ServiceEntry and WorkloadEntry of networking.istio.io/v1; serviceentries for mcp)")
	return cmd
}
