package main

import (
	"fmt"
	"maps"
	"os/signal"
	"slices"
	"strings"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/isthmus-mesh/isthmus/adapters/consul"
	"github.com/isthmus-mesh/isthmus/adapters/dns"
	"github.com/isthmus-mesh/isthmus/adapters/etcd"
	"github.com/isthmus-mesh/isthmus/adapters/eureka"
	"github.com/isthmus-mesh/isthmus/adapters/exec"
	"github.com/isthmus-mesh/isthmus/adapters/file"
	"github.com/isthmus-mesh/isthmus/adapters/kubernetes"
	"github.com/isthmus-mesh/isthmus/adapters/nacos"
	"github.com/isthmus-mesh/isthmus/adapters/sim"
	"github.com/isthmus-mesh/isthmus/adapters/static"
	"github.com/isthmus-mesh/isthmus/adapters/zookeeper"
)

// adapters are the built-in ones, by name: the only list of them. Each runs as
// a plugin, with the version of the program, and does not return.
var adapters = map[string]func(version string){
	"consul":     consul.Main,
	"dns":        dns.Main,
	"etcd":       etcd.Main,
	"eureka":     eureka.Main,
	"exec":       exec.Main,
	"file":       file.Main,
	"kubernetes": kubernetes.Main,
	"nacos":      nacos.Main,
	"sim":        sim.Main,
	"static":     static.Main,
	"zookeeper":  zookeeper.Main,
}

// builtIn returns the names of the built-in adapters.
func builtIn() []string { return slices.Sorted(maps.Keys(adapters)) }

func newAdapter() *cobra.Command {
	names := builtIn()
	return &cobra.Command{
		Use:   "adapter NAME",
		Short: "Run a built-in adapter as a plugin; the bridge does this for each registry",
		Long: "Run a built-in adapter as a plugin; the bridge does this for each registry.\n\nThe built-in adapters are " +
			strings.Join(names, ", ") + ".",
		Args: usageArgs(func(_ *cobra.Command, args []string) error {
			if len(args) != 1 {
				return fmt.Errorf("adapter takes one name; there are %s", strings.Join(names, ", "))
			}
			if adapters[args[0]] == nil {
				return fmt.Errorf("there is no adapter %q; there are %s", args[0], strings.Join(names, ", "))
			}
			return nil
		}),
		ValidArgs: names,
		Run: func(_ *cobra.Command, args []string) {
			signal.Reset(syscall.SIGPIPE) // the SDK handles the exit of the bridge itself
			adapters[args[0]](programVersion())
		},
	}
}
