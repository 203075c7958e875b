package reliability

import (
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/isthmus-mesh/isthmus/internal/clip"
	"github.com/isthmus-mesh/isthmus/internal/testenv"
	"github.com/isthmus-mesh/isthmus/verify"
)

var (
	rounds = flag.Int("rounds", 1, "how many times each fault happens; with -write, together with the runs before")
	worlds = flag.Int("worlds", 1, "how many worlds the faults happen in, side by side")
	until  = flag.Duration("until", 0, "no fault begins after this time; 0 is no limit")
	frozen = flag.Duration("frozen", 2*time.Second, "how long a process is stopped by SIGSTOP")
	lasts  = flag.Duration("lasts", time.Second, "how long any other fault lasts")
	flaps  = flag.Duration("flaps", 8*time.Second, "how long a registry comes and goes, where it does; 10m is a bad night")
	sim    = flag.String("sim", "{services: 200, instances: 5, changes_per_second: 10}", "config block of the registry beside the others")
	seed   = flag.Uint64("seed", 1, "decides the changes")
	which  = flag.String("faults", "", "which faults happen, a regular expression; empty is a few that are quick")
	write  = flag.Bool("write", false, "write docs/reliability.md")

	// What is missing after an outage has to be kept until those who registered
	// it have done so again. Clients of Nacos do within two heartbeats, of 5 s;
	// the rest is for a machine on which many worlds do that at once.
	consulGrace = flag.Duration("consul-grace", 15*time.Second, "remove_grace of Consul")
	nacosGrace  = flag.Duration("nacos-grace", 30*time.Second, "remove_grace of Nacos")
)

// fault is something that happens under churn.
type fault struct {
	name  string
	do    func(w *world)
	quick bool // it happens in `make e2e`
}

