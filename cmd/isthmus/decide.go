package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"time"

	"github.com/spf13/cobra"

	"github.com/isthmus-mesh/isthmus/server/config"
)

// callTime bounds one call of the admin API: a decision on a million endpoints
// takes seconds.
const callTime = time.Minute

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
	return cmd
}

// decide tells the bridge a decision, and prints what it was about.
func decide(ctx context.Context, w io.Writer, c *client, address, registry, verb string) error {
	ctx, cancel := context.WithTimeout(ctx, callTime)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, c.url(address, "/api/v1/registries/"+url.PathEscape(registry)+"/"+verb), http.NoBody)
	if err != nil {
		return err
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := c.do(req, address)
	if err != nil {
		return fmt.Errorf("%w: is this the address after admin= in the line \"serving\" of the bridge's log?", err)
	}
	defer resp.Body.Close()
	var answer struct {
		Error    string `json:"error"`
		Decision string `json:"decision"`
		On       struct {
			Services  int `json:"services"`
			Endpoints int `json:"endpoints"`
			Resources int `json:"resources"`
		} `json:"on"`
	}
	if err := json.NewDecoder(io.LimitReader(resp.Body, 1<<20)).Decode(&answer); err != nil {
		return fmt.Errorf("%s answered %s and no JSON (%w): is this the admin address of an Isthmus that has 'isthmus %s'?", address, resp.Status, err, verb)
	}
	switch {
	case resp.StatusCode == http.StatusOK:
		_, err = fmt.Fprintf(w, "registry %s: %s: %d services, %d endpoints, %d other resources\n",
			registry, answer.Decision, answer.On.Services, answer.On.Endpoints, answer.On.Resources)
		return err
	case answer.Error == "":
		return fmt.Errorf("%s answered %s", address, resp.Status)
	default:
		return fmt.Errorf("registry %s: %w", registry, errors.New(answer.Error))
	}
}
