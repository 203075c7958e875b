package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"

	"github.com/isthmus-mesh/isthmus/internal/migrate"
)

func newDiff() *cobra.Command {
	var (
		older, newer            string
		follow                  bool
		timeout, quiet, summary time.Duration
		oldClient, newClient    client
		output                  = &oneOf{"text", []string{"text", "json"}}
	)
	cmd := &cobra.Command{
		Use:   "diff --old ADDRESS|FILE --new ADDRESS|FILE",
		Short: "Compare what two bridges serve, by meaning",
		Long: `Compare two sources by what clients of the mesh see: hosts, ports, endpoints, weights, labels and localities.
A source is a file (from kubectl get serviceentries -A -o yaml, or isthmus dump), the address of an xDS server as host:port, or mcp://host:port
for the legacy Mesh Configuration Protocol. Names of resources, order and the scale of weights are ignored.

Each difference is a line: what differs, the rule behind it if that is known, and the field of the configuration that changes it.
The last line is a summary.

With --watch both are followed until SIGINT or SIGTERM, for a shadow run next to the old bridge. A difference is printed with + once it has
lasted for --settle, and with - when it is over; a shorter one is only the time that a change takes.

Exit codes: 0 equal, 6 different (with --watch: at the end), 5 a source did not answer, 2 wrong usage.`,
		Example: `  isthmus diff --old nacos.example.org:18848 --new 127.0.0.1:15051
  isthmus diff --old old.yaml --new mcp://127.0.0.1:15051 --output json
  isthmus diff --old nacos.example.org:18848 --new 127.0.0.1:15051 --watch --summary 1h
  isthmus diff --old 127.0.0.1:15051 --new bridge.example.org:15052 --new-ca-file ca.crt --new-token-file token`,
		Args: usageArgs(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			switch {
			case older == "":
				return usageError(cmd, errors.New("--old ADDRESS|FILE is missing"))
			case newer == "":
				return usageError(cmd, errors.New("--new ADDRESS|FILE is missing"))
			case timeout <= 0, quiet <= 0, summary <= 0:
				return usageError(cmd, errors.New("--timeout, --settle and --summary must be more than 0"))
			}
			if err := errors.Join(oldClient.check(), newClient.check()); err != nil {
				return usageError(cmd, err)
			}
			oldDial, err := oldClient.dial()
			if err != nil {
				return err
			}
			newDial, err := newClient.dial()
			if err != nil {
				return err
			}
			a, err := migrate.Open(older, oldDial...)
			if err != nil {
				return usageError(cmd, fmt.Errorf("--old %w", err))
			}
			b, err := migrate.Open(newer, newDial...)
			if err != nil {
				return usageError(cmd, fmt.Errorf("--new %w", err))
			}
			ctx, cancel := context.WithCancel(cmd.Context())
			defer cancel()
			group, ctx := errgroup.WithContext(ctx)
			// Both end with ctx; the group is waited for below.
			group.Go(func() error { return a.Run(ctx, cmd.ErrOrStderr()) })
			group.Go(func() error { return b.Run(ctx, cmd.ErrOrStderr()) })
			group.Go(func() error {
				defer cancel()
				limited, stop := context.WithTimeout(ctx, timeout)
				defer stop()
				for _, s := range []*migrate.Source{a, b} {
					if err := s.Wait(limited, quiet); err != nil {
						if ctx.Err() != nil {
							return nil //nolint:nilerr // a signal, or the error of a source
						}
						return &exitError{exitTimeout, fmt.Errorf("%w; waited for %s (--timeout)", err, timeout)}
					}
				}
				say := func(w io.Writer, text string) error {
					_, err := io.WriteString(w, text+"\n")
					return err
				}
				var report *migrate.Report
				if follow {
					report, err = migrate.Follow(ctx, a, b, quiet, summary, func(line string) error { return say(cmd.OutOrStdout(), line) })
				} else {
					report = migrate.Compare(a, b)
					err = writeReport(cmd.OutOrStdout(), report, output.value)
				}
				switch {
				case err != nil:
					return fmt.Errorf("write: %w", err)
				case len(report.Differences) > 0:
					return &exitError{exitChanges, fmt.Errorf("the sources differ: %s", report)}
				}
				return nil
			})
			return group.Wait()
		},
	}
	f := cmd.Flags()
	f.StringVar(&older, "old", "", "the old `SOURCE`: a file or an address")
	f.StringVar(&newer, "new", "", "the new `SOURCE`: a file or an address")
	oldClient.flagsOf("old", f)
	newClient.flagsOf("new", f)
	f.BoolVar(&follow, "watch", false, "follow both and print differences that last")
	f.DurationVar(&timeout, "timeout", 30*time.Second, "how long to wait for the first answers")
	f.DurationVar(&quiet, "settle", 2*time.Second, "how long a server has to be silent for its first answer to be complete, and a difference to last with --watch")
	f.DurationVar(&summary, "summary", time.Hour, "how often a summary is printed with --watch")
	f.VarP(output, "output", "o", "lines, or one JSON object; without --watch")
	return cmd
}

// writeReport writes the outcome of a comparison.
func writeReport(w io.Writer, r *migrate.Report, format string) error {
	if format == "json" {
		enc := json.NewEncoder(w)
		enc.SetIndent("", "  ")
		return enc.Encode(struct {
			*migrate.Report
			Equal float64 `json:"equal_percent"`
		}{r, r.Equal()})
	}
	for _, d := range r.Differences {
		if _, err := fmt.Fprintln(w, d); err != nil {
			return err
		}
	}
	_, err := fmt.Fprintln(w, r)
	return err
}
