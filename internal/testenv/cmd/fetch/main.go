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
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
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
	names, tools := flag.Args(), all()
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
	if slices.ContainsFunc(missing, func(t testenv.Tool) bool { return t.Built }) {
		done, err := aside(ctx)
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			return false
		}
		defer done()
	}
	// What Go builds takes all processors, one after the other; meanwhile the
	// rest is downloaded.
	var got, failed atomic.Int64
	var both sync.WaitGroup
	for _, built := range []bool{true, false} {
		both.Go(func() {
			for _, tool := range missing {
				if tool.Built != built || ctx.Err() != nil {
					continue
				}
				if _, err := tool.Fetch(ctx, os.Stderr); err != nil {
					fmt.Fprintln(os.Stderr, err)
					failed.Add(1)
				}
				if built {
					makeRoom()
				}
				fmt.Fprintf(os.Stderr, "[%d/%d]\n", got.Add(1), len(missing))
			}
		})
	}
	both.Wait()
	if failed.Load() > 0 || ctx.Err() != nil {
		return false
	}
	for _, tool := range tools {
		if path, err := tool.Path(); err == nil && len(names) > 0 {
			fmt.Fprintln(os.Stdout, path)
		}
	}
	return true
}

// buildDir is the folder of what Go downloads and compiles for the servers.
func buildDir() string { return filepath.Join(testenv.ToolsDir(), ".build") }

// makeRoom removes the modules of a server that is built, and what was compiled
// if that is much, as those of all servers take gigabytes. What the next one
// needs of them is unpacked, or compiled, again.
func makeRoom() {
	const much = 1 << 30 // bytes
	paths, _ := filepath.Glob(filepath.Join(buildDir(), "modules", "*"))
	if compiled := filepath.Join(buildDir(), "compiled"); testenv.Size(compiled) > much {
		paths = append(paths, compiled)
	}
	for _, path := range paths {
		if filepath.Base(path) != "cache" {
			_ = os.RemoveAll(path)
		}
	}
}

// aside has Go keep what it downloads and compiles for the servers in a folder
// of its own, which done removes: it is several times as big as they are, and
// not needed again. What the user's module cache has is not downloaded.
func aside(ctx context.Context) (done func(), err error) {
	out, err := exec.CommandContext(ctx, "go", "env", "GOMODCACHE", "GOPROXY").Output()
	if err != nil {
		return nil, fmt.Errorf("ask Go for its module cache: %w", err)
	}
	modules, proxy, _ := strings.Cut(strings.TrimSpace(string(out)), "\n")
	dir := buildDir()
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, fmt.Errorf("make a folder for what Go compiles: %w", err)
	}
	unlock, err := testenv.LockFile(ctx, dir+".lock", func() { fmt.Fprintln(os.Stderr, "another process is getting servers, waiting") })
	if err != nil {
		return nil, fmt.Errorf("wait for another process that gets servers: %w", err)
	}
	for name, value := range map[string]string{
		"GOCACHE": filepath.Join(dir, "compiled"), "GOMODCACHE": filepath.Join(dir, "modules"),
		"GOPROXY": "file://" + filepath.Join(modules, "cache", "download") + "," + proxy,
	} {
		if err := os.Setenv(name, value); err != nil {
			unlock()
			return nil, err
		}
	}
	return func() {
		_ = os.RemoveAll(dir) // what is left is used the next time
		unlock()
	}, nil
}

// list prints what is in the cache.
func list(tools []testenv.Tool) {
	took := map[string]time.Duration{}
	tools = slices.DeleteFunc(tools, func(t testenv.Tool) bool {
		var cached bool
		took[t.Name], _, cached = t.Cached()
		return !cached
	})
	slices.SortFunc(tools, func(a, b testenv.Tool) int { return cmp.Compare(took[b.Name], took[a.Name]) })
	var sum int64
	for n, tool := range tools {
		_, bytes, _ := tool.Cached()
		if sum += bytes; n < 10 {
			fmt.Fprintf(os.Stdout, "%8v %6d MB  %s\n", took[tool.Name], bytes>>20, tool)
		}
	}
	fmt.Fprintf(os.Stdout, "%d servers and tools in %s, %d MB\n", len(tools), testenv.ToolsDir(), sum>>20)
}

// all returns the tools of make test and make ci, in the order of fetching.
func all() []testenv.Tool {
	return []testenv.Tool{
		testconsul.Tool, testistiod.Newest.Tool, testpilot.Tool, testpilot.LegacyTool, testproxy.EnvoyTool, testnacos.V3.Tool, testeureka.Tool,
		testzookeeper.Tool, testetcd.Tool, testpython.Tool,
		testistiod.V121.Tool, testistiod.V124.Tool, testnacos.V2.Tool, testapp.SpringTool, testapp.SpringZooKeeperTool, testapp.Dubbo3Tool, testapp.Dubbo2Tool,
		testetcd.Tool34, testetcd.ClientsTool, testzookeeper.OldTool, testcoredns.Tool, testnginx.Tool, testbrowser.Tool, testbrowser.AxeTool,
		testvalidation.OldestValidation, testvalidation.NewestValidation, testvalidation.PeersTool,
		testdocker.Tool, testdocker.ComposeTool, testdocker.HTTPEchoTool,
		testkube.Tool, testkube.ControllersTool, testkube.KubectlTool, testkube.IstioCRDsTool, testkube.GatewayCRDsTool, testkube.MonitoringCRDsTool, testkube.MultiClusterCRDsTool,
		testdeploy.PromtoolTool, testdeploy.HelmTool, testdeploy.KustomizeTool, testdeploy.KubeconformTool, testdeploy.SystemdTool,
		testdeploy.NfpmTool, testdeploy.CycloneDXTool,
	}
}

// compat returns the tools that only make compat needs.
func compat() []testenv.Tool {
	return []testenv.Tool{testistiod.V126.Tool, testspire.ServerTool, testspire.AgentTool}
}
