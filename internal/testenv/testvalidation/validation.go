package testvalidation

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"

	"github.com/isthmus-mesh/isthmus/internal/testenv"
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

func validation(folder string) testenv.Tool {
	return ownTool("validation-"+folder, "validate", "test", "validity", folder)
}

// ownTool is a program of this repository in a module of its own, in a folder.
// Its version is that of its sources.
func ownTool(name, binary string, folder ...string) testenv.Tool {
	in := func(root string) string { return filepath.Join(append([]string{root}, folder...)...) }
	return testenv.Tool{
		Name: name, Program: binary,
		Version: func(root string) (string, error) { return testenv.Digest(in(root)) },
		Get: func(ctx context.Context, root, path string) error {
			cmd := exec.CommandContext(ctx, "go", "build", "-trimpath", "-ldflags", "-s -w", "-o", path, ".")
			cmd.Dir = in(root)
			cmd.Env = append(os.Environ(), "GOWORK=off", "GOFLAGS=-mod=readonly")
			if err := testenv.RunQuiet(cmd); err != nil {
				return fmt.Errorf("build %s (it needs the Go module proxy the first time): %w", in(root), err)
			}
			return nil
		},
	}
}
