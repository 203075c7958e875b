package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"

	"github.com/isthmus-mesh/isthmus/internal/watch"
	"github.com/isthmus-mesh/isthmus/server"
	"github.com/isthmus-mesh/isthmus/server/config"
)

// demoConfig is the configuration of the demo, a format for the values of
// flags.
const demoConfig = `listen: {xds: %q, admin: %q}
registries:
- {name: demo, type: sim, config: {services: %d, instances: %d, changes_per_second: %g, seed: %d}}
log: {level: %s}
`

func newDemo() *cobra.Command {
	var (
		xdsAddress, adminAddress string
		services, instances      int
		rate                     float64
		seed                     uint64
		level                    = &oneOf{"warn", []string{"debug", "info", "warn", "error"}}
	)
	cmd := &cobra.Command{
		Use:   "demo",
		Short: "Serve a generated registry and show its changes in the terminal",
		Long:  "Serve a generated registry and show its changes in the terminal, until SIGINT, SIGTERM or SIGHUP. No other program is needed.",
		Args:  usageArgs(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			text := fmt.Sprintf(demoConfig, xdsAddress, adminAddress, services, instances, rate, seed, level.value)
			cfg, err := config.Parse("demo", []byte(text), config.Options{Adapters: builtIn()})
			if err != nil {
				return demoError(cmd, err)
			}
			cfg.Drain = 0 // nobody waits for the end of a demo
			log := cfg.Log.Logger(cmd.ErrOrStderr())
			ctx, stop := endAtHangup(cmd.Context())
			defer stop()
			if _, err := checkPlugins(ctx, &cfg, log); err != nil {
				return demoError(cmd, err)
			}
			s, err := newServer(cfg, server.Options{Log: log})
			if err != nil {
				return err
			}
			if err := s.Listen(); err != nil {
				return listenError(err, "choose another with --xds and --admin, where port 0 takes any free one: --xds 127.0.0.1:0 --admin 127.0.0.1:0")
			}
			out := cmd.OutOrStdout()
			address := s.XDSAddr().String()
			fmt.Fprintf(out, demoText, services, instances, rate, address, s.AdminAddr(), os.Args[0], address, text)

			group, ctx := errgroup.WithContext(ctx)
			lines := make(chan watch.Line)
			group.Go(func() error { return runServer(ctx, s) })
			group.Go(func() error {
				return watch.Run(ctx, watch.Options{Address: address, Protocol: "delta", Output: "json", Body: true, Stderr: cmd.ErrOrStderr()}, &lineWriter{ctx: ctx, to: lines})
			})
			group.Go(func() error { return showFeed(ctx, lines, out) })
			return group.Wait()
		},
	}
	f := cmd.Flags()
	f.StringVar(&xdsAddress, "xds", config.Default.Listen.XDS[0].Address, "`ADDRESS` of the xDS server; port 0 means any free one")
	f.StringVar(&adminAddress, "admin", config.Default.Listen.Admin.Address, "`ADDRESS` of the admin pages; port 0 means any free one")
	f.IntVar(&services, "services", 50, "how many services")
	f.IntVar(&instances, "instances", 5, "how many instances each service has")
	f.Float64Var(&rate, "changes-per-second", 2, "changes per second")
	f.Uint64Var(&seed, "seed", 1, "seed of the generated services: equal seeds give equal services and changes")
	f.Var(level, "log-level", "lowest level that is logged")
	return cmd
}

// demoError converts errors of the configuration to the flags that set it.
func demoError(cmd *cobra.Command, err error) error {
	problems, ok := errors.AsType[config.Problems](err)
	if !ok {
		return err
	}
	var lines []string
	for _, p := range problems {
		name := strings.ReplaceAll(p.Field[strings.LastIndexByte(p.Field, '.')+1:], "_", "-")
		if cmd.Flags().Lookup(name) == nil {
			return err // not caused by a flag
		}
		lines = append(lines, "--"+name+": "+p.Reason)
	}
	return usageError(cmd, errors.New(strings.Join(lines, "\n")))
}

const demoText = `Isthmus demo: a generated registry of %d services with %d instances each, %g changes per second.

  xDS    %s
  admin  http://%s/

To try, in a second terminal:

  %s watch --address %s --protocol delta

What this demo runs, as a configuration file for 'isthmus serve --config FILE':

%s
Below is what a delta sink gets. Ctrl-C ends it.

`

// lineWriter decodes the output of a watch, line by line.
type lineWriter struct {
	ctx  context.Context //nolint:containedctx // Write has no argument for it
	to   chan<- watch.Line
	rest []byte
}

func (w *lineWriter) Write(b []byte) (int, error) {
	w.rest = append(w.rest, b...)
	for {
		i := bytes.IndexByte(w.rest, '\n')
		if i < 0 {
			return len(b), nil
		}
		var l watch.Line
		if err := json.Unmarshal(w.rest[:i], &l); err != nil {
			return 0, fmt.Errorf("decode %q: %w", w.rest[:i], err)
		}
		w.rest = w.rest[i+1:]
		select {
		case w.to <- l:
		case <-w.ctx.Done():
			return 0, w.ctx.Err()
		}
	}
}

const (
	// settle bounds the time that a push may take to be decoded before its
	// first part is shown.
	settle = 100 * time.Millisecond
	// maxLines is the greatest number of resources of a push that are printed
	// one per line.
	maxLines = 5
)

// showFeed prints the changes push by push until ctx ends.
func showFeed(ctx context.Context, lines <-chan watch.Line, out io.Writer) error {
	var push []watch.Line
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	flush := func() {
		writePush(out, push)
		push = push[:0]
	}
	for {
		select {
		case l := <-lines:
			if len(push) > 0 && push[0].Push != l.Push {
				flush()
			}
			push = append(push, l)
			timer.Reset(settle)
		case <-timer.C:
			flush()
		case <-ctx.Done():
			flush()
			return nil
		}
	}
}

// writePush prints one push: its changes if they are few, else their number.
func writePush(out io.Writer, push []watch.Line) {
	if len(push) > maxLines {
		kind := kindOf(push[0])
		fmt.Fprintf(out, "%s  push %-4d  %d resources at once: %s %s and others\n", push[0].Time.Local().Format("15:04:05.000"), push[0].Push, len(push), kind, push[0].Name)
		return
	}
	for _, l := range push {
		fmt.Fprintf(out, "%s  push %-4d  %-6s  %-13s  %s%s\n", l.Time.Local().Format("15:04:05.000"), l.Push, l.Op, kindOf(l), l.Name, detail(l.Resource))
	}
}

func kindOf(l watch.Line) string { return l.Collection[strings.LastIndex(l.Collection, "/")+1:] }

// detail returns the address of a WorkloadEntry, with its weight if it has one.
func detail(resource json.RawMessage) string {
	var r struct {
		Body struct {
			Address string `json:"address"`
			Weight  int    `json:"weight"`
		} `json:"body"`
	}
	if json.Unmarshal(resource, &r) != nil || r.Body.Address == "" {
		return ""
	}
	if r.Body.Weight != 0 {
		return fmt.Sprintf("  %s, weight %d", r.Body.Address, r.Body.Weight)
	}
	return "  " + r.Body.Address
}