// faults are in the order of docs/reliability.md.
var faults = []fault{
	{name: "SIGKILL of the plugin of Consul", quick: true, do: func(w *world) { w.signal(w.bridge.Registry(w.t, "dc1").PID, syscall.SIGKILL) }},
	{name: "SIGKILL of the plugin of Nacos", do: func(w *world) { w.signal(w.bridge.Registry(w.t, "dc2").PID, syscall.SIGKILL) }},
	{name: "SIGKILL of the bridge", quick: true, do: func(w *world) { w.restart(w.bridge.Kill9, w.known) }},
	{name: "SIGTERM of the bridge", do: func(w *world) { w.restart(func() { w.bridge.Stop(w.t) }, w.known) }},
	{name: "SIGKILL of Consul", do: func(w *world) {
		w.without(0, func() {
			w.consul.Kill()
			w.consul.Restart(w.t)
		})
	}},
	{name: "SIGKILL of Nacos", do: func(w *world) {
		w.without(1, func() {
			w.nacos.Kill()
			w.churn(10)
			w.nacos.Restart(w.t)
			w.again()
		})
	}},

	{name: "SIGSTOP of the plugin of Consul", do: func(w *world) { w.freeze(w.bridge.Registry(w.t, "dc1").PID) }},
	{name: "SIGSTOP of the plugin of Nacos", do: func(w *world) { w.freeze(w.bridge.Registry(w.t, "dc2").PID) }},
	{name: "SIGSTOP of the bridge", do: func(w *world) { w.freeze(parent(w.t, w.bridge.Registry(w.t, "dc1").PID)) }},
	{name: "SIGSTOP of Consul", do: func(w *world) {
		w.without(0, func() {
			w.consul.Pause()
			w.churn(10)
			w.pass(*frozen)
			w.consul.Continue()
			w.consul.WaitReady(w.t)
		})
	}},
	{name: "SIGSTOP of Nacos", do: func(w *world) {
		w.without(1, func() {
			w.nacos.Pause()
			w.churn(10)
			w.pass(*frozen)
			w.nacos.Continue()
			w.again()
		})
	}},
	{name: "SIGSTOP of istiod", do: func(w *world) {
		w.istiod.Pause()
		w.churn(10)
		w.pass(*frozen)
		w.istiod.Continue()
	}},

	{name: "Consul unreachable", do: func(w *world) { w.partition(w.registries[0].gate) }},
	{name: "Nacos unreachable", do: func(w *world) { w.partition(w.registries[1].gate) }},
	{name: "Consul comes and goes", quick: true, do: func(w *world) { w.flap(w.registries[0], *consulGrace) }},
	{name: "Nacos comes and goes", do: func(w *world) { w.flap(w.registries[1], *nacosGrace) }},
	{name: "a proxy ends every query of Consul that waits", do: func(w *world) {
		w.answers.pass(200 * time.Millisecond)
		w.churn(20) // what waits already ends with a change
		w.pass(*lasts)
		w.churn(20)
		w.answers.pass(0)
	}},
	{name: "sinks cut off", do: func(w *world) { w.partition(w.gates...) }},
	{name: "the bridge starts while Consul is unreachable", quick: true, do: func(w *world) { w.startWithout(w.registries[0].gate) }},
	{name: "the bridge starts while Nacos is unreachable", do: func(w *world) { w.startWithout(w.registries[1].gate) }},
	{name: "100 ms to Consul and back", do: func(w *world) { w.latency(w.registries[0].gate) }},
	{name: "100 ms to Nacos and back", do: func(w *world) { w.latency(w.registries[1].gate) }},
	{name: "100 ms to the sinks and back", do: func(w *world) { w.latency(w.gates...) }},

	{name: "Consul answers with errors", do: func(w *world) { w.answering(fails) }},
	{name: "Consul answers with nothing, at a new index", do: func(w *world) { w.answering(isEmpty) }},
	{name: "Consul's answers are filtered", do: func(w *world) { w.answering(isFiltered) }},
	{name: "Consul's answers break off", do: func(w *world) { w.answering(isTruncated) }},
	{name: "Consul's answers are cut short", do: func(w *world) { w.answering(endsEarly) }},
	{name: "Consul answers a second late", do: func(w *world) { w.answering(isSlow) }},
	{name: "Consul's index goes back", do: func(w *world) {
		w.answers.back()
		w.churn(20)
		w.pass(*lasts)
	}},
	{name: "the token is revoked, and restored", quick: true, do: func(w *world) {
		w.token.revoke(w)
		w.churn(10)
		w.pass(*lasts)
		w.token.grant(w, w.token.acl.SecretID)
	}},

	{name: "the disk is full, and SIGKILL of the bridge", do: func(w *world) {
		filler := filepath.Join(filepath.Dir(w.state), "filler")
		w.fill(filler)
		w.churn(10)
		w.pass(*lasts)
		w.restart(w.bridge.Kill9, w.known)
		if err := os.Remove(filler); err != nil {
			w.t.Fatal(err)
		}
	}},
	{name: "the state is cut off at a multiple of 4 KiB", quick: true, do: func(w *world) {
		// What is restored is the state of any time since the world began.
		w.restart(func() {
			w.bridge.Stop(w.t)
			w.truncate()
		}, w.began)
	}},

	{name: "the configuration is edited, and edited back", quick: true, do: func(w *world) {
		w.edit(*consulGrace+time.Second, `- {name: more, type: sim, config: {services: 3, instances: 1}, translate: {namespace: more}}`, true)
		w.churn(10)
		w.edit(*consulGrace, "", false)
	}},

	{name: "sinks that never acknowledge", quick: true, do: func(w *world) { w.beside(silent) }},
	{name: "sinks that refuse everything", do: func(w *world) { w.beside(refusing) }},
	{name: "sinks that connect again in a loop", do: func(w *world) { w.beside(restless) }},
}

func (w *world) signal(pid int, s syscall.Signal) {
	w.t.Helper()
	if err := syscall.Kill(pid, s); err != nil {
		w.t.Fatal(err)
	}
}

// pass lets a fault last.
func (w *world) pass(d time.Duration) {
	timer := time.NewTimer(d)
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
	w.pass(*frozen)
	// A plugin that was silent for too long is gone.
	if err := syscall.Kill(pid, syscall.SIGCONT); err != nil && err != syscall.ESRCH { //nolint:errorlint // of the system call itself
		w.t.Fatal(err)
	}
}

// restart ends the bridge and starts it. All that the registries had at a time
// is on disk.
func (w *world) restart(end func(), since time.Time) {
	w.t.Helper()
	end()
	w.churn(10)
	w.started(since)
	w.bridge.Restart(w.t)
}

// without runs f while a registry cannot be changed.
func (w *world) without(n int, f func()) {
	w.registries[n].down = true
	f()
	w.registries[n].down = false
}

func (w *world) partition(gates ...*testenv.Gate) {
	w.t.Helper()
	for _, g := range gates {
		g.Shut()
	}
	w.churn(10)
	w.pass(*lasts)
	for _, g := range gates {
		g.Open(w.t)
	}
}

