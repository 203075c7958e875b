package main

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"

	"github.com/isthmus-mesh/isthmus/internal/watch"
	"github.com/isthmus-mesh/isthmus/verify"
)

func newVerify() *cobra.Command {
	var (
		truth, record string
		output        = &oneOf{"text", []string{"text", "json"}}
		c             client
	)
	cmd := &cobra.Command{
		Use:   "verify FILE|ADDRESS",
		Short: "Judge a recorded or a live stream against the guarantees",
		Long: `Judge what a server sends against the guarantees of docs/guarantees.md.

FILE is a recording of isthmus watch --record. For an ADDRESS the program connects as four sinks, two of each variant of xDS, and judges
until SIGINT or SIGTERM. --truth names a file of the same format with what the registry had; without it the guarantees on removals, stale data
and convergence are judged only as far as the sinks can be compared with each other.

Each violation is a line; the last line is a summary. Exit codes: 0 no violation, 6 a violation, 1 the recording cannot be read, 2 wrong usage.`,
		Example: `  isthmus watch --address 127.0.0.1:15051 --record stream.jsonl
  isthmus verify stream.jsonl --truth registry.jsonl
  isthmus verify 127.0.0.1:15051`,
		Args: usageArgs(cobra.ExactArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := c.check(); err != nil {
				return usageError(cmd, err)
			}
			v := &verifier{judge: verify.New(), out: cmd.OutOrStdout(), json: output.value == "json"}
			v.judge.PutsBack = true // nothing says whether the bridge has protect
			var err error
			if _, missing := os.Stat(args[0]); missing == nil {
				if record != "" {
					return usageError(cmd, errors.New("--record is for an ADDRESS"))
				}
				err = v.files(slices.DeleteFunc([]string{truth, args[0]}, func(f string) bool { return f == "" }))
			} else {
				if truth != "" {
					return usageError(cmd, fmt.Errorf("--truth is for a recording, and there is no file %s", args[0]))
				}
				err = v.live(cmd, &c, args[0], record)
			}
			if err != nil {
				return err
			}
			return v.sum()
		},
	}
	f := cmd.Flags()
	c.flags(f)
	f.StringVar(&truth, "truth", "", "recording `FILE` of what the registry had")
	f.StringVar(&record, "record", "", "with an ADDRESS: write the recording to `FILE`")
	f.VarP(output, "output", "o", "format of the lines")
	return cmd
}

// verifier passes events to the judge and prints what it finds.
type verifier struct {
	out  io.Writer
	json bool

	mu    sync.Mutex // guards the fields below
	judge *verify.Judge
	found int
}

func (v *verifier) add(e *verify.Event) error {
	v.mu.Lock()
	defer v.mu.Unlock()
	for _, x := range v.judge.Add(e) {
		v.found++
		line := x.String()
		if v.json {
			raw, err := json.Marshal(struct {
				Guarantee int       `json:"guarantee"`
				Title     string    `json:"title"`
				Event     int       `json:"event"`
				Time      time.Time `json:"time"`
				Stream    int       `json:"stream"`
				Text      string    `json:"text"`
			}{int(x.Guarantee), x.Guarantee.String(), x.Event, x.Time, x.Stream, x.Text})
			if err != nil {
				return err
			}
			line = string(raw)
		}
		if _, err := fmt.Fprintln(v.out, line); err != nil {
			return err
		}
	}
	return nil
}

func (v *verifier) sum() error {
	format := "%d events, %d responses with %d resources: %d violations\n"
	if v.json {
		format = `{"events":%d,"responses":%d,"resources":%d,"violations":%d}` + "\n"
	}
	if _, err := fmt.Fprintf(v.out, format, v.judge.Events(), v.judge.Responses, v.judge.Resources, v.found); err != nil {
		return err
	}
	if v.found > 0 {
		return &exitError{exitChanges, errors.New("the guarantees are violated")}
	}
	return nil
}

// files judges the events of several files in the order of time. Of two at one
// time, that of the first file is first.
func (v *verifier) files(names []string) error {
	var events []*verify.Event
	for _, name := range names {
		file, err := os.Open(name)
		if err != nil {
			return err
		}
		err = verify.Read(file, func(_ int, e *verify.Event) error {
			events = append(events, e)
			return nil
		})
		if err = errors.Join(err, file.Close()); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
	}
	slices.SortStableFunc(events, func(a, b *verify.Event) int { return a.Time.Compare(b.Time) })
	for _, e := range events {
		if err := v.add(e); err != nil {
			return err
		}
	}
	return nil
}

// live judges what several sinks of a server receive until the command's
// context ends.
func (v *verifier) live(cmd *cobra.Command, c *client, address, record string) (err error) {
	dial, err := c.dial()
	if err != nil {
		return err
	}
	copied := io.Discard
	if record != "" {
		file, err := os.OpenFile(record, os.O_CREATE|os.O_WRONLY|os.O_TRUNC, 0o600)
		if err != nil {
			return fmt.Errorf("--record: %w", err)
		}
		defer func() { err = errors.Join(err, file.Close()) }()
		copied = file
	}
	protocols := []string{"delta", "sotw", "delta", "sotw"}
	group, ctx := errgroup.WithContext(cmd.Context())
	for n, protocol := range protocols {
		o := watch.Options{Address: address, Protocol: protocol, DialOptions: dial, Stderr: cmd.ErrOrStderr()}
		o.Record = recorder(func(e *verify.Event) error {
			e.Stream = (e.Stream-1)*len(protocols) + n + 1
			line, err := e.Append(nil)
			if err != nil {
				return err
			}
			v.mu.Lock()
			_, err = copied.Write(line)
			v.mu.Unlock()
			return cmp.Or(err, v.add(e))
		})
		if err := o.Validate(); err != nil {
			return usageError(cmd, fmt.Errorf("there is no such file, and as an address: %w", err))
		}
		// Ends with ctx; waited for below.
		group.Go(func() error { return watch.Run(ctx, o, io.Discard) })
	}
	if err := group.Wait(); err != nil && !errors.Is(err, context.Canceled) {
		return err
	}
	return nil
}

// recorder passes on the events of a recording.
type recorder func(*verify.Event) error

// Write implements io.Writer for whole lines.
func (r recorder) Write(line []byte) (int, error) {
	return len(line), verify.Read(bytes.NewReader(line), func(_ int, e *verify.Event) error { return r(e) })
}
