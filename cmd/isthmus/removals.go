package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/url"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/isthmus-mesh/isthmus/server/config"
	"github.com/isthmus-mesh/isthmus/server/state/status"
)

func newRemovals() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "removals",
		Short: "List removals that look like an accident, and allow or keep them",
		Long: `A removal that would take most of a registry at once looks like an accident. The bridge pauses it: what the registry no longer has is still
served, until you decide or protect.hold is over. Each replica has its own list, so run the command once for each.`,
		Example: `  isthmus removals list
  isthmus removals allow dc1
  isthmus removals keep dc1`,
		Args: usageArgs(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(newRemovalsList(), newDecision("allow", "Remove what the registry no longer has", `Remove now what the registry no longer has, because the registry is right. What was kept by an earlier decision is removed as well.`),
		newDecision("keep", "Keep serving what the registry no longer has", `Keep serving what the registry no longer has, because the registry is wrong: until the registry has it again, or until the removal is
allowed. Later removals are compared with what is left of the registry.`))
	return cmd
}

// formerDecisions are the names of the release before.
func formerDecisions() []*cobra.Command {
	var out []*cobra.Command
	for former, verb := range map[string]string{"accept": "allow", "refuse": "keep"} {
		cmd := newDecision(verb, "The former name of isthmus removals "+verb, "")
		cmd.Use, cmd.Deprecated = former+" REGISTRY", "the next release has only 'isthmus removals "+verb+"'"
		out = append(out, cmd)
	}
	return out
}

func newRemovalsList() *cobra.Command {
	var (
		address string
		c       client
		output  = &oneOf{"text", []string{"text", "json"}}
	)
	cmd := &cobra.Command{
		Use:   "list [REGISTRY]",
		Short: "List what is served although its registry no longer has it",
		Args:  usageArgs(cobra.MaximumNArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := errors.Join(checkAddress(address, config.Default.Listen.Admin.Address), c.check()); err != nil {
				return usageError(cmd, err)
			}
			values := url.Values{"limit": {"1000"}}
			if len(args) > 0 {
				values.Set("registry", args[0])
			}
			all := []status.Removal{}
			for {
				var page struct {
					Items []status.Removal
					Next  string
				}
				text, err := getter(&c, address)(cmd.Context(), "/api/v1/removals?"+values.Encode())
				if err == nil {
					err = json.Unmarshal(text, &page)
				}
				if err != nil {
					return err
				}
				all = append(all, page.Items...)
				if page.Next == "" {
					break
				}
				values.Set("after", page.Next)
			}
			if output.value == "json" {
				enc := json.NewEncoder(cmd.OutOrStdout())
				enc.SetIndent("", "  ")
				return enc.Encode(all)
			}
			return writeRemovals(cmd.OutOrStdout(), all)
		},
	}
	cmd.Flags().VarP(output, "output", "o", "format of the list")
	decisionFlags(cmd, &address, &c)
	return cmd
}

func writeRemovals(w io.Writer, all []status.Removal) error {
	if len(all) == 0 {
		_, err := fmt.Fprintln(w, "No removal is paused.")
		return err
	}
	tab := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(tab, "REGISTRY\tNAME\tSERVICE\tSINCE\tUNTIL\tREASON")
	for _, k := range all {
		until := "kept"
		if !k.Until.IsZero() {
			until = k.Until.UTC().Format(time.RFC3339)
		}
		fmt.Fprintf(tab, "%s\t%s\t%s\t%s\t%s\t%s\n", k.Registry, k.Name, k.Service, k.Since.UTC().Format(time.RFC3339), until, k.Reason)
	}
	return tab.Flush()
}

func newDecision(verb, short, long string) *cobra.Command {
	var (
		address string
		c       client
	)
	cmd := &cobra.Command{
		Use:     verb + " REGISTRY",
		Short:   short,
		Long:    long,
		Example: "  isthmus removals " + verb + " dc1 --address " + config.Default.Listen.Admin.Address,
		Args:    usageArgs(cobra.ExactArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := errors.Join(checkAddress(address, config.Default.Listen.Admin.Address), c.check()); err != nil {
				return usageError(cmd, err)
			}
			return decide(cmd.Context(), cmd.OutOrStdout(), &c, address, args[0], verb)
		},
	}
	decisionFlags(cmd, &address, &c)
	return cmd
}

// decisionFlags adds the flags of a command about removals, and the completion
// of its registry.
func decisionFlags(cmd *cobra.Command, address *string, c *client) {
	cmd.Flags().StringVarP(address, "address", "a", config.Default.Listen.Admin.Address, "admin `ADDRESS` of the bridge, host:port or unix:PATH")
	c.flags(cmd.Flags())
	cmd.ValidArgsFunction = func(cmd *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
		var registries struct{ Items []struct{ Name string } }
		ctx, cancel := context.WithTimeout(cmd.Context(), completeWithin)
		defer cancel()
		text, err := getter(c, *address)(ctx, "/api/v1/registries")
		if err != nil || len(args) > 0 || json.Unmarshal(text, &registries) != nil {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		names := make([]string, len(registries.Items))
		for i, r := range registries.Items {
			names[i] = r.Name
		}
		return names, cobra.ShellCompDirectiveNoFileComp
	}
}

// completeWithin bounds how long a completion waits for the bridge.
const completeWithin = 2 * time.Second

// decide tells the bridge a decision, and prints what it was about.
func decide(ctx context.Context, w io.Writer, c *client, address, registry, verb string) error {
	var answer struct {
		Decision string
		On       struct{ Services, Endpoints, Resources int }
	}
	if err := c.call(ctx, address, "/api/v1/registries/"+url.PathEscape(registry)+"/removals/"+verb, struct{}{}, &answer); err != nil {
		return fmt.Errorf("registry %s: %w", registry, err)
	}
	_, err := fmt.Fprintf(w, "registry %s: removal %s: %d services, %d endpoints, %d other resources\n",
		registry, answer.Decision, answer.On.Services, answer.On.Endpoints, answer.On.Resources)
	return err
}