// flap has a registry come and go while it changes, as long as flaps says. That
// is no reason to serve what left at the beginning until the end.
func (w *world) flap(r *registry, grace time.Duration) {
	w.t.Helper()
	const leaves = perService // the churn leaves it alone
	w.set(r, 0, leaves, true)
	w.converge("an instance that will leave")
	began, left, gone := time.Now(), false, false
	for time.Since(began) < *flaps {
		r.gate.Shut()
		if !left {
			left = true
			w.set(r, 0, leaves, false)
		}
		w.churn(5)
		w.pass(*lasts)
		r.gate.Open(w.t)
		w.churn(5)
		w.pass(*lasts)
		if !gone && !w.serves(r.key(0, leaves)) {
			gone = true
			w.t.Logf("%s comes and goes every %v: what left at the beginning is gone after %v, with a remove_grace of %v", r.name, *lasts, time.Since(began).Round(time.Second), grace)
		}
	}
	if !gone && *flaps > 10*grace {
		w.t.Errorf("%s is still served after %v of outages in a row; remove_grace is %v", r.key(0, leaves), *flaps, grace)
	}
}

func (w *world) startWithout(g *testenv.Gate) {
	w.t.Helper()
	g.Shut()
	w.restart(w.bridge.Kill9, w.known)
	w.churn(10)
	w.pass(*lasts)
	g.Open(w.t)
}

func (w *world) latency(gates ...*testenv.Gate) {
	w.t.Helper()
	for _, g := range gates {
		g.Delay(100 * time.Millisecond)
	}
	w.churn(10)
	w.pass(*lasts)
	for _, g := range gates {
		g.Delay(0)
	}
}

// answering replaces Consul's answers. Changes end the queries that wait.
func (w *world) answering(replace func(*http.Response, []byte) []byte) {
	w.t.Helper()
	w.answers.set(replace)
	w.churn(20)
	w.pass(*lasts)
	w.answers.set(nil)
}

// fill occupies all that is left of the disk of the last good state.
func (w *world) fill(filler string) {
	w.t.Helper()
	f, err := os.Create(filler)
	if err != nil {
		w.t.Fatal(err)
	}
	defer f.Close()
	for piece := make([]byte, 64<<10); ; {
		if _, err := f.Write(piece); errors.Is(err, syscall.ENOSPC) {
			if len(piece) == 1 {
				return
			}
			piece = piece[:len(piece)/2]
		} else if err != nil {
			w.t.Fatal(err)
		}
	}
}

// truncate cuts off the end of the last good state.
func (w *world) truncate() {
	w.t.Helper()
	files, err := filepath.Glob(filepath.Join(w.state, "state-*.isthmus"))
	if err != nil || len(files) == 0 {
		w.t.Fatalf("the state is in %q, %v", files, err)
	}
	for _, name := range files {
		info, err := os.Stat(name)
		if err == nil {
			err = os.Truncate(name, w.rand.Int64N(info.Size()/4096+1)*4096)
		}
		if err != nil {
			w.t.Fatal(err)
		}
	}
}

// edit changes the configuration, with or without the registry "more", and
// waits until the bridge has taken it.
func (w *world) edit(grace time.Duration, more string, there bool) {
	w.t.Helper()
	w.bridge.Configure(w.t, w.configuration(grace, more))
	testenv.Eventually(w.t, 2*testenv.Patience, "the bridge to load its configuration again", func() (string, bool) {
		code, text := w.bridge.Get(w.t, "/api/v1/registries")
		return fmt.Sprintf("%d %.600s", code, text), code == http.StatusOK && regexp.MustCompile(`"name":\s*"more"`).MatchString(text) == there
	})
}

// again makes sure that Nacos has all instances: after an outage their clients
// register them again.
func (w *world) again() {
	w.t.Helper()
	for s := range w.nacosN {
		w.registerNacos(s)
	}
}

// run is what all worlds share.
type run struct {
	faults []fault
	end    time.Time // no fault begins after it; zero is no limit
	keep   func(*record)

	mu     sync.Mutex
	seed   uint64
	queue  []int // of faults
	record record
}

// newRun returns a run in which faults happen until each has happened rounds
// times, with those of the runs before it.
func newRun(chosen []fault, before []record, keep func(*record)) *run {
	done := func(n int) (times int) {
		for _, o := range total(before, chosen[n].name) {
			times += o.Times
		}
		return times
	}
	r := &run{faults: chosen, keep: keep, seed: *seed}
	for _, b := range before {
		r.seed = max(r.seed, b.Run.Seeds[1]+1)
	}
	r.record.Run = runInfo{
		Date: time.Now().Format(time.DateOnly), Machine: machine, Seeds: [2]uint64{r.seed, r.seed},
		Sim: *sim, Frozen: frozen.String(), Lasts: lasts.String(), Flaps: flaps.String(), ConsulGrace: consulGrace.String(), NacosGrace: nacosGrace.String(),
	}
	r.record.Faults = make([]outcome, len(chosen))
	for n, f := range chosen {
		r.record.Faults[n].Fault = f.name
	}
	for round := range *rounds {
		var these []int
		for n := range chosen {
			if done(n) <= round {
				these = append(these, n)
			}
		}
		if *rounds > 1 {
			rand.New(rand.NewPCG(r.seed, uint64(round))).Shuffle(len(these), func(i, j int) { these[i], these[j] = these[j], these[i] })
		}
		r.queue = append(r.queue, these...)
	}
	if *until > 0 {
		r.end = time.Now().Add(*until)
	}
	return r
}

