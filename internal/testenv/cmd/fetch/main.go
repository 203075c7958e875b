// Command fetch gets the servers that the tests run and keeps them in the
// user's cache directory. It says first what it is going to get, prints its
// progress to standard error, and ends with status 1, after having tried them
// all, if one could not be had. With names as arguments it gets those, and
// prints their paths to standard output. ISTHMUS_MAIN=1 leaves only those of
// `make test`, ISTHMUS_COMPAT=1 adds those of `make compat`. With -times it
// gets nothing and lists what is in the cache.
package main

import (
	"cmp"
	"context"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"slices"
	"syscall"
	"time"

	"github.com/isthmus-mesh/isthmus/internal/testenv"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testapp"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testbrowser"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testconsul"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testcoredns"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testdeploy"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testdocker"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testetcd"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testeureka"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testistiod"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testkube"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testnacos"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testnginx"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testpilot"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testproxy"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testpython"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testspire"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testvalidation"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testzookeeper"
)

func main() {
	times := flag.Bool("times", false, "list how long the ten slowest in the cache took, and how much all take")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	names := flag.Args()
	tools := all()
	switch {
	case len(names) > 0 || testenv.Compat():
		tools = append(tools, compat()...)
	case testenv.Main():
		tools = slices.DeleteFunc(tools, func(t testenv.Tool) bool { return !t.Main() })
	}
	if *times {
		list(tools)
		return
	}
	if !get(ctx, tools, names) {
		os.Exit(1)
	}
}

// get gets the tools of these names, or all of them.
func get(ctx context.Context, tools []testenv.Tool, names []string) (ok bool) {
	if len(names) > 0 {
		tools = slices.DeleteFunc(tools, func(t testenv.Tool) bool { return !slices.Contains(names, t.String()) })
	}
	var missing []testenv.Tool
	var about time.Duration
	for _, tool := range tools {
		if _, _, ok := tool.Cached(); !ok {
			missing = append(missing, tool)
			about += tool.About()
		}
	}
	if len(missing) > 0 {
		fmt.Fprintf(os.Stderr, "%d of %d servers and tools are not in the cache: %v\n", len(missing), len(tools), missing)
		fmt.Fprintf(os.Stderr, "getting them takes about %v on two cores, once per version; they are kept in %s (make clean-tools removes them)\n",
			about, testenv.ToolsDir())
	}
	ok = true
	got := 0
	for _, tool := range tools {
		if ctx.Err() != nil {
			return false
		}
		if slices.ContainsFunc(missing, func(m testenv.Tool) bool { return m.String() == tool.String() }) {
			got++
			fmt.Fprintf(os.Stderr, "[%d/%d] ", got, len(missing))
		}
		path, err := tool.Fetch(ctx, os.Stderr)
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			ok = false
			continue
		}
		if len(names) > 0 {
			fmt.Fprintln(os.Stdout, path)
		}
	}
	return ok
}

// list prints what is in the cache.
func list(tools []testenv.Tool) {
	type entry struct {
		name  string
		took  time.Duration
		bytes int64
	}
	var all []entry
	var sum int64
	for _, tool := range tools {
		if took, bytes, ok := tool.Cached(); ok {
			all = append(all, entry{tool.String(), took, bytes})
			sum += bytes
		}
	}
	slices.SortFunc(all, func(a, b entry) int { return cmp.Compare(b.took, a.took) })
	for _, e := range all[:min(10, len(all))] {
		fmt.Fprintf(os.Stdout, "%8v %6d MB  %s\n", e.took, e.bytes>>20, e.name)
	}
	fmt.Fprintf(os.Stdout, "%d servers and tools in %s, %d MB\n", len(all), testenv.ToolsDir(), sum>>20)
}

// all returns the tools of make test and make ci, in the order of fetching.
func all() []testenv.Tool {
	return []testenv.Tool{
		testconsul.Tool, testistiod.NewestTool, testpilot.Tool, testpilot.LegacyTool, testproxy.EnvoyTool, testnacos.Tool, testeureka.Tool,
		testzookeeper.Tool, testetcd.Tool, testpython.Tool,
		testistiod.Tool121, testistiod.Tool124, testnacos.Tool2, testapp.SpringTool, testapp.SpringZooKeeperTool, testapp.Dubbo3Tool, testapp.Dubbo2Tool,
		testetcd.Tool34, testetcd.ClientsTool, testzookeeper.OldTool, testcoredns.Tool, testnginx.Tool, testbrowser.Tool, testbrowser.AxeTool,
		testvalidation.OldestValidation, testvalidation.NewestValidation, testvalidation.PeersTool,
		testdocker.Tool, testdocker.ComposeTool, testdocker.HTTPEchoTool,
		testkube.Tool, testkube.ControllersTool, testkube.KubectlTool, testkube.IstioCRDsTool, testkube.MonitoringCRDsTool,
		testdeploy.PromtoolTool, testdeploy.HelmTool, testdeploy.KustomizeTool, testdeploy.KubeconformTool, testdeploy.SystemdTool,
		testdeploy.NfpmTool, testdeploy.CycloneDXTool,
	}
}

// compat returns the tools that only make compat needs.
func compat() []testenv.Tool {
	return []testenv.Tool{testistiod.Tool126, testspire.ServerTool, testspire.AgentTool}
}
