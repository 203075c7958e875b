package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/isthmus-mesh/isthmus/server/config"
)

// errChanges ends the program if a reload would change something.
var errChanges = errors.New("a reload would change this")

// compare asks a running bridge what a configuration would change, and writes
// the answer. The error is that something would change, that the bridge rejects
// the configuration, or that it cannot be asked.
func compare(ctx context.Context, w io.Writer, cfg *config.Config, c *client, address string) error {
	var result struct {
		Result, SHA256 string
		Changed        bool
		Changes        config.Difference
		Problems       []struct{ Field, Reason string }
	}
	if err := c.call(ctx, address, "/api/v1/compare", map[string]string{"config": string(cfg.Text())}, &result); err != nil {
		return fmt.Errorf("--against %s: %w", address, err)
	}
	if len(result.Problems) > 0 {
		var found config.Problems
		for _, p := range result.Problems {
			found = append(found, &config.Problem{File: cfg.File(), Position: cfg.Position(p.Field), Field: p.Field, Reason: "the bridge at " + address + ": " + p.Reason})
		}
		return found.Sort()
	}
	d := &result.Changes
	if !result.Changed {
		fmt.Fprintf(w, "nothing would change at %s, sha256 %s\n", address, result.SHA256)
		return nil
	}
	fmt.Fprintf(w, "what would change at %s, sha256 %s:\n", address, result.SHA256)
	for _, name := range d.Added {
		fmt.Fprintf(w, "  registry added: %s\n", name)
	}
	for _, name := range d.Removed {
		fmt.Fprintf(w, "  registry removed, with all that it has: %s\n", name)
	}
	for _, c := range d.Changed {
		if c.Was != "" {
			fmt.Fprintf(w, "  registry renamed: %s, now %s\n", c.Was, c.Name)
			continue
		}
		fmt.Fprintf(w, "  registry changed: %s: %s\n", c.Name, strings.Join(c.Fields, ", "))
	}
	if d.Reordered {
		fmt.Fprintln(w, "  order of registries, which decides conflicts")
	}
	for _, l := range d.ListenersAdded {
		fmt.Fprintf(w, "  listener added: %s\n", l)
	}
	for _, l := range d.ListenersRemoved {
		fmt.Fprintf(w, "  listener removed: %s\n", l)
	}
	for _, l := range d.ListenersChanged {
		fmt.Fprintf(w, "  listener changed: %s\n", l)
	}
	for _, field := range d.Fields {
		fmt.Fprintf(w, "  field changed: %s\n", field)
	}
	if found := cfg.Restart(d); len(found) > 0 {
		return found
	}
	return &exitError{exitChanges, errChanges}
}
