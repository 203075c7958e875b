package bench

import (
	"encoding/json"
	"os/exec"
	"testing"

	"github.com/isthmus-mesh/isthmus/internal/testenv"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testisthmus"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testpilot"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testvalidation"
)

// Every server of the comparison runs, and each of its sinks gets every change
// and holds in the end what a new sink gets.
func TestCompare(t *testing.T) {
	testenv.SkipIfShort(t)
	peers, legacy := testvalidation.PeersTool.Binary(t), testpilot.LegacyTool.Binary(t)
	out, err := exec.CommandContext(t.Context(), testisthmus.Binary(t), "bench", "compare", "--peers", peers, "--legacy", legacy, //nolint:gosec // programs of this repository
		"--services", "20", "--instances", "3", "--sinks", "2", "--rate", "50", "--duration", "1s", "--runs", "1", "--output", "json").Output()
	if err != nil {
		if e, ok := err.(*exec.ExitError); ok { //nolint:errorlint // of Output itself
			t.Fatalf("isthmus bench compare: %v\n%s", err, e.Stderr)
		}
		t.Fatal(err)
	}
	var all []struct {
		Name, Protocol string
		Median         struct {
			Updates, Differences int
			Latency              struct {
				P50 float64 `json:"p50_ms"`
			}
		}
	}
	if err := json.Unmarshal(out, &all); err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, c := range all {
		names = append(names, c.Name)
		// 50 changes for each of two sinks; some at either edge of the second
		// may be counted or not, and two of one instance may come as one.
		if c.Median.Updates < 50 || c.Median.Updates > 110 || c.Median.Differences != 0 || c.Median.Latency.P50 <= 0 {
			t.Errorf("%s, %s: %+v", c.Name, c.Protocol, c.Median)
		}
	}
	if len(all) != 6 {
		t.Errorf("measured %q", names)
	}
}
