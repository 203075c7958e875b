package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"strings"
	"time"
	"unicode"

	"github.com/spf13/cobra"

	"github.com/isthmus-mesh/isthmus/plugin/plugintest/suite"
)

func newPlugin() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "plugin",
		Short: "Tools for authors of adapters",
		Args:  usageArgs(cobra.NoArgs),
		RunE:  func(cmd *cobra.Command, _ []string) error { return cmd.Help() },

		SuggestionsMinimumDistance: 2,
	}
	cmd.AddCommand(newPluginCheck())
	return cmd
}

func newPluginCheck() *cobra.Command {
	var (
		config, translate jsonBlock = "{}", "{}"
		within            time.Duration
	)
	cmd := &cobra.Command{
		Use:   "check PATH [ARG]...",
		Short: "Check that an executable conforms to the contract of adapters",
		Long: `Check that an executable, in any language, conforms to the contract between the bridge and its adapters. It is started several times, as the
bridge starts it, and must be able to follow a registry with the block of --config. That takes about 20 seconds.

Each part of the contract is a line: PASS, WARN with what is probably not intended, FAIL with what is wrong and the cure, or SKIP if it depends
on a part that failed, or on a test that changes the registry (plugintest.Conformance, in Go). It takes at most a minute.
docs/plugin-protocol.md explains the contract.

Exit codes: 0 nothing failed, 1 something did, 2 wrong usage, 3 the adapter rejects the block of --config or --translate.`,
		Example: `  isthmus plugin check ./isthmus-adapter-json --config '{"url": "http://127.0.0.1:8000/services.json"}'
  isthmus plugin check isthmus adapter file --config '{"path": "./mesh"}'
  isthmus plugin check --config '{}' -- python3 -u adapter.py`,
		Args: usageArgs(func(_ *cobra.Command, args []string) error {
			if len(args) == 0 {
				return errors.New("PATH is missing: the executable to check")
			}
			return nil
		}),
		RunE: func(cmd *cobra.Command, args []string) error {
			path, err := exec.LookPath(args[0])
			if err != nil {
				return usageError(cmd, fmt.Errorf("%w; PATH must be a program that this machine can run (chmod a+rx)", err))
			}
			if within <= 0 {
				return usageError(cmd, errors.New("--within must be more than 0"))
			}
			return checkPlugin(cmd.Context(), cmd.OutOrStdout(), suite.Config{
				Command: append([]string{path}, args[1:]...), Within: within,
				Config: json.RawMessage(config), Translate: json.RawMessage(translate),
			})
		},
	}
	cmd.Flags().Var(&config, "config", "the config block to follow a registry with, as a `JSON` object")
	cmd.Flags().Var(&translate, "translate", "the translate block, as a `JSON` object")
	cmd.Flags().DurationVar(&within, "within", 30*time.Second, "how long a first listing may take")
	return cmd
}

// jsonBlock is a flag that takes a JSON object.
type jsonBlock string

// Set implements pflag.Value.
func (b *jsonBlock) Set(s string) error {
	var object map[string]json.RawMessage
	if err := json.Unmarshal([]byte(s), &object); err != nil || object == nil {
		return fmt.Errorf(`must be a JSON object such as {"address": "http://127.0.0.1:8500"}: %w`, errOr(err, "it is null"))
	}
	*b = jsonBlock(s)
	return nil
}

// String implements pflag.Value.
func (b *jsonBlock) String() string { return string(*b) }

// Type implements pflag.Value.
func (*jsonBlock) Type() string { return "JSON" }

func errOr(err error, text string) error {
	if err == nil {
		return errors.New(text)
	}
	return err
}

// checkTime bounds all checks of a plugin, unless its first listing may take
// longer.
const checkTime = time.Minute

// checkPlugin runs the checks and writes a line for each. What builds on a
// check that failed is left out, so that each cause is named once.
func checkPlugin(ctx context.Context, w io.Writer, cfg suite.Config) error {
	atMost := max(checkTime, cfg.Within+checkTime/2)
	limited, cancel := context.WithTimeout(ctx, atMost)
	defer cancel()
	passed, skipped, bad := 0, 0, 0
	failed := suite.Failed{}
	var first string
	skip := func(c suite.Check, why string) {
		skipped++
		fmt.Fprintf(w, "SKIP  %s\n      %s\n", c.Name, why)
	}
	for _, c := range suite.Checks() {
		if lack := c.Lacks(cfg); lack != "" {
			skip(c, "It takes "+lack+", which plugintest.Conformance makes in a Go test.")
			continue
		}
		if before := failed.Before(c); before != "" {
			skip(c, "It builds on: "+before+".")
			continue
		}
		err := limited.Err()
		if err == nil {
			err = c.Run(limited, cfg)
		}
		switch {
		case ctx.Err() != nil:
			return context.Cause(ctx)
		case err != nil && limited.Err() != nil:
			skip(c, fmt.Sprintf("All checks together may take %s, which is over.", atMost))
			continue
		}
		if err == nil {
			passed++
			fmt.Fprintf(w, "PASS  %s\n", c.Name)
			continue
		}
		if warning, ok := errors.AsType[*suite.Warning](err); ok {
			passed++
			fmt.Fprintf(w, "WARN  %s\n%s", c.Name, indent(warning.Text))
			continue
		}
		if refused, ok := errors.AsType[*suite.RefusedError](err); ok {
			return &exitError{exitConfig, fmt.Errorf("%w\nwith a block that it takes, given with --config and --translate, the rest is checked too", refused)}
		}
		bad++
		failed[c.Name], first = true, cmp.Or(first, c.Name)
		fmt.Fprintf(w, "FAIL  %s\n%s      Cure: %s\n", c.Name, indent(err.Error()), c.Cure)
		if errors.Is(err, suite.ErrNoProcess) || errors.Is(err, suite.ErrNoHandshake) {
			break // the others fail alike
		}
	}
	fmt.Fprintf(w, "%d passed, %d failed, %d skipped\n", passed, bad, skipped)
	switch {
	case first != "":
		return &exitError{exitFailed, fmt.Errorf("%s does not keep the contract, first: %s; docs/plugin-protocol.md explains it", cfg.Command[0], first)}
	case limited.Err() != nil:
		return &exitError{exitFailed, fmt.Errorf("%s was not checked as a whole within %s", cfg.Command[0], atMost)}
	}
	return nil
}

// indent returns a text below the name of a check, without what a terminal
// would obey: part of it is the plugin's.
func indent(text string) string {
	text = strings.Map(func(r rune) rune {
		if r == '\n' || unicode.IsPrint(r) {
			return r
		}
		return ' '
	}, text)
	var b strings.Builder
	for line := range strings.Lines(text) {
		b.WriteString("      " + strings.TrimRight(line, "\n") + "\n")
	}
	return b.String()
}
