package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"runtime/debug"
	"strings"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/spf13/cobra"

	"github.com/isthmus-mesh/isthmus/plugin/shard"
	"github.com/isthmus-mesh/isthmus/server"
	"github.com/isthmus-mesh/isthmus/server/config"
)

func newServe() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "serve --config FILE",
		Short: "Follow registries and serve their services",
		Long: `Follow the registries of a configuration and serve their services, until SIGINT or SIGTERM.

The ports open first, so that an istiod that starts at the same time waits instead of exiting. Then every plugin checks its
configuration; if one rejects it, the problems are listed as 'isthmus validate' does, and the program exits.

A registry that cannot be reached does not end the program: the log and the admin page say so, and the bridge keeps trying. Until its
first listing is complete, sinks wait for the types that it may have, also from other registries: serving only a part would remove
the rest from the mesh. With 'required: false' they do not wait for a registry that cannot be reached. Once a registry has been listed,
its last state is served, whatever happens to it. If it loses more than half of its services at once, the removal is paused; see
'isthmus removals'.

The last good state is on disk (state.dir). After a restart it is served at once, for each registry until its own first listing is
complete.

The configuration is loaded again when its file changes, at SIGHUP, and at POST /api/v1/reload. Registries and listeners that stay the
same are not disturbed. If anything is wrong with the new one, the old one stays in force as a whole, and the log says why.

With --shards the process follows and serves only the services whose host is in these shards, so that several processes share a
catalog that is too large for one; see docs/views.md.

At SIGINT or SIGTERM new streams are refused, and open ones end one after the other within the time of 'drain'.`,
		Args: usageArgs(cobra.NoArgs),
	}
	file := requireConfig(cmd)
	shards := cmd.Flags().String("shards", "", "follow and serve only these `SHARDS` of the services, such as 3/16 or 0-3/16")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		ctx := cmd.Context()
		var own shard.Set
		if cmd.Flags().Changed("shards") {
			var err error
			if own, err = shard.Parse(*shards); err != nil {
				return usageError(cmd, fmt.Errorf("--shards %q: %w", *shards, err))
			}
		}
		cfg, err := loadConfig(ctx, *file, config.Log{Level: "warn"}.Logger(cmd.ErrOrStderr()))
		if err != nil {
			return err
		}
		level := new(slog.LevelVar)
		level.Set(cfg.Log.SlogLevel())
		log := cfg.Log.LoggerAt(cmd.ErrOrStderr(), level)
		dir, err := cfg.StateDir()
		if err != nil {
			log.Error("there is no directory for the last good state, so none is kept: set state.dir, or state: {dir: \"\"}", "err", err)
		}
		if dir != "" && !own.All() {
			// Each part of a registry has a last good state of its own: one of
			// other shards would look like services that are gone.
			dir = filepath.Join(dir, "shards-"+strings.ReplaceAll(own.String(), "/", "-of-"))
		}
		s, err := newServer(cfg, server.Options{
			Log: log, Level: level, StateDir: dir, Shards: own,
			Load: func() (config.Config, error) { return config.Load(*file, configOptions()) },
		})
		if err != nil {
			return err
		}
		if err := s.Listen(); err != nil {
			return listenError(err, "set another address in listen of "+*file)
		}
		defer reloadWhenTold(ctx, s, cfg.Hash(), *file, log)()
		return runServer(ctx, s)
	}
	return cmd
}

// newServer returns a server with its own metrics and version, and with limits
// that fit the memory that there is.
func newServer(cfg config.Config, o server.Options) (*server.Server, error) {
	metrics := prometheus.NewRegistry()
	metrics.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	o.Version, o.Metrics = programVersion(), metrics
	memory, from := config.Memory(os.DirFS("/"), os.LookupEnv)
	o.Memory = memory
	if _, set := os.LookupEnv("GOMEMLIMIT"); !set && memory > 0 {
		debug.SetMemoryLimit(int64(config.BridgeShare(memory)))
	}
	o.Log.Info("limits follow from the available memory", "memory", memory, "from", from, "limits", cfg.Fit(memory))
	return server.New(cfg, o)
}

// runServer runs s until ctx ends, and returns nil then.
func runServer(ctx context.Context, s *server.Server) error {
	if err := s.Run(ctx); err != nil && !errors.Is(err, context.Canceled) {
		return err
	}
	return nil
}
