package reliability

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"
)

var (
	length = flag.Duration("for", 0, "how long TestSoak runs")
	every  = flag.Duration("every", 5*time.Second, "how often TestSoak measures, after changes that all sinks must have")
)

// sample is what the bridge and the plugin of Consul use.
type sample struct{ resident, goroutines, files, pluginResident, pluginFiles float64 }

func (w *world) sample() sample {
	w.t.Helper()
	m := w.bridge.Metrics(w.t)
	pid := w.bridge.Registry(w.t, "dc1").PID
	statm, err := os.ReadFile(fmt.Sprintf("/proc/%d/statm", pid))
	if err != nil {
		w.t.Fatal(err)
	}
	pages, err := strconv.ParseFloat(strings.Fields(string(statm))[1], 64)
	if err != nil {
		w.t.Fatal(err)
	}
	files, err := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", pid))
	if err != nil {
		w.t.Fatal(err)
	}
	gauge := func(name string) float64 { return m[name].GetMetric()[0].GetGauge().GetValue() }
	return sample{
		gauge("process_resident_memory_bytes"), gauge("go_goroutines"), gauge("process_open_fds"),
		pages * float64(os.Getpagesize()), float64(len(files)),
	}
}

// mean returns the mean of a value over some samples.
func mean(samples []sample, value func(sample) float64) float64 {
	sum := 0.0
	for _, s := range samples {
		sum += value(s)
	}
	return sum / float64(len(samples))
}

// Under churn every sink keeps having what the registries have, and neither
// memory nor goroutines nor open files grow from the second quarter to the
// last.
func TestSoak(t *testing.T) {
	if *length == 0 {
		t.Skip("make soak runs it")
	}
	w := newWorld(t, options{sim: *sim, seed: *seed, state: filepath.Join(t.TempDir(), "state")})
	w.converge("the start")
	var samples []sample
	var slowest time.Duration
	changes := 0
	tick := time.NewTicker(*every)
	defer tick.Stop()
	for end := time.Now().Add(*length); time.Now().Before(end); {
		select {
		case <-tick.C:
		case <-t.Context().Done():
			return
		}
		n := 1 + w.rand.IntN(10)
		w.churn(n)
		changes += n
		slowest = max(slowest, w.converge("changes"))
		samples = append(samples, w.sample())
		for _, v := range w.found() {
			t.Error(v)
		}
	}
	if len(samples) < 8 {
		t.Fatalf("%d samples; run for longer", len(samples))
	}
	quarter := len(samples) / 4
	early, late := samples[quarter:2*quarter], samples[len(samples)-quarter:]
	var table strings.Builder
	table.WriteString("| | second quarter | last quarter |\n|---|---|---|\n")
	for _, row := range []struct {
		name  string
		value func(sample) float64
		unit  float64
		slack float64
	}{
		{"resident memory of the bridge, MiB", func(s sample) float64 { return s.resident }, 1 << 20, 16},
		{"goroutines of the bridge", func(s sample) float64 { return s.goroutines }, 1, 10},
		{"files of the bridge", func(s sample) float64 { return s.files }, 1, 5},
		{"resident memory of the plugin of Consul, MiB", func(s sample) float64 { return s.pluginResident }, 1 << 20, 16},
		{"files of the plugin of Consul", func(s sample) float64 { return s.pluginFiles }, 1, 5},
	} {
		a, b := mean(early, row.value)/row.unit, mean(late, row.value)/row.unit
		fmt.Fprintf(&table, "| %s | %.1f | %.1f |\n", row.name, a, b)
		if b > 1.1*a+row.slack {
			t.Errorf("%s: %.1f in the second quarter, %.1f in the last", row.name, a, b)
		}
	}
	text := fmt.Sprintf(`%v with %d changes of 20 services in Consul and 12 in Nacos, every few seconds
some, and sim beside them with
%s:
after each of %d rounds of changes every sink had what the registries had, the
slowest time after %v. %s, two shared cores, 24 GB.

%s`, *length, changes, "`"+*sim+"`", len(samples), slowest.Round(10*time.Millisecond), time.Now().Format(time.DateOnly), &table)
	t.Log("\n" + text)
	if *write && !t.Failed() {
		page(t, "Soak", fmt.Sprintf("`make soak FOR=%v SIM='%s'`", *length, *sim), text)
	}
}

const preamble = `# Reliability

How the bridge holds its [guarantees](guarantees.md) with real programs: a
Consul and a Nacos that can be cut off, delayed and, of Consul, made to give
other answers; the registry sim beside them; a bridge; and sinks that can be cut
off and delayed, of delta and of state-of-the-world xDS, and an istiod with a
proxy behind it. The streams of the sinks, and the endpoints that the proxy
receives, are judged with the log of what was changed in the registries.
`

// page replaces a section of docs/reliability.md.
func page(t *testing.T, title, command, text string) {
	t.Helper()
	const path = "../../docs/reliability.md"
	old, err := os.ReadFile(path)
	if err != nil && !os.IsNotExist(err) {
		t.Fatal(err)
	}
	sections := map[string]string{}
	for _, s := range strings.Split(string(old), "\n## ")[1:] {
		name, body, _ := strings.Cut(s, "\n")
		sections[name] = strings.Trim(body, "\n")
	}
	sections[title] = "Written by " + command + ".\n\n" + strings.TrimSpace(text)
	sections["Public threads"] = strings.TrimSpace(threadRows())
	var b strings.Builder
	b.WriteString(preamble)
	for _, name := range []string{"Faults", "Public threads", "Constant work", "Soak"} {
		if body, ok := sections[name]; ok {
			b.WriteString("\n## " + name + "\n\n" + body + "\n")
		}
	}
	if err := os.WriteFile(path, []byte(b.String()), 0o644); err != nil { //nolint:gosec // a page of the docs
		t.Fatal(err)
	}
}
