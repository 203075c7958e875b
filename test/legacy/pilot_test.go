package legacy

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/isthmus-mesh/isthmus/internal/testenv"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testpilot"
	"github.com/isthmus-mesh/isthmus/server/mcp"
)

// waitEndpoints waits until Pilot has the world's endpoints and no others.
func waitEndpoints(t *testing.T, p *testpilot.Server, w *world) {
	t.Helper()
	want := w.endpoints()
	testenv.Eventually(t, testenv.Patience, "Pilot to have the endpoints", func() (string, bool) {
		d := cmp.Diff(want, p.EndpointShards(t))
		return d, d == ""
	})
}

// quiet waits until Pilot's counts stay the same for a while, and returns them.
func quiet(t *testing.T, p *testpilot.Server) testpilot.Updates {
	t.Helper()
	last, since := p.Updates(t), time.Now()
	testenv.Eventually(t, testenv.Patience, "Pilot's counts to stay the same", func() (string, bool) {
		now := p.Updates(t)
		if d := now.Sub(last); len(d) > 0 {
			last, since = now, time.Now()
		}
		return fmt.Sprint(last), time.Since(since) > 300*time.Millisecond
	})
	return last
}

// A real Pilot 1.8.0 without Kubernetes: it is ready only with all endpoints,
// and each change costs what it must and no more.
func TestPilot(t *testing.T) {
	testenv.SkipIfShort(t)
	t.Parallel()
	for _, incremental := range []bool{false, true} {
		t.Run(fmt.Sprintf("incremental=%v", incremental), func(t *testing.T) {
			w := newWorld(t, mcp.Config{})
			w.setSynced(false)
			var names []string
			for i := range 600 {
				name := fmt.Sprintf("s%d", i)
				w.entry(name)
				for n := range 4 {
					w.instance(name, fmt.Sprintf("%s-%d", name, n), fmt.Sprintf("10.%d.%d.%d", i>>8, i&255, n+1), 80, 0)
				}
				names = append(names, name)
			}
			w.apply(names...)
			p := testpilot.Start(t, testpilot.Options{Incremental: incremental}, w.address)

			// While a registry is not synced Pilot is held, not emptied.
			testenv.Eventually(t, testenv.Patience, "Pilot to ask", func() (string, bool) {
				st := w.mcp.Status()
				return fmt.Sprintf("%+v", st), len(st) == 1 && st[0].Profile == "pilot-1.8"
			})
			held := time.NewTimer(2 * time.Second)
			defer held.Stop()
			<-held.C
			if p.Ready() {
				t.Error("Pilot is ready before it has anything")
			}
			w.setSynced(true)
			want := w.endpoints()
			testenv.Eventually(t, testenv.Patience, "Pilot to be ready", func() (string, bool) { return "not ready", p.Ready() })
			if d := cmp.Diff(want, p.EndpointShards(t)); d != "" {
				t.Errorf("Pilot is ready without all endpoints (-want +got):\n%s", d)
			}

			eds := []string{"eds"}
			fullPush := []string{"eds", "svc"}
			steps := []struct {
				name   string
				change func()
				// kinds are those of pilot_inbound_updates that may count up;
				// "eds" alone must be an incremental push.
				kinds []string
			}{
				{"endpoint added", func() { w.instance("s1", "s1-9", "10.9.0.1", 80, 0) }, eds},
				{"endpoint removed", func() { w.drop("s1", "s1-9") }, eds},
				{"address changed", func() { w.instance("s1", "s1-1", "10.9.0.2", 80, 0) }, eds},
				{"port of an endpoint changed", func() { w.instance("s1", "s1-1", "10.9.0.2", 8080, 0) }, eds},
				{"port of the service changed", func() { w.entryWithPort("s1", 8888) }, fullPush},
				{"port of the service back", func() { w.entry("s1") }, fullPush},
				{"weight changed", func() { w.instance("s1", "s1-1", "10.9.0.2", 8080, 7) }, eds},
				{"second endpoint on an IP", func() { w.instance("s1", "s1-5", "10.9.0.2", 8081, 0) }, eds},
				{"second endpoint on an IP gone", func() { w.drop("s1", "s1-5") }, eds},
				{"all but one gone", func() { w.drop("s1", "s1-0"); w.drop("s1", "s1-1"); w.drop("s1", "s1-2") }, eds},
				{"last one gone", func() { w.drop("s1", "s1-3") }, fullPush},
				{"back", func() { w.instance("s1", "s1-0", "10.0.1.1", 80, 0) }, fullPush},
				{"another one", func() { w.instance("s1", "s1-1", "10.0.1.2", 80, 0) }, eds},
				{"entry removed", func() { delete(w.services, "s1") }, []string{"svcdelete"}},
				{"entry back", func() { w.entry("s1"); w.instance("s1", "s1-0", "10.0.1.1", 80, 0) }, fullPush},
				{"hundred endpoints at once", func() {
					for n := range 100 {
						w.instance("s1", fmt.Sprintf("s1-%d", n), fmt.Sprintf("10.8.0.%d", n+1), 80, 0)
					}
				}, eds},
			}
			ports := map[string]int{"port of an endpoint changed": 80, "port of the service changed": 8888, "port of the service back": 80}
			before := quiet(t, p)
			for _, s := range steps {
				fullBefore := p.FullPushes()
				s.change()
				w.apply("s1")
				waitEndpoints(t, p, w)
				changed := func(now testpilot.Updates) testpilot.Updates {
					d := now.Sub(before)
					delete(d, "config")
					return d
				}
				// Not every change shows in the endpoints.
				testenv.Eventually(t, testenv.Patience, "Pilot to count "+s.name, func() (string, bool) {
					return "nothing", len(changed(p.Updates(t))) > 0
				})
				after := quiet(t, p)
				got := changed(after)
				for kind := range got {
					if !slices.Contains(s.kinds, kind) {
						t.Errorf("%s: updates %v, want only %v", s.name, got, s.kinds)
					}
				}
				full := p.FullPushes() - fullBefore
				if want := !slices.Equal(s.kinds, eds); (full > 0) != want {
					t.Errorf("%s: %d full pushes, want any: %v", s.name, full, want)
				}
				t.Logf("%-30s %v, %d full pushes", s.name, got, full)
				if port, ok := ports[s.name]; ok && !slices.Equal(p.Ports(t)[host("s1")], []int{port}) {
					t.Errorf("%s: Pilot has the ports %v", s.name, p.Ports(t)[host("s1")])
				}
				before = after
			}
			if st := w.mcp.Status(); len(st) != 1 || st[0].Subscriptions[0].Incremental != incremental || st[0].Subscriptions[0].Nacks != 0 {
				t.Errorf("status %+v", st)
			}
		})
	}
}

