package reliability

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"
)

const (
	chaosCommand = "`make chaos`"
	chaosHead    = "\n## Faults\n\nWritten by " + chaosCommand + ".\n\n"
	recordsFile  = "testdata/chaos.jsonl"
	machine      = "two shared cores, 24 GB"
)

// record is a run of TestChaos that docs/reliability.md counts.
type record struct {
	Run    runInfo
	Faults []outcome
}

// runInfo says what a run was.
type runInfo struct {
	Date        string    `json:"date"`
	Commit      string    `json:"commit"`
	Machine     string    `json:"machine"`
	Worlds      int       `json:"worlds"`
	Seeds       [2]uint64 `json:"seeds"` // first and last
	Sim         string    `json:"sim"`
	Frozen      string    `json:"frozen"`
	Lasts       string    `json:"lasts"`
	Flaps       string    `json:"flaps,omitempty"`
	ConsulGrace string    `json:"consul_grace"`
	NacosGrace  string    `json:"nacos_grace"`
	// Dropped is written by hand: why the run does not count.
	Dropped string `json:"dropped,omitempty"`
}

// outcome is what became of a fault in a run.
type outcome struct {
	Fault      string   `json:"fault"`
	Times      int      `json:"times"`
	Wrong      int      `json:"removed_wrongly"`
	Other      int      `json:"other_violations"`
	Stuck      int      `json:"not_converged"`
	Took       []int64  `json:"converged_ms"`
	Violations []string `json:"violations,omitempty"` // the first ones
}

// line is one of the file: a run, or a fault of the run before it.
type line struct {
	Run   *runInfo `json:"run,omitempty"`
	Fault *outcome `json:"outcome,omitempty"`
}

func readRecords(t *testing.T) []record {
	t.Helper()
	text, err := os.ReadFile(recordsFile)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		t.Fatal(err)
	}
	var all []record
	dec := json.NewDecoder(bytes.NewReader(text))
	dec.DisallowUnknownFields()
	for {
		var l line
		if err := dec.Decode(&l); errors.Is(err, io.EOF) {
			return all
		} else if err != nil {
			t.Fatalf("%s: %v", recordsFile, err)
		}
		switch {
		case l.Run != nil:
			all = append(all, record{Run: *l.Run})
		case l.Fault != nil && len(all) > 0:
			last := &all[len(all)-1]
			last.Faults = append(last.Faults, *l.Fault)
		default:
			t.Fatalf("%s: an outcome before any run", recordsFile)
		}
	}
}

// writeRecords replaces the file.
func writeRecords(t *testing.T, all []record) {
	t.Helper()
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	var err error
	for _, r := range all {
		err = errors.Join(err, enc.Encode(line{Run: &r.Run}))
		for _, f := range r.Faults {
			if f.Times > 0 {
				err = errors.Join(err, enc.Encode(line{Fault: &f}))
			}
		}
	}
	if err == nil {
		err = os.WriteFile(recordsFile+".new", b.Bytes(), 0o644) //nolint:gosec // a file of the repository
	}
	if err == nil {
		err = os.Rename(recordsFile+".new", recordsFile)
	}
	if err != nil {
		t.Error(err)
	}
}

// commit returns the one that is tested.
func commit(t *testing.T) string {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), "git", "rev-parse", "--short=10", "HEAD").Output()
	if err != nil {
		t.Fatal(err)
	}
	return strings.TrimSpace(string(out))
}

// total returns the outcomes of a fault in all runs that count.
func total(all []record, fault string) (outcomes []outcome) {
	for _, r := range all {
		for _, o := range r.Faults {
			if o.Fault == fault && r.Run.Dropped == "" {
				outcomes = append(outcomes, o)
			}
		}
	}
	return outcomes
}

// rows is the table of the faults, in total.
func rows(all []record) string {
	var b strings.Builder
	b.WriteString("| fault | times | removed wrongly | other violations | not converged | converged, median | slowest |\n|---|---|---|---|---|---|---|\n")
	for _, f := range faults {
		var sum outcome
		for _, o := range total(all, f.name) {
			sum.Times += o.Times
			sum.Wrong += o.Wrong
			sum.Other += o.Other
			sum.Stuck += o.Stuck
			sum.Took = append(sum.Took, o.Took...)
		}
		if sum.Times == 0 {
			continue
		}
		median, slowest := "", ""
		if n := len(sum.Took); n > 0 {
			slices.Sort(sum.Took)
			ms := func(n int64) string {
				return fmt.Sprint((time.Duration(n) * time.Millisecond).Round(10 * time.Millisecond))
			}
			median, slowest = ms(sum.Took[n/2]), ms(sum.Took[n-1])
		}
		fmt.Fprintf(&b, "| %s | %d | %d | %d | %d | %s | %s |\n", f.name, sum.Times, sum.Wrong, sum.Other, sum.Stuck, median, slowest)
	}
	return b.String()
}

// runs is the table of the runs.
func runs(all []record) string {
	var b strings.Builder
	b.WriteString("| run | commit | seeds | faults | removed wrongly | other violations | not converged | beside | stopped for | come and go for | others last | remove_grace |\n|---|---|---|---|---|---|---|---|---|---|---|---|\n")
	for _, r := range all {
		var sum outcome
		for _, o := range r.Faults {
			sum.Times += o.Times
			sum.Wrong += o.Wrong
			sum.Other += o.Other
			sum.Stuck += o.Stuck
		}
		date := r.Run.Date
		if r.Run.Dropped != "" {
			date += ", not counted: " + r.Run.Dropped
		}
		fmt.Fprintf(&b, "| %s | %s | %d to %d | %d | %d | %d | %d | `%s` | %s | %s | %s | Consul %s, Nacos %s |\n",
			date, r.Run.Commit, r.Run.Seeds[0], r.Run.Seeds[1], sum.Times, sum.Wrong, sum.Other, sum.Stuck,
			r.Run.Sim, r.Run.Frozen, r.Run.Flaps, r.Run.Lasts, r.Run.ConsulGrace, r.Run.NacosGrace)
	}
	return b.String()
}

// chaosText is the section of docs/reliability.md.
func chaosText(all []record) string {
	return fmt.Sprintf(`Each environment has a Consul with 20 services, a Nacos with 12, a sim, a bridge,
its sinks, and an istiod; several run in parallel, one for each seed.
%s.

Before, during and after each fault instances are added, changed and removed;
those of sim all the time. A process is stopped by SIGSTOP. Instances that are
missing after an outage are kept for remove_grace: longer than a fault lasts, and
longer than clients need to register again. (Clients of Nacos send a heartbeat
every five seconds.) The defaults are longer; with them it takes longer to
converge, and nothing else changes. The time to converge begins with the end of
the fault and of the changes, and ends when all sinks have what the registries
have; it includes the rest of remove_grace if an instance was removed while its
registry could not be followed. If a registry comes and goes, instances that
left before the end of its first outage are gone before the end of the last one,
unless all outages together are shorter than ten times remove_grace.

The full disk and the truncated state are those that the real program sees; that
it can be truncated anywhere, and a large one at every 4 KiB, is tested by
`+"`TestSmallFaults` and `TestLargeFaults` in server/lastgood"+`. That the clock is set
back is part of the [simulation](guarantees.md#how-they-are-tested).

All runs so far; if the figures of a run are not counted, it says why. They are
in [chaos.jsonl](../test/reliability/testdata/chaos.jsonl), and the next
`+"`make chaos`"+` continues with its next seeds until each fault has happened
often enough in all runs together.

%s
%s`, "On "+machine, runs(all), rows(all))
}
