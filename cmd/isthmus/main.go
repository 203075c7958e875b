package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"runtime/debug"
	"strings"
	"syscall"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/isthmus-mesh/isthmus/server/config"
)

// Exit codes, as in the documentation of the command.
const (
	exitOK = iota
	exitFailed
	exitUsage
	exitConfig
	exitListen
	exitTimeout
	exitChanges
)

// exitError is an error with the exit code of the program.
type exitError struct {
	code int
	err  error
}

// errShown is the cause of an exit code whose reason was already printed.
var errShown = errors.New("shown above")

func (e *exitError) Error() string { return e.err.Error() }
func (e *exitError) Unwrap() error { return e.err }

func main() {
	// The first signal shuts the program down, a second one ends it at once.
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop)
	keepBrokenPipes()
	collectOften()
	ctx, gone := context.WithCancelCause(ctx)
	end := func() { gone(errNoReader) }
	code := run(ctx, os.Args[1:], output{os.Stdout, end}, output{os.Stderr, end})
	if code == exitOK && errors.Is(context.Cause(ctx), errNoReader) {
		code = exitFailed
	}
	os.Exit(code)
}

// gcPercent is the value of GOGC. Most of the memory of the bridge and its
// plugins lives as long as the services that it describes, so half of Go's
// default costs little time and saves a quarter of the resident memory.
const gcPercent = 50

// collectOften applies gcPercent unless the environment sets GOGC.
func collectOften() {
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(gcPercent)
	}
}

// errNoReader is the cause of a shutdown after the output was closed.
var errNoReader = errors.New("nobody reads the output")

// run runs the program and returns its exit code.
func run(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	root := newRoot()
	root.SetArgs(args)
	root.SetOut(stdout)
	root.SetErr(stderr)
	err := root.ExecuteContext(ctx)
	switch {
	case err == nil:
		return exitOK
	case errors.Is(err, syscall.EPIPE):
		return exitFailed // the reader of the output, such as head(1), has closed it
	}
	if e, ok := errors.AsType[*exitError](err); ok && errors.Is(err, errShown) {
		return e.code
	}
	if e, ok := errors.AsType[config.Problems](err); ok {
		fmt.Fprintf(stderr, "%v\n%s\n", err, problemCount(len(e)))
		return exitConfig
	}
	fmt.Fprintln(stderr, "isthmus:", err)
	if e, ok := errors.AsType[*exitError](err); ok {
		return e.code
	}
	return exitFailed
}

func problemCount(n int) string {
	if n == 1 {
		return "1 problem"
	}
	return fmt.Sprintf("%d problems", n)
}

func newRoot() *cobra.Command {
	root := &cobra.Command{
		Use:   "isthmus",
		Short: "A bridge from service registries to an Istio mesh",
		Long: `Isthmus follows service registries and serves their services to istiod as ServiceEntry and WorkloadEntry
resources. To see it at work, run:

  isthmus demo`,
		Args:          usageArgs(cobra.NoArgs),
		RunE:          func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
		SilenceErrors: true,
		SilenceUsage:  true,

		SuggestionsMinimumDistance: 2,
		Version:                    programVersion(),
	}
	root.SetVersionTemplate("isthmus {{.Version}}\n")
	root.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error { return usageError(cmd, err) })
	root.AddCommand(
		newServe(), newDemo(), newWatch(), newVerify(), newDump(), newImport(), newDiff(), newValidate(),
		newDoctor(), newMeshConfig(),
		newRemovals(), newExplain(), newCheck(), newKubernetes(),
		newBench(), newAdapter(), newPlugin(), newVersion(), newDocs(),
		newHealthcheck(), newLogLevel(), newMan(),
	)
	root.AddCommand(formerDecisions()...)
	root.InitDefaultCompletionCmd()
	completeFlags(root)
	return root
}

// completeFlags offers the values of flags that have a fixed set of them.
func completeFlags(cmd *cobra.Command) {
	cmd.Flags().VisitAll(func(f *pflag.Flag) {
		if o, ok := f.Value.(*oneOf); ok {
			// It fails for a flag that does not exist or was registered.
			_ = cmd.RegisterFlagCompletionFunc(f.Name, cobra.FixedCompletions(o.allowed, cobra.ShellCompDirectiveNoFileComp))
		}
	})
	for _, sub := range cmd.Commands() {
		completeFlags(sub)
	}
}

// usageError is an error of the command line with a reference to the help.
func usageError(cmd *cobra.Command, err error) error {
	return &exitError{exitUsage, fmt.Errorf("%w\nrun '%s --help' to see how it is used", err, cmd.CommandPath())}
}

// usageArgs converts errors of arguments to usage errors.
func usageArgs(check cobra.PositionalArgs) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		err := check(cmd, args)
		if err == nil {
			return nil
		}
		if cmd.HasSubCommands() && len(args) > 0 {
			err = fmt.Errorf("unknown command %q", args[0])
			if s := cmd.SuggestionsFor(args[0]); len(s) > 0 {
				err = fmt.Errorf("%w; did you mean %s?", err, strings.Join(s, " or "))
			}
		}
		// As in "explain HOST": a name for each argument.
		names, _, _ := strings.Cut(cmd.Use+" ", " --")
		switch names := strings.Fields(names)[1:]; {
		case !strings.HasPrefix(err.Error(), "accepts ") && !strings.HasPrefix(err.Error(), "unknown command "), cmd.HasSubCommands():
			// It says what is wrong.
		case len(args) < len(names) && !strings.HasPrefix(names[len(args)], "["):
			err = fmt.Errorf("%s is missing", names[len(args)])
		case len(args) > len(names):
			err = fmt.Errorf("%q is one argument too many", args[len(names)])
		}
		return usageError(cmd, err)
	}
}

// requireConfig adds the required flag --config and returns its value.
func requireConfig(cmd *cobra.Command) *string {
	file := cmd.Flags().StringP("config", "c", "", "the configuration `FILE`; see docs/configuration.md")
	cmd.PreRunE = func(cmd *cobra.Command, _ []string) error {
		if *file == "" {
			return usageError(cmd, errors.New("--config FILE is missing"))
		}
		return nil
	}
	return file
}

// listenError adds the cure to an error of listening.
func listenError(err error, cure string) error {
	switch {
	case errors.Is(err, syscall.EADDRINUSE):
		return &exitError{exitListen, fmt.Errorf("%w: another program has the port, maybe another isthmus; end it, or %s", err, cure)}
	case errors.Is(err, syscall.EACCES), errors.Is(err, syscall.EADDRNOTAVAIL):
		return &exitError{exitListen, fmt.Errorf("%w: %s", err, cure)}
	default:
		return &exitError{exitListen, err}
	}
}
