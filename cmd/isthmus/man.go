package main

import (
	"fmt"
	"os"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/cobra/doc"
)

func newMan() *cobra.Command {
	return &cobra.Command{
		Use:     "man DIR",
		Short:   "Write the manual pages of all commands to a directory",
		Long:    `Write the manual pages of all commands to a directory, as isthmus.1, isthmus-serve.1 and so on. They contain no date, so that the same program always writes the same pages.`,
		Example: `  isthmus man /usr/local/share/man/man1`,
		Args:    usageArgs(cobra.ExactArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := os.MkdirAll(args[0], 0o755); err != nil { //nolint:gosec // for all to read
				return err
			}
			root := newRoot()
			root.DisableAutoGenTag = true
			header := &doc.GenManHeader{Title: "ISTHMUS", Section: "1", Source: "isthmus " + programVersion(), Manual: "Isthmus", Date: new(time.Time{})}
			if err := doc.GenManTree(root, header, args[0]); err != nil {
				return fmt.Errorf("write the manual pages: %w", err)
			}
			return nil
		},
	}
}
