package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"

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
reported at once: those of the file and those that the plugins find. A plugin that cannot be asked is a problem too.`,
		Args: usageArgs(cobra.NoArgs),
	}
	file := requireConfig(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		log := config.Log{Level: "warn"}.Logger(cmd.ErrOrStderr())
		ctx, stop := endAtHangup(cmd.Context())
		defer stop()
		cfg, err := loadConfig(ctx, *file, log)
		if err != nil {
			return err
		}
		if err := checkPlugins(ctx, &cfg, log); err != nil {
			return err
		}
		n := "registries"
		if len(cfg.Registries) == 1 {
			n = "registry"
		}
		fmt.Fprintf(cmd.OutOrStdout(), "%s is valid: %d %s\n", *file, len(cfg.Registries), n)
		return nil
	}
	return cmd
}

// loadConfig reads a configuration file. If there is something wrong with it, the plugins are asked too, so that the error says what is
// wrong with their blocks as well. Whatever it is, the exit code is the same.
func loadConfig(ctx context.Context, file string, log *slog.Logger) (config.Config, error) {
	cfg, err := config.Load(file, config.Options{Profiles: xds.Profiles(), MCPProfiles: mcp.Profiles()})
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

// maxChecks is how many plugins are asked at a time.
const maxChecks = 16

// checkPlugins asks each registry's plugin about its blocks. What is wrong with them comes back as config.Problems, and so does a plugin that
// cannot be asked.
func checkPlugins(ctx context.Context, cfg *config.Config, log *slog.Logger) error {
	found, err := askPlugins(ctx, cfg, log)
	if len(found) > 0 {
		err = errors.Join(found.Sort(), err)
	}
	return err
}

// askPlugins returns what the plugins find wrong with the blocks of the registries. An error is one of asking any of them.
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
	_ = group.Wait() // the errors are in failed
	err = errors.Join(errors.Join(failed...), host.Close())
	if ctx.Err() != nil {
		return nil, ctx.Err() // whatever came of it
	}
	return slices.Concat(found...), err
}

// askPlugin asks the plugin of registry i about its blocks.
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