// The bridge is gone for a while and comes back, first with what it had and
// later with changes: Pilot loses nothing, and as long as its address accepts
// connections, it neither logs a storm nor opens a stream more than it needs.
// (While the port refuses them, Pilot 1.8 goes round in a loop of its own, see
// docs/legacy-pilot.md; nothing that a bridge that is gone could do about that.
// TestProgram has that case.)
func TestPilotBridgeGone(t *testing.T) {
	testenv.SkipIfShort(t)
	t.Parallel()
	for _, incremental := range []bool{false, true} {
		t.Run(fmt.Sprintf("incremental=%v", incremental), func(t *testing.T) {
			w := newWorld(t, mcp.Config{})
			fill := func() {
				var names []string
				for i := range 30 {
					name := fmt.Sprintf("s%d", i)
					w.entry(name)
					w.instance(name, name+"-0", fmt.Sprintf("10.0.0.%d", i+1), 80, 0)
					names = append(names, name)
				}
				w.apply(names...)
			}
			fill()
			p := testpilot.Start(t, testpilot.Options{Incremental: incremental, LogMCP: true}, newRelay(t, w.address).address)
			p.WaitReady(t)
			waitEndpoints(t, p, w)
			before := quiet(t, p)
			lines, attempts, streams := strings.Count(p.Log(), "\n"), p.Attempts(), w.streams.Load()

			w.stop()
			const gone = 3 * time.Second
			lost := time.NewTimer(gone)
			defer lost.Stop()
			<-lost.C
			if d := cmp.Diff(w.endpoints(), p.EndpointShards(t)); d != "" || !p.Ready() {
				t.Errorf("while the bridge is gone: ready %v, endpoints (-want +got):\n%s", p.Ready(), d)
			}

			// It comes back with a registry that is not listed yet: nothing is
			// taken away.
			w.empty()
			w.setSynced(false)
			w.listen()
			testenv.Eventually(t, testenv.Patience, "Pilot to come back", func() (string, bool) {
				st := w.mcp.Status()
				return fmt.Sprintf("%+v", st), len(st) == 1 && len(st[0].Subscriptions) == 11 && st[0].Profile != ""
			})
			fillWant := p.EndpointShards(t)
			quiet(t, p)
			if d := cmp.Diff(fillWant, p.EndpointShards(t)); d != "" {
				t.Errorf("a bridge that has not listed its registry takes endpoints away (-want +got):\n%s", d)
			}
			fill()
			w.setSynced(true)
			waitEndpoints(t, p, w)
			if got := quiet(t, p).Sub(before); got["eds"] > 0 || got["svc"] > 0 {
				t.Errorf("the same content again: updates %v", got)
			}
			w.instance("s3", "s3-1", "10.5.5.5", 80, 0)
			delete(w.services, "s4")
			w.apply("s3", "s4")
			waitEndpoints(t, p, w)

			// One attempt waits for the bridge to be back; it may have to be
			// made again.
			lines, attempts, streams = strings.Count(p.Log(), "\n")-lines, p.Attempts()-attempts, w.streams.Load()-streams
			t.Logf("Pilot logged %d lines and tried %d times to open a stream, %d arrived", lines, attempts, streams)
			if attempts < 1 || attempts > 5 || streams < 1 || streams > 5 || lines > 200 {
				t.Errorf("Pilot logged %d lines and tried %d times to open a stream, %d arrived", lines, attempts, streams)
			}
			if st := w.mcp.Status(); len(st) != 1 {
				t.Errorf("%d streams", len(st))
			}
		})
	}
}
