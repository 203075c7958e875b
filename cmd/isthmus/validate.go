package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"

	"github.com/isthmus-mesh/isthmus/plugin/shard"
	"github.com/isthmus-mesh/isthmus/server"
	"github.com/isthmus-mesh/isthmus/server/config"
	"github.com/isthmus-mesh/isthmus/server/mcp"
	"github.com/isthmus-mesh/isthmus/server/supervisor"
	"github.com/isthmus-mesh/isthmus/server/xds"
)

func newValidate() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "validate --config FILE",
		Short: "Check a configuration, with the help of each registry's adapter",
		Long: `Check a configuration. Each registry's plugin is started and asked about its block; no registry is contacted.

Every problem is one line: FILE:LINE:COLUMN: FIELD: what is wrong and how to mend it. The exit code is then 3. All problems are
reported at once: those of the file and those that the plugins find. A plugin that cannot be asked is a problem too.

With --against ADDRESS a running bridge is asked what a reload of it would change: registries, listeners and fields by name. ADDRESS is
that of its admin port; the text of FILE is sent there. The bridge compares it with the file that it loaded last, and changes nothing.
The exit code is 0 if nothing would change, 6 if something would, 3 if a reload would be refused as it needs a restart, and 1 if the
bridge cannot be asked.`,
		Args: usageArgs(cobra.NoArgs),
	}
	file := requireConfig(cmd)
	var (
		against string
		c       client
	)
	cmd.Flags().StringVar(&against, "against", "", "the admin `ADDRESS` of a running bridge, as host:port or unix:PATH, to ask what would change there")
	c.flags(cmd.Flags())
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if err := c.check(); err != nil {
			return usageError(cmd, err)
		}
		log := config.Log{Level: "warn"}.Logger(cmd.ErrOrStderr())
		ctx, stop := endAtHangup(cmd.Context())
		defer stop()
		cfg, err := loadConfig(ctx, *file, log)
		if err != nil {
			return err
		}
		if err := checkPlugins(ctx, &cfg, log, server.CheckListeners(&cfg)...); err != nil {
			return err
		}
		for _, gap := range cfg.Gaps(shard.Set{}) {
			fmt.Fprintf(cmd.ErrOrStderr(), "isthmus: warning: the views of the listeners leave a gap: %s\n", gap)
		}
		n := "registries"
		if len(cfg.Registries) == 1 {
			n = "registry"
		}
		fmt.Fprintf(cmd.OutOrStdout(), "%s is valid: %d %s\n", *file, len(cfg.Registries), n)
		if against == "" {
			return nil
		}
		return compare(ctx, cmd.OutOrStdout(), &cfg, &c, against)
	}
	return cmd
}

// loadConfig reads a configuration file. If the file has errors, the plugins
// check their blocks too, so that the error has everything. The exit code is
// the same for all errors.
func loadConfig(ctx context.Context, file string, log *slog.Logger) (config.Config, error) {
	cfg, err := config.Load(file, configOptions())
	problems, ok := errors.AsType[config.Problems](err)
	switch {
	case err == nil:
		return cfg, nil
	case !ok:
		return cfg, &exitError{exitConfig, err}
	}
	found, err := askPlugins(ctx, &cfg, log)
	return cfg, errors.Join(append(problems, found...).Sort(), err)
}

// configOptions are the options with which the configuration is always loaded.
func configOptions() config.Options {
	return config.Options{Adapters: builtIn(), Profiles: xds.Profiles(), MCPProfiles: mcp.Profiles()}
}

// maxChecks is the number of plugins that run at a time.
const maxChecks = 16

// checkPlugins lets the plugin of each registry check its blocks. Errors, and
// plugins that cannot be run, are returned as config.Problems, with those known
// before.
func checkPlugins(ctx context.Context, cfg *config.Config, log *slog.Logger, known ...*config.Problem) error {
	found, err := askPlugins(ctx, cfg, log)
	found = append(found, known...)
	if len(found) > 0 {
		err = errors.Join(found.Sort(), err)
	}
	return err
}

// askPlugins returns the errors that the plugins find in the blocks of the
// registries. Its own error joins those of plugins that could not be run.
func askPlugins(ctx context.Context, cfg *config.Config, log *slog.Logger) (config.Problems, error) {
	host, err := supervisor.NewHost("", log)
	if err != nil {
		return nil, err
	}
	found := make([]config.Problems, len(cfg.Registries))
	failed := make([]error, len(cfg.Registries))
	var group errgroup.Group
	group.SetLimit(maxChecks)
	for i := range cfg.Registries {
		if cfg.Askable(i) {
			group.Go(func() error {
				found[i], failed[i] = askPlugin(ctx, host, cfg, i, log)
				return nil
			})
		}
	}
	_ = group.Wait() // errors are in failed
	err = errors.Join(errors.Join(failed...), host.Close())
	if ctx.Err() != nil {
		return nil, ctx.Err() // results are irrelevant then
	}
	return slices.Concat(found...), err
}

// askPlugin lets the plugin of registry i check its blocks.
func askPlugin(ctx context.Context, host *supervisor.Host, cfg *config.Config, i int, log *slog.Logger) (found config.Problems, err error) {
	r := &cfg.Registries[i]
	s, err := server.Spec(cfg, r)
	if err != nil {
		return nil, err
	}
	violations, err := supervisor.Check(ctx, host, s, log.With(slog.String("registry", r.Name)))
	if err != nil {
		return config.Problems{cfg.Problem(i, "", fmt.Sprintf("its plugin cannot be asked: %v", err))}, nil
	}
	for _, v := range violations {
		if p := cfg.Problem(i, v.Field, v.Reason); p != nil {
			found = append(found, p)
		}
	}
	return found, nil
}
