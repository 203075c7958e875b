package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"regexp"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"

	"github.com/isthmus-mesh/isthmus/plugin/shard"
	"github.com/isthmus-mesh/isthmus/server"
	"github.com/isthmus-mesh/isthmus/server/admin"
	"github.com/isthmus-mesh/isthmus/server/config"
	"github.com/isthmus-mesh/isthmus/server/mcp"
	"github.com/isthmus-mesh/isthmus/server/supervisor"
	"github.com/isthmus-mesh/isthmus/server/xds"
)

func newValidate() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "validate --config FILE",
		Short: "Check a configuration, including the blocks of each adapter",
		Long: `Check a configuration. Each registry's plugin is started and checks its block; no registry is contacted. FILE may be - for standard input.

Every problem is one line, FILE:LINE:COLUMN: FIELD: what is wrong and how to correct it, and the line of the file with a mark. The exit code is then 3.
--output json prints an object instead: valid, and the problems, each with file, line, column, field and reason. All problems are
reported at once: those of the file and those that the plugins find. A plugin that does not answer is a problem, too.

--against ADDRESS asks a running bridge what a reload of FILE would change: registries, listeners and fields by name. ADDRESS is that
of its admin port; the text of FILE is sent there. The bridge compares it with the file that it loaded last, and changes nothing. The
exit code is 0 if nothing would change, 6 if something would, 3 if a reload would be refused as it needs a restart, and 1 if the
bridge does not answer.`,
		Args: usageArgs(cobra.NoArgs),
	}
	file := requireConfig(cmd)
	var (
		against string
		c       client
		output  = &oneOf{"text", []string{"text", "json"}}
	)
	cmd.Flags().VarP(output, "output", "o", "format of the problems")
	cmd.Flags().StringVar(&against, "against", "", "the admin `ADDRESS` of a running bridge, as host:port or unix:PATH, to ask what would change there")
	c.flags(cmd.Flags())
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if err := c.check(); err != nil {
			return usageError(cmd, err)
		}
		log := config.Log{Level: "warn"}.Logger(cmd.ErrOrStderr())
		ctx, stop := endAtHangup(cmd.Context())
		defer stop()
		source, err := readConfig(cmd.InOrStdin(), *file)
		if err != nil {
			return &exitError{exitConfig, err}
		}
		cfg, err := parseConfig(ctx, source, log)
		var warnings config.Problems
		if err == nil {
			warnings, err = checkPlugins(ctx, &cfg, log, server.CheckListeners(&cfg)...)
		}
		if problems, ok := errors.AsType[config.Problems](err); ok {
			if output.value == "json" {
				err = writeVerdict(cmd.OutOrStdout(), problems, nil)
			} else {
				err = writeExcerpts(cmd.ErrOrStderr(), problems, source.text)
			}
			return cmp.Or(err, error(&exitError{exitConfig, errShown}))
		}
		switch {
		case err != nil:
			return err
		case output.value == "json":
			if err := writeVerdict(cmd.OutOrStdout(), nil, warnings); err != nil {
				return err
			}
		default:
			n := "registries"
			if len(cfg.Registries) == 1 {
				n = "registry"
			}
			fmt.Fprintf(cmd.OutOrStdout(), "%s is valid: %d %s\n", source.name, len(cfg.Registries), n)
		}
		for _, w := range warnings {
			fmt.Fprintf(cmd.ErrOrStderr(), "isthmus: warning: %s\n", w.Error())
		}
		for _, c := range server.CheckCertificates(&cfg) {
			fmt.Fprintf(cmd.ErrOrStderr(), "isthmus: warning: %s: %s. %s %s\n", c.Subject, c.Problem, c.Affects, c.Cure)
		}
		for _, gap := range cfg.Gaps(shard.Set{}) {
			fmt.Fprintf(cmd.ErrOrStderr(), "isthmus: warning: the views of the listeners leave a gap: %s\n", gap)
		}
		if against == "" {
			return nil
		}
		return compare(ctx, cmd.OutOrStdout(), &cfg, &c, against)
	}
	return cmd
}

// writeVerdict writes what is wrong with a configuration, and what may not be
// meant, as JSON.
func writeVerdict(w io.Writer, problems, warnings config.Problems) error {
	verdict := struct {
		Valid    bool                  `json:"valid"`
		Problems []admin.ConfigProblem `json:"problems"`
		Warnings []admin.ConfigProblem `json:"warnings,omitempty"`
	}{len(problems) == 0, make([]admin.ConfigProblem, 0, len(problems)), nil}
	for _, p := range problems {
		verdict.Problems = append(verdict.Problems, admin.ConfigProblem{File: p.File, Line: p.Line, Column: p.Column, Field: p.Field, Reason: p.Reason})
	}
	for _, p := range warnings {
		verdict.Warnings = append(verdict.Warnings, admin.ConfigProblem{File: p.File, Line: p.Line, Column: p.Column, Field: p.Field, Reason: p.Reason})
	}
	enc := json.NewEncoder(w)
	enc.SetIndent("", "  ")
	enc.SetEscapeHTML(false)
	return enc.Encode(verdict)
}

// maxExcerpt bounds the part of a line that is shown, in characters.
const maxExcerpt = 120

// secretName matches names of fields, and of headers, whose values may be
// secrets themselves, not names of files or of variables.
const secretName = `["']?[\w.-]*(?:passw(?:or)?d|token|secret|key|authorization|credentials?|cookie)["']?`

