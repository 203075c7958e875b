package legacy

import (
	"fmt"
	"maps"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/isthmus-mesh/isthmus/internal/testenv"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testisthmus"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testpilot"
)

// The program itself, with a registry: a real Pilot 1.8.0 that dials it and a
// real sink that it dials get everything; it is killed and comes back, and
// nothing is lost on either side.
func TestProgram(t *testing.T) {
	testenv.SkipIfShort(t)
	t.Parallel()
	for _, incremental := range []bool{false, true} {
		t.Run(fmt.Sprintf("incremental=%v", incremental), func(t *testing.T) { testProgram(t, incremental) })
	}
}

func testProgram(t *testing.T, incremental bool) {
	const services, instances = 40, 5
	reverse := fmt.Sprintf("127.0.0.1:%d", testenv.FreePort(t))
	i := testisthmus.Start(t, fmt.Sprintf(`
- {name: load, type: sim, config: {services: %d, instances: %d, changes_per_second: 0, seed: 7}}
sinks: [{address: %q}]`, services, instances, reverse))
	i.WaitReady(t)
	p := testpilot.Start(t, testpilot.Options{Incremental: incremental}, i.XDS)
	permits := map[bool]string{false: "none", true: "all"}[incremental]
	dialled := sinks{testpilot.StartLegacy(t, "sink", "-listen", reverse, "-incremental", permits)}
	dialled.Read(t, new(struct{ Address string }))
	p.WaitReady(t)
	count := func(endpoints map[string][]string) (hosts, total int) {
		for _, list := range endpoints {
			total += len(list)
		}
		return len(endpoints), total
	}
	before := p.EndpointShards(t)
	if hosts, total := count(before); hosts == 0 || total == 0 {
		t.Fatalf("Pilot is ready with %d hosts and %d endpoints", hosts, total)
	}
	var state sinkState
	testenv.Eventually(t, testenv.Patience, "the sink that is dialled to have everything", func() (string, bool) {
		state = dialled.state(t)[0]
		return fmt.Sprintf("%+v", state), state.Resources == services && state.Collections == 11
	})
	if hosts, _ := count(before); hosts > services {
		t.Errorf("Pilot has %d hosts of %d services", hosts, services)
	}

	// Both are in the admin API.
	protocols := map[string]string{}
	for _, s := range i.Sinks(t) {
		protocols[s.Protocol] = s.Profile
	}
	if want := map[string]string{"mcp": "pilot-1.8", "mcp reverse": "pilot-1.8"}; !maps.Equal(protocols, want) {
		t.Errorf("the admin API has %v, want %v", protocols, want)
	}

	i.Kill9()
	const gone = 2 * time.Second
	timer := time.NewTimer(gone)
	defer timer.Stop()
	<-timer.C
	if d := cmp.Diff(before, p.EndpointShards(t)); d != "" {
		t.Errorf("while the program is gone (-before +now):\n%s", d)
	}
	i.Restart(t)
	i.WaitReady(t)
	testenv.Eventually(t, testenv.Patience, "both sinks to be back and current", func() (string, bool) {
		all := i.Sinks(t)
		current := 0
		for _, s := range all {
			if sub, ok := s.Subscription("serviceentries"); ok && sub.State == "current" {
				current++
			}
		}
		return fmt.Sprintf("%+v", all), current == 2
	})
	if d := cmp.Diff(before, p.EndpointShards(t)); d != "" {
		t.Errorf("after the restart (-before +now):\n%s", d)
	}
	again := dialled.state(t)[0]
	sent := 0
	if !incremental {
		sent = services
	}
	if again.Hash != state.Hash || again.Objects-state.Objects != sent {
		t.Errorf("the sink that is dialled was sent %d resources again, want %d: %+v", again.Objects-state.Objects, sent, again)
	}

	// Pilot went round in a loop while the port refused it; that ended with the
	// first stream, one for each sink.
	streams, warned := 0, 0
	for line := range strings.Lines(i.Log()) {
		if strings.Contains(line, `msg="sink `) { // subscribed, or gone again
			streams++
		}
		if strings.Contains(line, "level=WARN") {
			warned++
		}
	}
	t.Logf("after the restart: %d streams, %d warnings", streams, warned)
	if streams < 2 || streams > 6 || warned > 20 {
		t.Errorf("after the restart: %d streams, %d warnings", streams, warned)
	}
}
