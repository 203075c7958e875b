// Package testvalidation gets the programs of this repository that are modules
// of their own: Istio's validation, and servers to compare with.
//
// They are built from test/validity and tools/peers (minutes, once).
package testvalidation

import "github.com/isthmus-mesh/isthmus/internal/testenv"

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
var PeersTool = testenv.OwnTool("peers", "peers", ".", "tools", "peers")

func validation(folder string) testenv.Tool {
	return testenv.OwnTool("validation-"+folder, "validate", ".", "test", "validity", folder)
}
