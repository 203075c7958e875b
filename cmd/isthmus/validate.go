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

Every problem is one line: FILE:LINE:COLUMN: FIELD: what is wrong and how to mend it. The exit code is then 3.`,
		Args: usageArgs(cobra.NoArgs),
	}
	file := requireConfig(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		cfg, err := loadConfig(*file)
		if err != nil {
			return err
		}
		if err := checkPlugins(cmd.Context(), &cfg, config.Log{Level: "warn"}.Logger(cmd.ErrOrStderr())); err != nil {
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

// loadConfig reads a configuration file. Whatever is wrong with it, the exit code is the same.
func loadConfig(file string) (config.Config, error) {
	cfg, err := config.Load(file, config.Options{Profiles: xds.Profiles(), MCPProfiles: mcp.Profiles()})
	if err != nil {
		return cfg, &exitError{exitConfig, err}
	}
	return cfg, nil
}

// maxChecks is how many plugins are asked at a time.
const maxChecks = 4

// checkPlugins asks each registry's plugin about its block. What is wrong with the configuration comes back as
// config.Problems; a plugin that cannot be asked is an error of its own.
func checkPlugins(ctx context.Context, cfg *config.Config, log *slog.Logger) error {
	host, err := supervisor.NewHost("", log)
	if err != nil {
		return err
	}
	found := make([]config.Problems, len(cfg.Registries))
	failed := make([]error, len(cfg.Registries))
	var group errgroup.Group
	group.SetLimit(maxChecks)
	for i := range cfg.Registries {
		group.Go(func() error {
			found[i], failed[i] = checkPlugin(ctx, host, cfg, &cfg.Registries[i], log)
			return nil
		})
	}
	_ = group.Wait() // the errors are in failed
	err = errors.Join(errors.Join(failed...), host.Close())
	if problems := slices.Concat(found...); len(problems) > 0 {
		err = errors.Join(err, problems.Sort())
	}
	return err
}

// checkPlugin asks one registry's plugin about its block.
func checkPlugin(ctx context.Context, host *supervisor.Host, cfg *config.Config, r *config.Registry, log *slog.Logger) (found config.Problems, err error) {
	s, err := server.Spec(cfg, r)
	if err != nil {
		return nil, err
	}
	violations, err := supervisor.Check(ctx, host, s, log.With(slog.String("registry", r.Name)))
	if err != nil {
		return nil, cfg.Problem(r.Name, "", fmt.Sprintf("its plugin cannot be asked: %v", err))
	}
	for _, v := range violations {
		found = append(found, cfg.Problem(r.Name, v.Field, v.Reason))
	}
	return found, nil
}
