package e2e

import (
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"
	"time"

	discovery "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/isthmus-mesh/isthmus/internal/testenv"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testconsul"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testisthmus"
	"github.com/isthmus-mesh/isthmus/verify"
)

// replicaTypes are what the sink of the replicas follows.
var replicaTypes = []string{
	"networking.istio.io/v1/ServiceEntry",
	"networking.istio.io/v1/WorkloadEntry",
}

// held is what a delta sink holds: versions and bodies by type URL and name.
type held struct {
	versions map[string]map[string]string
	bodies   map[string]map[string]string
}

// replicaSink is a delta sink that can move from one bridge to another.
type replicaSink struct {
	t     *testing.T
	held  held
	judge *replicaJudge
}

// replicaJudge judges what any sink of the replicas receives. It is of one
// goroutine, as the sinks are.
type replicaJudge struct {
	*verify.Judge
	streams int
}

// visit connects to a bridge with what the sink holds, and takes what comes
// until done says that it is enough; it returns how many resources came and
// how many were removed.
func (s *replicaSink) visit(client discovery.AggregatedDiscoveryServiceClient, done func() bool) (came, gone int) {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(s.t.Context(), time.Minute)
	defer cancel()
	stream, err := client.DeltaAggregatedResources(ctx)
	if err != nil {
		s.t.Fatal(err)
	}
	s.judge.streams++
	id := s.judge.streams
	add := func(e *verify.Event) {
		e.Stream, e.Time = id, time.Now()
		for _, v := range s.judge.Add(e) {
			s.t.Error(v)
		}
	}
	send := func(r *discovery.DeltaDiscoveryRequest) {
		add(verify.DeltaRequest(r))
		if err := stream.Send(r); err != nil {
			s.t.Fatal(err)
		}
	}
	add(&verify.Event{Kind: verify.Open, Protocol: "delta"})
	defer add(&verify.Event{Kind: verify.End})
	for _, url := range replicaTypes {
		send(&discovery.DeltaDiscoveryRequest{TypeUrl: url, InitialResourceVersions: s.held.versions[url]})
	}
	answered := map[string]bool{}
	for len(answered) < len(replicaTypes) || !done() {
		r, err := stream.Recv()
		if err != nil {
			s.t.Fatalf("the sink has %d and %d resources: %v", len(s.held.versions[replicaTypes[0]]), len(s.held.versions[replicaTypes[1]]), err)
		}
		add(verify.Delta(r))
		url := r.GetTypeUrl()
		answered[url] = true
		if s.held.versions[url] == nil {
			s.held.versions[url], s.held.bodies[url] = map[string]string{}, map[string]string{}
		}
		for _, res := range r.GetResources() {
			s.held.versions[url][res.GetName()] = res.GetVersion()
			s.held.bodies[url][res.GetName()] = string(res.GetResource().GetValue())
			came++
		}
		for _, name := range r.GetRemovedResources() {
			delete(s.held.versions[url], name)
			delete(s.held.bodies[url], name)
			gone++
		}
		send(&discovery.DeltaDiscoveryRequest{TypeUrl: url, ResponseNonce: r.GetNonce()})
	}
	return came, gone
}

func newReplicaSink(t *testing.T, j *replicaJudge) *replicaSink {
	return &replicaSink{t: t, held: held{map[string]map[string]string{}, map[string]map[string]string{}}, judge: j}
}

