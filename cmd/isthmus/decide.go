package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/url"
	"time"

	"github.com/spf13/cobra"

	"github.com/isthmus-mesh/isthmus/server/config"
)

func newAccept() *cobra.Command {
	return newDecision("accept", "Remove what is held back of a registry's removals", `Remove now what the bridge keeps although the registry no longer has it: its removal looked like an accident, and is held back
until somebody decides or the time is over. What was refused before is removed, too.`)
}

func newRefuse() *cobra.Command {
	return newDecision("refuse", "Keep what is held back of a registry's removals", `Keep what the registry no longer has and whose removal looked like an accident: until the registry has it again, or until it is
accepted. What is left of the registry is what later removals are compared with.`)
}

func newDecision(verb, short, long string) *cobra.Command {
	var (
		address string
		c       client
	)
	cmd := &cobra.Command{
		Use:   verb + " REGISTRY",
		Short: short,
		Long: long + `

GET /api/v1/kept?registry=REGISTRY of the admin address lists what it is about. Each replica decides for itself: say it to each.`,
		Example: "  isthmus " + verb + " dc1 --address " + config.Default.Listen.Admin.Address,
		Args:    usageArgs(cobra.ExactArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := errors.Join(checkAddress(address, config.Default.Listen.Admin.Address), c.check()); err != nil {
				return usageError(cmd, err)
			}
			return decide(cmd.Context(), cmd.OutOrStdout(), &c, address, args[0], verb)
		},
	}
	cmd.Flags().StringVarP(&address, "address", "a", config.Default.Listen.Admin.Address, "admin `ADDRESS` of the bridge, host:port or unix:PATH")
	c.flags(cmd.Flags())
	cmd.ValidArgsFunction = func(cmd *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
		var registries struct{ Items []struct{ Name string } }
		ctx, cancel := context.WithTimeout(cmd.Context(), completeWithin)
		defer cancel()
		text, err := getter(&c, address)(ctx, "/api/v1/registries")
		if err != nil || len(args) > 0 || json.Unmarshal(text, &registries) != nil {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		names := make([]string, len(registries.Items))
		for i, r := range registries.Items {
			names[i] = r.Name
		}
		return names, cobra.ShellCompDirectiveNoFileComp
	}
	return cmd
}

// completeWithin bounds how long a completion waits for the bridge.
const completeWithin = 2 * time.Second

// decide tells the bridge a decision, and prints what it was about.
func decide(ctx context.Context, w io.Writer, c *client, address, registry, verb string) error {
	var answer struct {
		Decision string
		On       struct{ Services, Endpoints, Resources int }
	}
	if err := c.call(ctx, address, "/api/v1/registries/"+url.PathEscape(registry)+"/"+verb, struct{}{}, &answer); err != nil {
		return fmt.Errorf("registry %s: %w", registry, err)
	}
	_, err := fmt.Fprintf(w, "registry %s: %s: %d services, %d endpoints, %d other resources\n",
		registry, answer.Decision, answer.On.Services, answer.On.Endpoints, answer.On.Resources)
	return err
}
