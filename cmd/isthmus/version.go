package main

import (
	"fmt"
	"runtime"
	"runtime/debug"
	"strings"

	"github.com/spf13/cobra"
)

// version is set by the linker; see the Makefile.
var version string

// versionOf returns the version from the linker, else from the module, else
// from the commit.
func versionOf(info *debug.BuildInfo, linked string) string {
	if linked != "" && linked != "unknown" {
		return linked
	}
	if info == nil {
		return "unknown"
	}
	if v := info.Main.Version; v != "" && v != "(devel)" {
		return v
	}
	var commit, dirty string
	for _, s := range info.Settings {
		switch {
		case s.Key == "vcs.revision":
			commit = s.Value[:min(12, len(s.Value))]
		case s.Key == "vcs.modified" && s.Value == "true":
			dirty = "-dirty"
		}
	}
	if commit == "" {
		return "unknown"
	}
	return commit + dirty
}

func programVersion() string {
	info, _ := debug.ReadBuildInfo()
	return versionOf(info, version)
}

func newVersion() *cobra.Command {
	return &cobra.Command{
		Use:   "version",
		Short: "Print the version of the program and what it was built with",
		Args:  usageArgs(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			out := cmd.OutOrStdout()
			fmt.Fprintf(out, "isthmus %s (%s, %s/%s)\n", programVersion(), runtime.Version(), runtime.GOOS, runtime.GOARCH)
			info, ok := debug.ReadBuildInfo()
			if !ok {
				return nil
			}
			for _, dep := range info.Deps {
				for _, shown := range []string{"istio.io/api", "google.golang.org/grpc", "github.com/hashicorp/go-plugin", "github.com/hashicorp/consul/api"} {
					if dep.Path == shown {
						fmt.Fprintf(out, "  %s %s\n", dep.Path, strings.TrimPrefix(dep.Version, "v"))
					}
				}
			}
			return nil
		},
	}
}