// Two bridges over the same registries, which list in an order of their own
// and change while one of the two is not there yet, serve the same bytes under
// the same versions: a sink that moves between them a thousand times gets
// nothing, also when every move is another stream, and each change once.
func TestReplicas(t *testing.T) {
	testenv.SkipIfShort(t)
	t.Parallel()
	const services, each, moves = 150, 4, 1000
	random := rand.New(rand.NewPCG(11, 6))
	consul := testconsul.Start(t, testconsul.Config{})
	var all []testconsul.Instance
	for i := range services {
		for j := range each {
			all = append(all, testconsul.Instance{
				Service: fmt.Sprintf("s%03d", i), ID: fmt.Sprintf("s%03d-%d", i, j), Address: fmt.Sprintf("10.9.%d.%d", i, j+1), Port: 8080,
				Weight: 1 + random.IntN(3), Critical: random.IntN(5) == 0,
			})
		}
	}
	random.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })

	// What the second registry says of some services of the first is shadowed.
	dir := t.TempDir()
	file := func(name, text string) {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for i := range 20 {
		file(fmt.Sprintf("f%d.yaml", i), fmt.Sprintf(`
apiVersion: networking.istio.io/v1
kind: ServiceEntry
metadata: {name: s%03d, namespace: consul}
spec:
  hosts: [s%03d.service.consul]
  ports: [{number: 8080, name: http, protocol: HTTP}]
  resolution: STATIC
  endpoints: [{address: 10.10.0.%d}]
`, 140+i, 140+i, i+1))
	}
	registries := follow{}.registries(consul.Addr) + fmt.Sprintf("\n- {name: files, type: file, config: {path: %q}}", dir)

	consul.Register(t, all[:len(all)/2]...)
	first := testisthmus.Start(t, registries)
	first.WaitReady(t)
	consul.Register(t, all[len(all)/2:]...)
	for range 30 {
		i := &all[random.IntN(len(all))]
		i.Critical = !i.Critical
		consul.Register(t, *i)
	}
	second := testisthmus.Start(t, registries)
	second.WaitReady(t)
	bridges := []*testisthmus.Server{first, second}
	clients := make([]discovery.AggregatedDiscoveryServiceClient, len(bridges))
	for i, b := range bridges {
		conn, err := grpc.NewClient(b.XDS, grpc.WithTransportCredentials(insecure.NewCredentials()))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { conn.Close() })
		clients[i] = discovery.NewAggregatedDiscoveryServiceClient(conn)
	}

	// One validator for both: versions of one are those of the other.
	judge := &replicaJudge{Judge: verify.New()}

	// settled follows both until they agree.
	settled := func(when string) *replicaSink {
		t.Helper()
		var s *replicaSink
		testenv.Eventually(t, time.Minute, "the replicas agree "+when, func() (string, bool) {
			sinks := make([]*replicaSink, len(clients))
			for i, c := range clients {
				sinks[i] = newReplicaSink(t, judge)
				sinks[i].visit(c, func() bool { return true })
			}
			s = sinks[0]
			diff := cmp.Diff(sinks[0].held.bodies, sinks[1].held.bodies)
			if d := cmp.Diff(sinks[0].held.versions, sinks[1].held.versions); (d == "") != (diff == "") {
				t.Fatalf("the bytes differ:\n%s\nand the versions:\n%s", diff, d)
			}
			return diff, diff == ""
		})
		return s
	}
	sink := settled("after the start")
	if n := len(sink.held.versions[replicaTypes[0]]); n < services+10 {
		t.Fatalf("%d services, want %d and 10 of the files", n, services)
	}
	for n := range moves {
		if came, gone := sink.visit(clients[n%2], func() bool { return true }); came+gone > 0 {
			t.Fatalf("move %d: %d resources and %d removals for a sink that has everything", n, came, gone)
		}
	}

	// A change reaches the sink where it happens to be, and is no news at the
	// other one.
	for n := range 20 {
		i := &all[random.IntN(len(all))]
		i.Weight = 10 + n
		i.Critical = false
		before := maps.Clone(sink.held.versions[replicaTypes[1]])
		consul.Register(t, *i)
		came, gone := sink.visit(clients[n%2], func() bool { return !maps.Equal(before, sink.held.versions[replicaTypes[1]]) })
		if came != 1 || gone != 0 {
			t.Fatalf("change %d: %d resources and %d removals for one changed instance", n, came, gone)
		}
		settled(fmt.Sprintf("after change %d", n)) // one may be told sooner than the other
	}
	for n := range 20 {
		if came, gone := sink.visit(clients[n%2], func() bool { return true }); came+gone > 0 {
			t.Fatalf("move %d after the changes: %d resources and %d removals", n, came, gone)
		}
	}
}