// secretValue matches such fields: on a line of their own, within a line, and
// all headers within a line.
var secretValue = regexp.MustCompile(`(?i)^[\s-]*` + secretName + `\s*:\s*(?:[^\s$"'{\[].*|"[^$].*|'[^$].*)$` +
	`|` + secretName + `\s*:\s*(?:[^\s$,}"'][^,}]*|"[^$"][^"]*"|'[^$'][^']*')` +
	`|\b(?:headers|metadata)\s*:\s*\{[^}]*\}?`)

// headerField matches fields that are headers.
var headerField = regexp.MustCompile(`^(?:telemetry\.headers|sinks\[\d+\]\.metadata)\b`)

// withoutSecrets returns the line of a problem with stars for what may be a
// secret.
func withoutSecrets(line, field string) string {
	stars := func(text string) string {
		at := strings.IndexByte(text, ':') + 1
		return text[:at] + strings.Repeat("*", utf8.RuneCountInString(text[at:]))
	}
	if headerField.MatchString(field) {
		return stars(line)
	}
	return secretValue.ReplaceAllStringFunc(line, stars)
}

// writeExcerpts writes each problem with the line of the file and a mark below
// its place.
func writeExcerpts(w io.Writer, problems config.Problems, text []byte) error {
	lines := strings.Split(string(text), "\n")
	var b strings.Builder
	for _, p := range problems {
		b.WriteString(p.Error() + "\n")
		if p.Line < 1 || p.Line > len(lines) || p.Column < 1 {
			continue
		}
		shown := withoutSecrets(lines[p.Line-1], p.Field)
		// Tabs and what a terminal does not show take one column here.
		line := []rune(strings.Map(func(r rune) rune {
			if !unicode.IsPrint(r) {
				return ' '
			}
			return r
		}, strings.TrimRight(shown, "\r")))
		from := max(0, min(p.Column-1-maxExcerpt/2, len(line)-maxExcerpt))
		line = line[from:min(len(line), from+maxExcerpt)]
		fmt.Fprintf(&b, "  %s\n  %*s\n", strings.TrimRight(string(line), " "), max(1, p.Column-from), "^")
	}
	fmt.Fprintln(&b, problemCount(len(problems)))
	_, err := io.WriteString(w, b.String())
	return err
}

// input is the text of a configuration.
type input struct {
	name string
	text []byte
}

// readConfig reads a configuration file, or in if its name is "-".
func readConfig(in io.Reader, file string) (input, error) {
	if file == "-" {
		text, err := io.ReadAll(io.LimitReader(in, config.MaxSize+1))
		return input{"standard input", text}, err
	}
	text, err := config.Read(file)
	return input{file, text}, err
}

// loadConfig reads a configuration file; see [parseConfig]. The exit code is
// the same for all errors.
func loadConfig(ctx context.Context, file string, log *slog.Logger) (config.Config, error) {
	text, err := config.Read(file)
	if err != nil {
		return config.Config{}, &exitError{exitConfig, err}
	}
	return parseConfig(ctx, input{file, text}, log)
}

// parseConfig parses a configuration. If it has errors, the plugins check their
// blocks too, so that the error has everything.
func parseConfig(ctx context.Context, in input, log *slog.Logger) (config.Config, error) {
	cfg, err := config.Parse(in.name, in.text, configOptions())
	problems, ok := errors.AsType[config.Problems](err)
	if !ok {
		return cfg, err
	}
	found, _, err := askPlugins(ctx, &cfg, log)
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
func checkPlugins(ctx context.Context, cfg *config.Config, log *slog.Logger, known ...*config.Problem) (warnings config.Problems, err error) {
	found, warnings, err := askPlugins(ctx, cfg, log)
	found = append(found, known...)
	if len(found) > 0 {
		err = errors.Join(found.Sort(), err)
	}
	return warnings, err
}

// askPlugins returns the errors that the plugins find in the blocks of the
// registries, and their warnings. Its own error joins those of plugins that
// could not be run.
func askPlugins(ctx context.Context, cfg *config.Config, log *slog.Logger) (problems, warnings config.Problems, err error) {
	host, err := supervisor.NewHost("", log)
	if err != nil {
		return nil, nil, err
	}
	found, accepted := make([]config.Problems, len(cfg.Registries)), make([]config.Problems, len(cfg.Registries))
	failed := make([]error, len(cfg.Registries))
	var group errgroup.Group
	group.SetLimit(maxChecks)
	for i := range cfg.Registries {
		if cfg.Askable(i) {
			group.Go(func() error {
				found[i], accepted[i], failed[i] = askPlugin(ctx, host, cfg, i, log)
				return nil
			})
		}
	}
	_ = group.Wait() // errors are in failed
	err = errors.Join(errors.Join(failed...), host.Close())
	if ctx.Err() != nil {
		return nil, nil, ctx.Err() // results are irrelevant then
	}
	return slices.Concat(found...), slices.Concat(accepted...), err
}

// askPlugin lets the plugin of registry i check its blocks.
func askPlugin(ctx context.Context, host *supervisor.Host, cfg *config.Config, i int, log *slog.Logger) (found, accepted config.Problems, err error) {
	r := &cfg.Registries[i]
	s, err := server.Spec(cfg, r)
	if err != nil {
		return nil, nil, err
	}
	violations, warnings, err := supervisor.Check(ctx, host, s, log.With(slog.String("registry", r.Name)))
	if err != nil {
		return config.Problems{cfg.Problem(i, "", fmt.Sprintf("its plugin cannot be asked: %v", err))}, nil, nil
	}
	place := func(all []supervisor.Violation) (out config.Problems) {
		for _, v := range all {
			if p := cfg.Problem(i, v.Field, v.Reason); p != nil {
				out = append(out, p)
			}
		}
		return out
	}
	return place(violations), place(warnings), nil
}
