// Command fetch gets the servers that the tests run and keeps them in the
// user's cache directory. It prints its progress to standard error and ends
// with status 1, after having tried them all, if one could not be had. With
// names as arguments it gets those, and prints their paths to standard output.
// Those that only `make compat` needs are left out without its environment.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"slices"
	"syscall"

	"github.com/isthmus-mesh/isthmus/internal/testenv"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	failed := false
	names := os.Args[1:]
	tools := testenv.Tools()
	if testenv.Compat() || len(names) > 0 {
		tools = append(tools, testenv.CompatTools()...)
	}
	for _, tool := range tools {
		if len(names) > 0 && !slices.Contains(names, tool.String()) {
			continue
		}
		path, err := tool.Fetch(ctx, os.Stderr)
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			failed = true
			continue
		}
		if len(names) > 0 {
			fmt.Fprintln(os.Stdout, path)
			continue
		}
		fmt.Fprintf(os.Stderr, "%s: %s\n", tool, path)
	}
	if failed {
		os.Exit(1)
	}
}
