package e2e

import (
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/isthmus-mesh/isthmus/internal/testenv"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testconsul"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testisthmus"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testistiod"
	"github.com/isthmus-mesh/isthmus/internal/testwait"
)

// shown is what a person finds of a fault. Each pattern has to match, except
// one that begins with "!", which must not.
type shown struct {
	code                       int // of /readyz
	readyz, page, metrics, log []string
}

// waitShown waits until all of it is shown.
func waitShown(t *testing.T, bridge *testisthmus.Server, what string, want shown) {
	t.Helper()
	testenv.Eventually(t, testenv.Patience, what+" to be shown", func() (string, bool) {
		var missing []string
		look := func(where, text string, patterns []string) {
			for _, p := range patterns {
				pattern, absent := strings.CutPrefix(p, "!")
				if regexp.MustCompile("(?m)"+pattern).MatchString(text) == absent {
					missing = append(missing, where+": "+p)
				}
			}
		}
		code, readyz := bridge.Get(t, "/readyz")
		if code != want.code {
			missing = append(missing, fmt.Sprintf("/readyz: %d, want %d: %s", code, want.code, readyz))
		}
		look("/readyz "+readyz, readyz, want.readyz)
		_, page := bridge.Get(t, "/")
		_, problems := bridge.Get(t, "/problems")
		look("the page", page+problems, want.page)
		_, metrics := bridge.Get(t, "/metrics")
		look("/metrics", metrics, want.metrics)
		look("the log", bridge.Log(), want.log)
		return strings.Join(missing, "\n"), len(missing) == 0
	})
}

// waitShards waits until istiod has these endpoints by host.
func waitShards(t *testing.T, istiod *testistiod.Server, want map[string][]string) {
	t.Helper()
	testenv.Eventually(t, testenv.Patience, "the endpoints in istiod", func() (string, bool) {
		diff := cmp.Diff(want, istiod.EndpointShards(t))
		return "(-want +got):\n" + diff, diff == ""
	})
}

// shardsOf returns the endpoints that istiod has of instances in Consul.
func shardsOf(instances ...testconsul.Instance) map[string][]string {
	out := map[string][]string{}
	for _, i := range instances {
		host := i.Service + ".service.consul"
		out[host] = append(out[host], fmt.Sprintf("%s:%d", i.Address, i.Port))
	}
	for _, endpoints := range out {
		slices.Sort(endpoints)
	}
	return out
}

// consulBlock is the block of a registry that follows the Consul at address.
func consulBlock(name, address, more string) string {
	return fmt.Sprintf("- {name: %s, type: consul, config: {address: \"http://%s\"}, translate: {namespace: %s}%s}\n", name, address, name, more)
}

