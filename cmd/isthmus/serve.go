package main

import (
	"context"
	"errors"
	"log/slog"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/spf13/cobra"

	"github.com/isthmus-mesh/isthmus/server"
	"github.com/isthmus-mesh/isthmus/server/config"
)

func newServe() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "serve --config FILE",
		Short: "Follow the registries of a configuration and serve what they hold",
		Long: `Follow the registries of a configuration and serve what they hold, until SIGINT or SIGTERM. SIGHUP is ignored.

The ports are open first, so that an istiod that starts meanwhile waits instead of giving up. Then every plugin is asked about its
configuration; if one refuses it, the problems are listed as 'isthmus validate' does, and the program ends.

A registry that cannot be reached does not end the program: the log and the admin page say so, and the bridge keeps trying. Until its
first listing is complete, sinks are kept waiting for the types that it may have, those of the other registries included: to serve a
part would remove the rest from the mesh. From then on what is known of it is served, whatever happens to it.`,
		Args: usageArgs(cobra.NoArgs),
	}
	file := requireConfig(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		ctx := cmd.Context()
		cfg, err := loadConfig(ctx, *file, config.Log{Level: "warn"}.Logger(cmd.ErrOrStderr()))
		if err != nil {
			return err
		}
		log := cfg.Log.Logger(cmd.ErrOrStderr())
		defer ignoreHangup(log)()
		s, err := newServer(cfg, log)
		if err != nil {
			return err
		}
		if err := s.Listen(); err != nil {
			return listenError(err, "set another address in listen of "+*file)
		}
		return runServer(ctx, s)
	}
	return cmd
}

// newServer returns a server with metrics of its own.
func newServer(cfg config.Config, log *slog.Logger) (*server.Server, error) {
	metrics := prometheus.NewRegistry()
	metrics.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return server.New(cfg, server.Options{Version: programVersion(), Log: log, Metrics: metrics})
}

// runServer runs s until ctx ends, which is no error.
func runServer(ctx context.Context, s *server.Server) error {
	if err := s.Run(ctx); err != nil && !errors.Is(err, context.Canceled) {
		return err
	}
	return nil
}