// next returns a fault, or false at the end.
func (r *run) next() (n int, ok bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.overLocked() {
		return 0, false
	}
	n, r.queue = r.queue[0], r.queue[1:]
	return n, true
}

func (r *run) overLocked() bool {
	return len(r.queue) == 0 || !r.end.IsZero() && time.Now().After(r.end)
}

// begin returns the seed of a further world, or false at the end.
func (r *run) begin() (seed uint64, ok bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.overLocked() {
		return 0, false
	}
	seed = r.seed
	r.seed++
	r.record.Run.Seeds[1] = seed
	return seed, true
}

// happen makes a fault happen in a world, and judges.
func (r *run) happen(w *world, n int) {
	f, stuck := r.faults[n], true
	var took time.Duration
	defer func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		o := &r.record.Faults[n]
		o.Times++
		if stuck {
			o.Stuck++
		} else {
			o.Took = append(o.Took, took.Milliseconds())
		}
		for _, v := range w.found() {
			w.t.Errorf("%s: %v", f.name, v)
			if len(o.Violations) < 5 {
				o.Violations = append(o.Violations, clip.Text(v.String(), 300))
			}
			if v.Guarantee == verify.NoRemovalWithoutCause {
				o.Wrong++
			} else {
				o.Other++
			}
		}
		r.keep(&r.record)
	}()
	w.churn(10)
	f.do(w)
	w.churn(10)
	took = w.converge(f.name)
	before := time.Now()
	w.churn(5)
	w.converge("changes after " + f.name)
	w.bridge.WaitKept(w.t)
	w.known, stuck = before, false
	w.t.Logf("%s: all sinks have everything after %v", f.name, took.Round(10*time.Millisecond))
}

// live starts a world in which faults happen until the end of the run, and
// counts them.
func (r *run) live(t *testing.T, seed uint64, happened *int) {
	o := options{sim: *sim, seed: seed, state: filepath.Join(t.TempDir(), "state")}
	if slices.ContainsFunc(r.faults, func(f fault) bool { return strings.HasPrefix(f.name, "the disk is full") }) {
		dir, _ := testenv.MountTmpfs(t, "size=256m")
		o.state = filepath.Join(dir, "state")
	}
	w := newWorld(t, o)
	w.known = time.Now()
	w.converge("the start")
	w.bridge.WaitKept(t)
	r.mu.Lock()
	r.record.Run.Worlds++
	r.mu.Unlock()
	for n, ok := r.next(); ok; n, ok = r.next() {
		*happened++
		r.happen(w, n)
	}
}

// No fault, under churn, violates a guarantee; in particular nothing is removed
// from any sink that is in its registry, and the end of each fault is that all
// sinks have what the registries have.
func TestChaos(t *testing.T) {
	testenv.SkipIfShort(t)
	var before []record
	keep := func(*record) {}
	if *write {
		before = readRecords(t)
		commit := commit(t)
		keep = func(r *record) {
			r.Run.Commit = commit
			writeRecords(t, append(slices.Clone(before), *r))
		}
	}
	r := newRun(selected(), before, keep)
	t.Run("worlds", func(t *testing.T) {
		for n := range *worlds {
			t.Run(fmt.Sprint(n+1), func(t *testing.T) {
				if *worlds > 1 {
					t.Parallel()
				}
				// In the stead of a world that failed there is another one.
				for seed, ok := r.begin(); ok; seed, ok = r.begin() {
					happened := 0
					if !t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) { r.live(t, seed, &happened) }) && (happened == 0 || *rounds == 1) {
						return
					}
				}
			})
		}
	})
	all := before
	if len(r.record.Faults) > 0 {
		all = append(all, r.record)
	}
	t.Log("\n" + rows(all))
	if *write {
		page(t, "Faults", chaosCommand, chaosText(all))
	}
}

// selected returns the faults that are to happen.
func selected() []fault {
	match := func(f fault) bool { return f.quick }
	if *which != "" {
		pattern := regexp.MustCompile(*which)
		match = func(f fault) bool { return pattern.MatchString(f.name) }
	}
	return slices.DeleteFunc(slices.Clone(faults), func(f fault) bool { return !match(f) })
}
