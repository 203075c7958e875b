package simulation

import (
	"bytes"
	"flag"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// kept are seeds that found a defect, for what they may still find.
var kept = []uint64{
	22,   // a second accident within the hold of a first one was held back for the rest of that time
	27,   // a view of one registry was open before those that merge into it were listed
	5016, // a view resent what was as before, when it had missed removals
}

var (
	seeds  = flag.Int("seeds", 40, "how many seeds TestSeeds runs")
	states = flag.Int("states", 100, "how many seeds TestState runs")
	first  = flag.Uint64("first", 1, "the first of them")
)

// The eras of a seed, and the steps of an era.
const (
	eras  = 4
	steps = 250
)

// one makes goroutines take turns on one processor.
func one(t *testing.T) {
	before := runtime.GOMAXPROCS(1)
	t.Cleanup(func() { runtime.GOMAXPROCS(before) })
}

// No guarantee is violated, whatever the seed decides.
func TestSeeds(t *testing.T) {
	one(t)
	var simulated time.Duration
	events, began := 0, cpu(t)
	var all []uint64
	for n := range uint64(*seeds) {
		all = append(all, *first+n)
	}
	for _, seed := range kept {
		if !slices.Contains(all, seed) {
			all = append(all, seed)
		}
	}
	for _, seed := range all {
		t.Run(strconv.FormatUint(seed, 10), func(t *testing.T) {
			r := simulate(t, seed, eras, steps)
			simulated += r.simulated
			events += r.events
			judged(t, r)
		})
	}
	spent := cpu(t) - began
	t.Logf("%d seeds, %d events, %.1f simulated days in %v of CPU: %.0f days per CPU hour",
		len(all), events, simulated.Hours()/24, spent.Round(time.Millisecond), simulated.Hours()/24/spent.Hours())
}

func judged(t *testing.T, r result) {
	t.Helper()
	if len(r.violations) == 0 {
		return
	}
	path := filepath.Join(t.ArtifactDir(), "recording.jsonl")
	if err := os.WriteFile(path, r.recording, 0o600); err != nil {
		t.Error(err)
	}
	for _, v := range r.violations {
		t.Error(v)
	}
	t.Logf("%s; its end:\n%s", path, tail(r.recording, 12))
}

// A seed decides everything: two runs give the same bytes. What no seed decides
// is when the scheduler takes the processor from a goroutine that had it for 10
// ms of real time, as on a busy machine; then two runs more are compared.
func TestReplay(t *testing.T) {
	one(t)
	for seed := uint64(1); seed <= 4; seed++ {
		difference := ""
		for range 20 {
			a, b := simulate(t, seed, 2, steps), simulate(t, seed, 2, steps)
			if difference = firstDifference(a.recording, b.recording); difference == "" {
				break
			}
			t.Logf("seed %d: the recordings differ: %s", seed, difference)
		}
		if difference != "" {
			t.Errorf("seed %d gave no two recordings that are equal", seed)
		}
	}
}

// firstDifference returns "" if there is none.
func firstDifference(a, b []byte) string {
	if bytes.Equal(a, b) {
		return ""
	}
	la, lb := bytes.Split(a, []byte("\n")), bytes.Split(b, []byte("\n"))
	for i := range min(len(la), len(lb)) {
		if !bytes.Equal(la[i], lb[i]) {
			return "line " + strconv.Itoa(i+1) + ":\n" + string(la[i]) + "\n" + string(lb[i])
		}
	}
	return "one is longer"
}

// cpu returns the processor time of this process.
func cpu(t *testing.T) time.Duration {
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
		t.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
