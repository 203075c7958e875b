package main

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/isthmus-mesh/isthmus/server/config"
)

func newLogLevel() *cobra.Command {
	var (
		address string
		c       client
	)
	levels := config.Levels()
	cmd := &cobra.Command{
		Use:   "loglevel LEVEL",
		Short: "Change the log level of a running bridge",
		Long: `Change the log level of a running bridge: ` + strings.Join(levels, ", ") + `. It applies until the bridge exits or loads its configuration again.

A plugin logs at the level that applied when it was started.`,
		Example: `  isthmus loglevel debug --address 127.0.0.1:15080`,
		Args: usageArgs(func(cmd *cobra.Command, args []string) error {
			if err := cobra.ExactArgs(1)(cmd, args); err != nil {
				return err
			}
			if !slices.Contains(levels, args[0]) {
				return fmt.Errorf("%s: must be one of %s", args[0], strings.Join(levels, ", "))
			}
			return nil
		}),
		ValidArgs: levels,
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := errors.Join(checkAddress(address, config.Default.Listen.Admin.Address), c.check()); err != nil {
				return usageError(cmd, err)
			}
			question := struct {
				Level string `json:"level"`
			}{args[0]}
			var answer struct{ Level, Was string }
			if err := c.call(cmd.Context(), address, "/api/v1/loglevel", question, &answer); err != nil {
				return err
			}
			_, err := fmt.Fprintf(cmd.OutOrStdout(), "log level %s, before: %s\n", answer.Level, answer.Was)
			return err
		},
	}
	cmd.Flags().StringVarP(&address, "address", "a", config.Default.Listen.Admin.Address, "admin `ADDRESS` of the bridge, host:port or unix:PATH")
	c.flags(cmd.Flags())
	return cmd
}
