package plugintest

import (
	"errors"
	"testing"

	"github.com/isthmus-mesh/isthmus/plugin/plugintest/suite"
)

// The configuration of a conformance test, and what it sees, are those of the
// checks.
type (
	// Config configures a conformance test.
	Config = suite.Config
	// Change is a change of the registry and its expected effect on the stream.
	Change = suite.Change
	// Outage is a time in which the registry cannot be followed.
	Outage = suite.Outage
	// Flaps is a registry that fails again and again.
	Flaps = suite.Flaps
	// World is the state received on a stream, as a bridge would hold it.
	World = suite.World
)

// Conformance checks an adapter's executable against the contract, with a
// subtest for each part; one that builds on another that failed is skipped.
// `isthmus plugin check` runs the same checks.
func Conformance(t *testing.T, cfg Config) {
	t.Helper()
	if len(cfg.Command) == 0 {
		if err := self(&cfg); err != nil {
			t.Fatal(err)
		}
	}
	failed := suite.Failed{}
	for _, c := range suite.Checks() {
		before := failed.Before(c)
		if !t.Run(c.Name, func(t *testing.T) {
			t.Helper()
			if before != "" {
				t.Skipf("It builds on: %s.", before)
			}
			err := c.Run(t.Context(), cfg)
			if w, ok := errors.AsType[*suite.Warning](err); ok {
				t.Log(w)
			} else if err != nil {
				t.Errorf("%v\n%s", err, c.Cure)
			}
		}) {
			failed[c.Name] = true
		}
	}
}
