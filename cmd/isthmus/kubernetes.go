package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"

	"github.com/spf13/cobra"

	"github.com/isthmus-mesh/isthmus/server/config"
	"github.com/isthmus-mesh/isthmus/server/kubernetes"
)

func newKubernetes() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "kubernetes",
		Short: "Remove what consumers have written to Kubernetes",
		Args:  usageArgs(cobra.NoArgs),
		RunE:  func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(newPrune())
	return cmd
}

func newPrune() *cobra.Command {
	var (
		name, kubeconfig string
		dry              bool
	)
	cmd := &cobra.Command{
		Use:   "prune --config FILE [--consumer NAME]",
		Short: "Remove the objects of a consumer that is no longer in the configuration",
		Long: `Objects that a bridge has written to Kubernetes stay when their consumer is taken out of the configuration. This command lists those of
consumers that the configuration does not have, and with --consumer removes those of one of them. Without --consumer it removes nothing, as
another bridge may write them.

It refuses to remove the objects of a consumer that is in the configuration, or whose Lease a bridge holds; after a bridge was killed that takes
20 seconds to find out. Objects that have the label of the consumer and that no bridge has written are left alone. Nothing is removed that was
not listed first.

The API servers are those of the consumers in the configuration, or that of --kubeconfig. The exit code is 1 if something is left that was to be
removed.`,
		Example: `  isthmus kubernetes prune --config isthmus.yaml --kubeconfig ~/.kube/config
  isthmus kubernetes prune --config isthmus.yaml --consumer ambient --dry-run`,
		Args: usageArgs(cobra.NoArgs),
	}
	file := requireConfig(cmd)
	cmd.Flags().StringVar(&name, "consumer", "", "remove the objects of the consumer with this `NAME`")
	cmd.Flags().StringVar(&kubeconfig, "kubeconfig", "", "the kubeconfig `FILE` of the API server; without it those of the consumers in the configuration, or without any that of the pod")
	cmd.Flags().BoolVar(&dry, "dry-run", false, "only list what would be removed")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		ctx, stop := endAtHangup(cmd.Context())
		defer stop()
		cfg, err := loadConfig(ctx, *file, config.Log{Level: "warn"}.Logger(cmd.ErrOrStderr()))
		if err != nil {
			return err
		}
		var servers []string
		for i := range cfg.Consumers.Kubernetes {
			k := &cfg.Consumers.Kubernetes[i]
			if k.Name == name {
				return fmt.Errorf("consumer %s is in the configuration, and a bridge with it would write the objects again; remove it from there first", name)
			}
			if !slices.Contains(servers, k.Kubeconfig) {
				servers = append(servers, k.Kubeconfig)
			}
		}
		if kubeconfig != "" || len(servers) == 0 {
			servers = []string{kubeconfig}
		}
		for _, server := range servers {
			p, err := kubernetes.NewPruner(server)
			if err != nil {
				return fmt.Errorf("--kubeconfig: %w", err)
			}
			err = prune(ctx, cmd.OutOrStdout(), p, &cfg, name, dry)
			p.Close()
			if err != nil {
				return err
			}
		}
		return nil
	}
	return cmd
}

// prune lists the objects of consumers that a configuration does not have, or
// of one of them, and removes those of the one.
func prune(ctx context.Context, w io.Writer, p *kubernetes.Pruner, cfg *config.Config, name string, dry bool) error {
	all, err := p.List(ctx)
	if err != nil {
		return err
	}
	all = slices.DeleteFunc(all, func(l kubernetes.Leftover) bool {
		return name != "" && l.Consumer != name || slices.ContainsFunc(cfg.Consumers.Kubernetes, func(k config.Kubernetes) bool { return k.Name == l.Consumer })
	})
	if len(all) == 0 {
		_, err := fmt.Fprintln(w, "There are no objects of consumers that are not in the configuration.")
		return err
	}
	for _, l := range all {
		left := ""
		if l.Foreign != "" {
			left = ", left alone: " + l.Foreign
		}
		if _, err := fmt.Fprintf(w, "consumer %s: %s %s/%s%s\n", l.Consumer, l.Kind, l.Namespace, l.Name, left); err != nil {
			return err
		}
	}
	if name == "" || dry {
		_, err := fmt.Fprintln(w, "Nothing was removed. --consumer NAME without --dry-run removes the objects of one consumer; make sure that no other bridge writes them.")
		return err
	}
	removed, failed := 0, 0
	err = p.Under(ctx, name, func(ctx context.Context) error {
		for i := range all {
			if l := &all[i]; l.Foreign != "" {
				continue
			} else if err := l.Remove(ctx); err != nil {
				failed++
				fmt.Fprintf(w, "consumer %s: %s %s/%s is left: %v\n", l.Consumer, l.Kind, l.Namespace, l.Name, err)
				continue
			}
			removed++
		}
		return nil
	})
	if err != nil {
		return err
	}
	fmt.Fprintf(w, "Removed %d objects of consumer %s.\n", removed, name)
	if failed > 0 {
		return &exitError{exitFailed, errors.Join(errShown, fmt.Errorf("%d objects are left", failed))}
	}
	return nil
}
