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
		Long: `Follow the registries of a configuration and serve what they hold, until SIGINT or SIGTERM.

A registry that cannot be reached does not keep the others from being served: the log and the admin page say so, and the
bridge keeps trying.`,
		Args: usageArgs(cobra.NoArgs),
	}
	file := requireConfig(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		ctx := cmd.Context()
		cfg, err := loadConfig(*file)
		if err != nil {
			return err
		}
		log := cfg.Log.Logger(cmd.ErrOrStderr())
		if err := checkPlugins(ctx, &cfg, log); err != nil {
			if _, wrong := errors.AsType[config.Problems](err); wrong || ctx.Err() != nil {
				return err
			}
			// The plugin may be mended while the others serve; its supervisor keeps trying.
			log.WarnContext(ctx, "the configuration of a registry cannot be checked", slog.Any("err", err))
		}
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
