package testenv

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
)

// Istio's own validation, in programs of test/validity that read resources and
// report which of them it rejects.
var (
	// OldestValidation is that of Istio 1.8.
	OldestValidation = validation("oldest")
	// NewestValidation is that of the newest Istio that builds with this
	// repository's version of Go.
	NewestValidation = validation("newest")
)

// PeersTool is tools/peers: servers that do what Isthmus does, for isthmus
// bench compare.
var PeersTool = ownTool("peers", "peers", "tools", "peers")

func validation(folder string) Tool {
	return ownTool("validation-"+folder, "validate", "test", "validity", folder)
}

// ownTool is a program of this repository in a module of its own, in a folder.
// Its version is that of its sources.
func ownTool(name, binary string, folder ...string) Tool {
	in := func(root string) string { return filepath.Join(append([]string{root}, folder...)...) }
	return Tool{
		name: name, binary: binary,
		version: func(root string) (string, error) { return digest(in(root)) },
		get: func(ctx context.Context, root, path string, progress io.Writer) error {
			cmd := exec.CommandContext(ctx, "go", "build", "-trimpath", "-ldflags", "-s -w", "-o", path, ".")
			cmd.Dir = in(root)
			cmd.Env = append(os.Environ(), "GOWORK=off", "GOFLAGS=-mod=readonly")
			if err := runLoud(cmd, progress); err != nil {
				return fmt.Errorf("build %s (it needs the Go module proxy the first time): %w", in(root), err)
			}
			return nil
		},
	}
}

// Binary returns the path of the tool's binary, and obtains it if it is not in
// the cache.
func (t Tool) Binary(tb testing.TB) string {
	tb.Helper()
	return t.fetch(tb)
}
