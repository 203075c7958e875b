package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"github.com/isthmus-mesh/isthmus/server/config"
)

func newHealthcheck() *cobra.Command {
	var (
		address string
		ready   bool
		timeout time.Duration
		c       client
	)
	cmd := &cobra.Command{
		Use:   "healthcheck",
		Short: "Ask a bridge whether it is alive, for containers without curl",
		Long: `Ask a bridge whether it is alive, or with --ready whether every registry has been listed. The exit code is 0 if it is, and 1 with the reasons
if it is not or does not answer.`,
		Example: `  isthmus healthcheck --address 127.0.0.1:15080 --ready`,
		Args:    usageArgs(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			err := errors.Join(checkAddress(address, config.Default.Listen.Admin.Address), c.check())
			if timeout <= 0 {
				err = errors.Join(err, fmt.Errorf("--timeout %s: must be more than 0", timeout))
			}
			if err != nil {
				return usageError(cmd, err)
			}
			ctx, cancel := context.WithTimeout(cmd.Context(), timeout)
			defer cancel()
			path := "/healthz"
			if ready {
				path = "/readyz"
			}
			text, err := getter(&c, address)(ctx, path)
			if err != nil {
				return err
			}
			_, err = cmd.OutOrStdout().Write(text)
			return err
		},
	}
	f := cmd.Flags()
	f.StringVarP(&address, "address", "a", config.Default.Listen.Admin.Address, "admin `ADDRESS` of the bridge, host:port or unix:PATH")
	f.BoolVar(&ready, "ready", false, "ask whether it is ready, not only alive")
	f.DurationVar(&timeout, "timeout", 5*time.Second, "how long to wait for an answer")
	c.flags(f)
	return cmd
}