// retryNow replaces the plugin of a registry by one that does not wait until it
// is time to try again.
func retryNow(t *testing.T, bridge *testisthmus.Server, registry string) {
	t.Helper()
	if err := syscall.Kill(bridge.Registry(t, registry).PID, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
}

// Of each fault: what is served to istiod, what is shown, and how it ends. The
// table in docs/operate/faults.md has a row for each.
func TestFaults(t *testing.T) {
	testenv.SkipIfShort(t)
	t.Parallel()
	const seTypes = `collection="networking.istio.io/ServiceEntry"`

	// Two registries share a host. All of it is served from the disk, the host
	// with the endpoints of both, to an istiod that is new.
	t.Run("start with every registry down", func(t *testing.T) {
		first, second := testconsul.Start(t, testconsul.Config{}), testconsul.Start(t, testconsul.Config{})
		other := web(2, address("10.7.0.2"))
		first.Register(t, append(bystanders(20), web(1))...)
		second.Register(t, other)
		want := shardsOf(append(bystanders(20), web(1), other)...)
		gates := []*testenv.Gate{testenv.NewGate(t, first.Addr), testenv.NewGate(t, second.Addr)}
		for _, g := range gates {
			g.Open(t)
		}
		j := newJudged(t)
		j.tell("dc1", true, append(bystanders(20), web(1), other)...) // merged
		j.start(time.Time{})
		bridge := testisthmus.Start(t, consulBlock("dc1", gates[0].Addr, "")+consulBlock("dc2", gates[1].Addr, "")+
			"conflicts: [{hosts: [web.service.consul], policy: merge, weights: {dc1: 90, dc2: 10}}]\n")
		j.follow(bridge)
		bridge.WaitReady(t)
		saved := time.Now()
		_, before := bridge.Get(t, "/api/v1/resources?limit=1000&body=true")
		_, services := bridge.Get(t, "/api/v1/services?limit=1000")
		bridge.Stop(t)
		for _, g := range gates {
			g.Shut()
		}
		j.start(saved)
		bridge.Restart(t)
		istiod := testistiod.Start(t, testistiod.Newest, bridge.Source())
		istiod.WaitReady(t)
		waitShards(t, istiod, want)
		_, now := bridge.Get(t, "/api/v1/resources?limit=1000&body=true")
		if diff := cmp.Diff(before, now); diff != "" {
			t.Errorf("resources (-before +after):\n%s", diff)
		}
		if _, now := bridge.Get(t, "/api/v1/services?limit=1000"); now != services {
			t.Errorf("services (-before +after):\n%s", cmp.Diff(services, now))
		}
		waitShown(t, bridge, "every registry down", shown{
			code:   http.StatusOK,
			readyz: []string{`^ready$`, `^registry dc1: serves-restored: restored, it is served as it was .*connection refused`, `^registry dc2: serves-restored: `},
			page:   []string{"served as it was", "Hosts that several services have: 1"},
			metrics: []string{
				`^isthmus_registry_restored_timestamp_seconds\{registry="dc1"\}`, `^isthmus_registry_restored_timestamp_seconds\{registry="dc2"\}`,
				`^isthmus_waiting\{` + seTypes + `\} 0$`, `^isthmus_conflicts\{policy="merge"\} 1$`,
			},
			log: []string{
				`msg="restored; served until the first listing is complete".* registry=dc1`,
				`msg="the registry cannot be followed; what is known is served" registry=dc2`,
			},
		})

		// The first one is back: nothing of the other goes.
		gates[0].Open(t)
		retryNow(t, bridge, "dc1")
		bridge.WaitPhase(t, "dc1", "live")
		j.tell("dc1", true, web(3))
		first.Register(t, web(3))
		waitShards(t, istiod, shardsOf(append(bystanders(20), web(1), web(3), other)...))
		gates[1].Open(t)
		retryNow(t, bridge, "dc2")
		bridge.WaitPhase(t, "dc2", "live")
		waitShown(t, bridge, "the end of it", shown{code: http.StatusOK, readyz: []string{`^ready\n$`}, metrics: []string{"!^isthmus_registry_restored_timestamp_seconds"}})
		waitShards(t, istiod, shardsOf(append(bystanders(20), web(1), web(3), other)...))
		j.settle()
	})

	t.Run("start with a required and an optional registry down", func(t *testing.T) {
		first, second := testconsul.Start(t, testconsul.Config{}), testconsul.Start(t, testconsul.Config{})
		first.Register(t, bystanders(5)...)
		second.Register(t, web(1))
		required, optional := testenv.NewGate(t, first.Addr), testenv.NewGate(t, second.Addr)
		j := newJudged(t)
		j.tell("dc1", true, bystanders(5)...)
		j.start(time.Time{})
		bridge := testisthmus.Start(t, consulBlock("dc1", required.Addr, "")+consulBlock("dc2", optional.Addr, ", required: false"))
		istiod := testistiod.Start(t, testistiod.Newest, bridge.Source())
		bridge.WaitSink(t, "ServiceEntry", "waiting")
		waitShown(t, bridge, "a required registry that is down", shown{
			code:    http.StatusServiceUnavailable,
			readyz:  []string{`^registry dc1: the first listing is not complete: degraded: .*connection refused.*; waiting for it: .*ServiceEntry.* since \S+Z$`},
			page:    []string{`types that wait for it, for \d+ s: .*ServiceEntry`, "optional: served without it"},
			metrics: []string{`^isthmus_waiting\{` + seTypes + `\} 1$`},
			log: []string{
				`msg="the registry cannot be followed; its types wait for its first listing" registry=dc1`,
				`msg="the registry is optional and its first listing is not complete; its types are served without it" registry=dc2`,
			},
		})
		if istiod.Ready() {
			t.Error("istiod is ready while a required registry holds its types")
		}

		j.follow(bridge)
		required.Open(t)
		istiod.WaitReady(t)
		waitShards(t, istiod, shardsOf(bystanders(5)...))
		waitShown(t, bridge, "an optional registry that is down", shown{
			code:    http.StatusOK,
			readyz:  []string{`^ready$`, `^registry dc2: serves-without: .*connection refused`},
			metrics: []string{`^isthmus_waiting\{` + seTypes + `\} 0$`},
		})
		j.settle()
		j.tell("dc2", true, web(1))
		optional.Open(t)
		waitShards(t, istiod, shardsOf(append(bystanders(5), web(1))...))
		j.settle()
		waitShown(t, bridge, "the end of it", shown{code: http.StatusOK, readyz: []string{`^ready\n$`}})
	})

	t.Run("start with an empty Consul where there was a full one", func(t *testing.T) {
		consul := testconsul.Start(t, testconsul.Config{})
		consul.Register(t, bystanders(20)...)
		j := newJudged(t)
		j.tell(registryName, true, bystanders(20)...)
		j.start(time.Time{})
		bridge := testisthmus.Start(t, consulBlock(registryName, consul.Addr, ""))
		j.follow(bridge)
		bridge.WaitReady(t)
		saved := time.Now()
		bridge.Stop(t)
		consul.RestartEmpty(t)
		j.start(saved)
		bridge.Restart(t)
		istiod := testistiod.Start(t, testistiod.Newest, bridge.Source())
		istiod.WaitReady(t)
		bridge.WaitPhase(t, registryName, "removal-paused")
		waitShown(t, bridge, "an empty Consul", shown{
			code:    http.StatusOK,
			readyz:  []string{`^ready$`, `^registry dc1: .*20 of 20 services, 60 endpoints`},
			page:    []string{"20 of 20 services"},
			metrics: []string{`^isthmus_registry_removal_paused\{registry="dc1"\} 1$`, `^isthmus_registry_removals\{registry="dc1"\} 80$`},
			log:     []string{`msg="a removal looks like an accident and is paused" registry=dc1 services=20 of=20 endpoints=60`},
		})
		waitShards(t, istiod, shardsOf(bystanders(20)...))
		if _, kept := bridge.Get(t, "/api/v1/removals"); !strings.Contains(kept, "a complete listing was without it and most other services; the removal is paused") {
			t.Errorf("/api/v1/removals = %s", kept)
		}

		consul.Register(t, bystanders(12)...)
		testenv.Eventually(t, testenv.Patience, "12 of them to be back", func() (string, bool) {
			p := bridge.Registry(t, registryName).Protection
			return fmt.Sprintf("%+v", p), p != nil && p.Endpoints == 3*8
		})
		waitShards(t, istiod, shardsOf(bystanders(20)...))
		j.settle() // nothing went
		j.gone(registryName, bystanders(20)[3*12:]...)
		bridge.Decide(t, "allow", registryName)
		waitShards(t, istiod, shardsOf(bystanders(12)...))
		waitShown(t, bridge, "the end of it", shown{
			code: http.StatusOK, readyz: []string{`^ready\n$`}, metrics: []string{`^isthmus_registry_removal_paused\{registry="dc1"\} 0$`, `^isthmus_registry_removals\{registry="dc1"\} 0$`},
		})
		j.settle()
	})

	failing := func(reason string) shown {
		return shown{
			code:    http.StatusOK,
			page:    []string{`(?s)class="banner (bad|warn)".*` + reason},
			metrics: []string{`^isthmus_state_failing 1$`, `^isthmus_state_errors_total\{op="write"\} [1-9]`},
			log:     []string{`level=ERROR msg="the last good state cannot be written; everything is served.*` + reason},
		}
	}
	written := shown{code: http.StatusOK, metrics: []string{`^isthmus_state_failing 0$`}, log: []string{`msg="the last good state is written again"`}}

	t.Run("the disk of state.dir is full", func(t *testing.T) {
		dir, _ := testenv.MountTmpfs(t, "size=256k")
		consul := testconsul.Start(t, testconsul.Config{})
		consul.Register(t, web(1))
		gate := testenv.NewGate(t, consul.Addr)
		gate.Open(t)
		j := newJudged(t)
		j.tell(registryName, true, web(1))
		j.start(time.Time{})
		bridge := testisthmus.Start(t, consulBlock(registryName, gate.Addr, "")+fmt.Sprintf("state: {dir: %q}\n", filepath.Join(dir, "state")))
		j.follow(bridge)
		bridge.WaitReady(t)
		saved := time.Now()
		istiod := testistiod.Start(t, testistiod.Newest, bridge.Source())
		istiod.WaitReady(t)
		bridge.Stop(t)
		filler := filepath.Join(dir, "filler")
		if err := os.WriteFile(filler, make([]byte, 256<<10), 0o600); !errors.Is(err, syscall.ENOSPC) {
			t.Fatalf("fill the disk: %v", err)
		}
		j.start(saved)
		bridge.Restart(t)
		bridge.WaitPhase(t, registryName, "live")
		// More than the rest of a page, which the file has already.
		const services = 100
		j.tell(registryName, true, bystanders(services)...)
		consul.Register(t, bystanders(services)...)
		all := shardsOf(append(bystanders(services), web(1))...)
		waitShards(t, istiod, all)
		waitShown(t, bridge, "a full disk", failing("no space left on device"))

		// A restart has what was written last, and removes nothing in istiod.
		j.settle()
		gate.Shut()
		bridge.Kill9()
		j.start(saved)
		bridge.Restart(t)
		bridge.WaitPhase(t, registryName, "restored")
		// One of the others may have come alone, and fitted.
		if got := bridge.Endpoints(t); got["dc1/web"] != 1 || len(got) > services/2 {
			t.Errorf("restored: %v, want dc1/web and few others", got)
		}
		gate.Open(t)
		bridge.WaitPhase(t, registryName, "live")
		waitShards(t, istiod, all)
		waitShown(t, bridge, "a full disk", failing("no space left on device"))
		if err := os.Remove(filler); err != nil {
			t.Fatal(err)
		}
		saved = time.Now()
		j.settle()
		waitShown(t, bridge, "room on the disk", written)
		gate.Shut()
		bridge.Kill9()
		j.start(saved)
		bridge.Restart(t)
		bridge.WaitPhase(t, registryName, "restored")
		waitShards(t, istiod, all)
		if n := len(bridge.Endpoints(t)); n != services+1 {
			t.Errorf("%d services are restored, want %d", n, services+1)
		}
		j.settle()
	})

	t.Run("the disk of state.dir is read-only", func(t *testing.T) {
		dir, remount := testenv.MountTmpfs(t, "size=16m")
		consul := testconsul.Start(t, testconsul.Config{})
		consul.Register(t, bystanders(5)...)
		gate := testenv.NewGate(t, consul.Addr)
		gate.Open(t)
		j := newJudged(t)
		j.tell(registryName, true, bystanders(5)...)
		j.start(time.Time{})
		bridge := testisthmus.Start(t, consulBlock(registryName, gate.Addr, "")+fmt.Sprintf("state: {dir: %q}\n", filepath.Join(dir, "state")))
		j.follow(bridge)
		bridge.WaitReady(t)
		saved := time.Now()
		bridge.Stop(t)
		gate.Shut()
		remount(true)
		j.start(saved)
		bridge.Restart(t)
		istiod := testistiod.Start(t, testistiod.Newest, bridge.Source())
		istiod.WaitReady(t)
		waitShards(t, istiod, shardsOf(bystanders(5)...))
		bridge.WaitPhase(t, registryName, "restored")
		waitShown(t, bridge, "a read-only disk", failing("read-only file system"))
		gate.Open(t)
		bridge.WaitPhase(t, registryName, "live")
		j.tell(registryName, true, web(1))
		consul.Register(t, web(1))
		waitShards(t, istiod, shardsOf(append(bystanders(5), web(1))...))
		remount(false)
		waitShown(t, bridge, "a disk that can be written to", written)
		j.settle()
	})

	t.Run("kill -9 under churn", func(t *testing.T) {
		consul := testconsul.Start(t, testconsul.Config{})
		gate := testenv.NewGate(t, consul.Addr)
		gate.Open(t)
		consul.Register(t, bystanders(20)...)
		j := newJudged(t)
		j.tell(registryName, true, bystanders(20)...)
		// The service web comes and goes with its first and last instance.
		j.tell(registryName, true, web(1))
		j.gone(registryName, web(1))
		j.start(time.Time{})
		bridge := testisthmus.Start(t, consulBlock(registryName, gate.Addr, ""))
		j.follow(bridge)
		bridge.WaitReady(t)
		istiod := testistiod.Start(t, testistiod.Newest, bridge.Source())
		istiod.WaitReady(t)
		recorder := testistiod.StartRecorder(t, istiod)
		recorder.WaitSubscribed(t)
		there := map[int]bool{}
		step := 0
		churn := func(steps int) {
			for range steps {
				n := step%40 + 1
				if there[n] = !there[n]; there[n] {
					j.tell(registryName, true, web(n))
					consul.Register(t, web(n))
				} else {
					j.tell(registryName, false, web(n))
					consul.Deregister(t, web(n).ID)
				}
				step++
			}
		}
		listed := time.Now()
		churn(1)
		testenv.Eventually(t, testenv.Patience, "the listing to be on disk", func() (string, bool) {
			written := bridge.Metrics(t)["isthmus_state_written_timestamp_seconds"].GetMetric()[0].GetGauge().GetValue()
			return fmt.Sprint(written), written > float64(listed.UnixMilli())/1000
		})
		for range 3 {
			churn(15)
			plugin := bridge.Registry(t, registryName).PID
			bridge.Kill9()
			churn(7)
			testwait.Gone(t, testenv.Patience, plugin)
			j.start(listed)
			bridge.Restart(t)
			churn(7)
			waitShown(t, bridge, "what was restored", shown{code: http.StatusOK, log: []string{`msg="restored; served until the first listing is complete"`}})
			bridge.WaitPhase(t, registryName, "live")
		}
		// Every state that istiod had on the way has all that never changed.
		for _, push := range recorder.Pushes() {
			for _, s := range bystanders(20) {
				cluster := testistiod.OutboundCluster(s.Service+".service.consul", s.Port)
				if n, told := push.Endpoints[cluster]; told && n != 3 {
					t.Errorf("istiod pushed %s with %d endpoints, want 3", cluster, n)
				}
			}
		}
		want := bystanders(20)
		for n, on := range there {
			if on {
				want = append(want, web(n))
			}
		}
		waitShards(t, istiod, shardsOf(want...))
		j.settle()
		waitShown(t, bridge, "the end of it", shown{
			code: http.StatusOK, readyz: []string{`^ready\n$`}, metrics: []string{`^isthmus_state_failing 0$`, `!^isthmus_state_errors_total\{op="read"\} [1-9]`},
		})
	})
}
