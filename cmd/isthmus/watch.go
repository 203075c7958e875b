package main

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/isthmus-mesh/isthmus/internal/watch"
	"github.com/isthmus-mesh/isthmus/server/mcp"
)

// oneOf is a flag with a fixed set of values.
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

// colorful reports whether w is a terminal that may show colours.
func colorful(w io.Writer) bool {
	o, ok := w.(output)
	if !ok || os.Getenv("NO_COLOR") != "" || os.Getenv("TERM") == "dumb" {
		return false
	}
	file, ok := o.to.(*os.File)
	if !ok {
		return false
	}
	info, err := file.Stat()
	return err == nil && info.Mode()&os.ModeCharDevice != 0
}

// fixedProfiles returns the legacy profiles whose sinks all request the same
// collections.
func fixedProfiles() []string {
	return slices.DeleteFunc(mcp.Profiles(), func(name string) bool {
		collections, _ := mcp.Asks(name)
		return len(collections) == 0
	})
}

func newWatch() *cobra.Command {
	var (
		protocol = &oneOf{"delta", []string{"sotw", "delta", "mcp"}}
		output   = &oneOf{"text", []string{"text", "json"}}
		shape    = &oneOf{"", []string{"inline", "workload"}}
		address  string
		record   string
		body     bool
		only     bool
		host     string
		space    string
		registry string
		types    []string
		sinkID   *string

		profile     = &oneOf{"", fixedProfiles()}
		incremental bool
		listen      string
		c           client
	)
	cmd := &cobra.Command{
		Use:   "watch --address ADDRESS",
		Short: "Connect as a sink and print each change as one line",
		Long: `Connect as a sink and print each change as one line, until SIGINT or SIGTERM. A stream that breaks is opened again.

As text the first response of a type is one line if it has many resources. The line of a change has the hosts and what changed: addresses, ports
and weights. Istio has no field for health: an instance that fails its check is removed. On a terminal upserts are green and removals red,
unless NO_COLOR is set. If a type is not served yet, because a registry has not been listed, standard error says so.

With --output json a line is an object:
  time        when the response arrived, RFC 3339 with nanoseconds
  push        the number of the response, from 1
  collection  such as networking.istio.io/WorkloadEntry
  name        namespace/name
  version     of the content; equal versions mean equal content
  op          upsert or remove; for sotw computed from the previous state
  resource    with --body, the resource as protobuf JSON

A server of the legacy protocol recognizes a sink's version by the collections that it asks for, and sends each version what it supports.
--protocol mcp alone asks for serviceentries and is served as a tool; with --profile it asks for the same as that Pilot, and gets the same.`,
		Example: `  isthmus watch --address 127.0.0.1:15051 --protocol delta
  isthmus watch --address 127.0.0.1:15051 --protocol sotw --output json --body --type networking.istio.io/v1/ServiceEntry
  isthmus watch --address 127.0.0.1:15051 --protocol mcp --profile pilot-1.8 --incremental
  isthmus watch --listen 127.0.0.1:9901 --protocol mcp --type istio/networking/v1alpha3/serviceentries`,
		Args: usageArgs(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if address == "" && listen == "" {
				return usageError(cmd, errors.New("--address ADDRESS is missing, for example --address 127.0.0.1:15051"))
			}
			if profile.value != "" {
				if protocol.value != "mcp" {
					return usageError(cmd, errors.New("--profile is for --protocol mcp"))
				}
				if len(types) > 0 {
					return usageError(cmd, errors.New("--profile says what is asked for: --type cannot be given as well"))
				}
				collections, id := mcp.Asks(profile.value)
				types, sinkID = collections, &id
			}
			if err := c.check(); err != nil {
				return usageError(cmd, err)
			}
			dial, err := c.dial()
			if err != nil {
				return err
			}
			o := watch.Options{
				DialOptions: dial,

				Address:  address,
				Protocol: protocol.value,
				Output:   output.value,
				Shape:    shape.value,
				Body:     body,

				ChangesOnly: only, Host: host, Namespace: space, Registry: registry,
				Color: output.value == "text" && colorful(cmd.OutOrStdout()),

				Types: types,

				Incremental: incremental,
				SinkID:      sinkID,
				Listen:      listen,

				Stderr: cmd.ErrOrStderr(),
			}
			if err := o.Validate(); err != nil {
				return usageError(cmd, err)
			}
			if record != "" {
				file, err := os.OpenFile(record, os.O_CREATE|os.O_WRONLY|os.O_TRUNC, 0o600)
				if err != nil {
					return fmt.Errorf("--record: %w", err)
				}
				defer file.Close()
				o.Record = file
			}
			err = watch.Run(cmd.Context(), o, cmd.OutOrStdout())
			if e, ok := errors.AsType[*net.OpError](err); ok && e.Op == "listen" {
				return listenError(err, "choose another with --listen")
			}
			return err
		},
	}
	f := cmd.Flags()
	f.StringVarP(&address, "address", "a", "", "`ADDRESS` of the xDS server, host:port or unix:PATH")
	c.flags(f)
	f.Var(protocol, "protocol", "state of the world, changes only, or the legacy protocol of Istio 1.1 to 1.8")
	f.Var(profile, "profile", "with --protocol mcp: ask for what the sink `NAME` asks for: "+strings.Join(profile.allowed, ", "))
	f.BoolVar(&incremental, "incremental", false, "with --protocol mcp: permit incremental responses")
	f.StringVar(&listen, "listen", "", "with --protocol mcp: wait at `ADDRESS` for a bridge that connects (reverse mode)")
	f.VarP(output, "output", "o", "format of the lines")
	f.Var(shape, "shape", "ask for services with their endpoints, or with a WorkloadEntry for each (default: inline for sotw, workload for delta)")
	f.BoolVar(&body, "body", false, "print the resources themselves, too")
	f.BoolVar(&only, "changes-only", false, "omit the initial state")
	f.StringVar(&host, "host", "", "print ServiceEntries of hosts that match this `PATTERN`, such as *.example.org, and their WorkloadEntries")
	f.StringVar(&space, "namespace", "", "print resources of namespaces that match this `PATTERN`; it is the name of the registry unless translate.namespace says otherwise")
	f.StringVar(&registry, "registry", "", "print resources of registries that match this `PATTERN`; a ServiceEntry that several registries share belongs to the first")
	f.StringVar(&record, "record", "", "write everything that is sent and received to `FILE`, for isthmus verify")
	f.StringArrayVar(&types, "type", nil, "type `URL` to subscribe to, may be given several times (default: ServiceEntry and WorkloadEntry of networking.istio.io/v1; serviceentries for mcp)")
	return cmd
}
