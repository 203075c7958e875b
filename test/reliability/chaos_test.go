package reliability

import (
	"flag"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/isthmus-mesh/isthmus/internal/testenv"
	"github.com/isthmus-mesh/isthmus/verify"
)

var (
	rounds = flag.Int("rounds", 1, "how many times each fault happens")
	frozen = flag.Duration("frozen", 2*time.Second, "how long a process is stopped, or a registry unreachable")
	sim    = flag.String("sim", "{services: 200, instances: 5, changes_per_second: 10}", "config block of the registry beside Consul")
	seed   = flag.Uint64("seed", 1, "decides the changes")
	which  = flag.String("faults", "of the", "which faults happen, a regular expression")
	write  = flag.Bool("write", false, "write docs/reliability.md")
)

// fault is something that happens under churn.
type fault struct {
	name string
	do   func(w *world)
}

// faults are in the order of docs/reliability.md.
var faults = []fault{
	{"SIGKILL of the plugin", func(w *world) { w.signal(w.bridge.Registry(w.t, "dc1").PID, syscall.SIGKILL) }},
	{"SIGKILL of the bridge", func(w *world) {
		w.bridge.Kill9()
		w.churn(10)
		w.add(&verify.Event{Kind: verify.Start, Since: w.known})
		w.bridge.Restart(w.t)
	}},
	{"SIGTERM of the bridge", func(w *world) {
		w.bridge.Stop(w.t)
		w.churn(10)
		w.add(&verify.Event{Kind: verify.Start, Since: w.known})
		w.bridge.Restart(w.t)
	}},
	{"SIGKILL of Consul", func(w *world) {
		w.consul.Kill()
		w.consul.Restart(w.t)
	}},
	{"SIGSTOP of the plugin", func(w *world) { w.freeze(w.bridge.Registry(w.t, "dc1").PID) }},
	{"SIGSTOP of the bridge", func(w *world) { w.freeze(w.bridgePID()) }},
	{"Consul unreachable", func(w *world) {
		w.gate.Shut()
		w.churn(10)
		w.pass()
		w.gate.Open(w.t)
	}},
	{"the bridge starts while Consul is unreachable", func(w *world) {
		w.gate.Shut()
		w.bridge.Kill9()
		w.add(&verify.Event{Kind: verify.Start, Since: w.known})
		w.bridge.Restart(w.t)
		w.churn(10)
		w.pass()
		w.gate.Open(w.t)
	}},
}

func (w *world) signal(pid int, s syscall.Signal) {
	w.t.Helper()
	if err := syscall.Kill(pid, s); err != nil {
		w.t.Fatal(err)
	}
}

// pass lets a fault last.
func (w *world) pass() {
	timer := time.NewTimer(*frozen)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-w.t.Context().Done():
	}
}

func (w *world) freeze(pid int) {
	w.t.Helper()
	w.signal(pid, syscall.SIGSTOP)
	w.churn(10)
	w.pass()
	// A plugin that was silent for too long is gone.
	if err := syscall.Kill(pid, syscall.SIGCONT); err != nil && err != syscall.ESRCH { //nolint:errorlint // of the system call itself
		w.t.Fatal(err)
	}
}

// outcome is a row of docs/reliability.md.
type outcome struct {
	times, wrong, other int
	converged           []time.Duration
}

// No fault, under churn, violates a guarantee; in particular nothing is removed
// from any sink that is in Consul, and the end of each fault is that all sinks
// have what Consul has.
func TestChaos(t *testing.T) {
	testenv.SkipIfShort(t)
	w := newWorld(t, *sim)
	w.known = time.Now()
	w.converge("the start")
	chosen := selected(regexp.MustCompile(*which).MatchString)
	outcomes := make([]outcome, len(chosen))
	for round := range *rounds {
		for n, f := range chosen {
			o := &outcomes[n]
			w.churn(10)
			f.do(w)
			w.churn(10)
			o.converged = append(o.converged, w.converge(f.name))
			before := time.Now()
			w.churn(5)
			w.converge("changes after " + f.name)
			w.bridge.WaitKept(t)
			w.known = before
			o.times++
			for _, v := range w.found() {
				t.Errorf("round %d, %s: %v", round+1, f.name, v)
				if v.Guarantee == verify.NoRemovalWithoutCause {
					o.wrong++
				} else {
					o.other++
				}
			}
		}
	}
	table := rows(chosen, outcomes)
	t.Log("\n" + table)
	if *write && !t.Failed() {
		page(t, "Faults", "`make chaos`", fmt.Sprintf(`Consul has %d services; the configuration of sim is
%s.

Before, during and after each fault instances come, change and go; a process is
stopped, and Consul unreachable, for %v. The time to converge is that from the
end of the fault and of the changes until all sinks have what Consul has.
%s, two shared cores, 24 GB.

%s`, services, "`"+*sim+"`", *frozen, time.Now().Format(time.DateOnly), table))
	}
}

func rows(faults []fault, outcomes []outcome) string {
	var b strings.Builder
	b.WriteString("| fault | times | removed wrongly | other violations | converged, median | slowest |\n|---|---|---|---|---|---|\n")
	for n, o := range outcomes {
		slices.Sort(o.converged)
		fmt.Fprintf(&b, "| %s | %d | %d | %d | %v | %v |\n", faults[n].name, o.times, o.wrong, o.other,
			o.converged[len(o.converged)/2].Round(10*time.Millisecond), o.converged[len(o.converged)-1].Round(10*time.Millisecond))
	}
	return b.String()
}
