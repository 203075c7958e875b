// Command fetch gets the servers that the tests run and keeps them in the
// user's cache directory. It prints its progress to standard error and ends
// with status 1, after having tried them all, if one could not be had.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/isthmus-mesh/isthmus/internal/testenv"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	failed := false
	for _, tool := range testenv.Tools() {
		path, err := tool.Fetch(ctx, os.Stderr)
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			failed = true
			continue
		}
		fmt.Fprintf(os.Stderr, "%s: %s\n", tool, path)
	}
	if failed {
		os.Exit(1)
	}
}
