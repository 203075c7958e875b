package e2e

import (
	"fmt"
	"slices"
	"testing"

	"github.com/isthmus-mesh/isthmus/internal/testenv"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testconsul"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testisthmus"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testistiod"
)

// Istiod does not serve before Isthmus knows the whole registry, and then with
// all of it.
func TestIstiodReadyOnlyWithAllEndpoints(t *testing.T) {
	testenv.SkipIfShort(t)
	const services, perService = 200, 5
	var instances []testconsul.Instance
	for s := range services {
		for i := range perService {
			instances = append(instances, testconsul.Instance{
				Service: fmt.Sprintf("svc-%d", s), ID: fmt.Sprintf("svc-%d-%d", s, i),
				Address: fmt.Sprintf("10.3.%d.%d", s, i+1), Port: 8080, Tags: []string{"http"},
			})
		}
	}
	consul := testconsul.Start(t, testconsul.Config{})
	consul.Register(t, instances...)
	for _, version := range testistiod.Versions() {
		t.Run(version.Name, func(t *testing.T) {
			gate := testenv.NewGate(t, consul.Addr)
			isthmus := testisthmus.Start(t, follow{}.registries(gate.Addr))
			istiod := testistiod.Start(t, version, isthmus.Source())

			// Istiod asked for everything, and what does not depend on the
			// registry is answered.
			isthmus.WaitSink(t, "ServiceEntry", "waiting")
			isthmus.WaitSink(t, "MeshConfig", "current")
			if istiod.Ready() {
				t.Error("istiod is ready before the registry was listed")
			}

			gate.Open(t)
			istiod.WaitReady(t)
			// Istiod says so once it has received everything, and may still
			// be at work on it.
			testenv.Eventually(t, testenv.Patience, "istiod has all endpoints", func() (string, bool) {
				shards := istiod.EndpointShards(t)
				missing := 0
				for s := range services {
					if len(shards[fmt.Sprintf("svc-%d.service.consul", s)]) != perService {
						missing++
					}
				}
				return fmt.Sprintf("%d of %d services lack some", missing, services), missing == 0
			})

			recorder := testistiod.StartRecorder(t, istiod)
			recorder.WaitSubscribed(t)
			pushes := recorder.Pushes()
			first := slices.IndexFunc(pushes, func(p testistiod.Push) bool { return p.Kind == "eds" })
			if first < 0 {
				t.Fatalf("no answer with endpoints among %v", pushes)
			}
			for s := range services {
				cluster := testistiod.OutboundCluster(fmt.Sprintf("svc-%d.service.consul", s), 8080)
				if n := pushes[first].Endpoints[cluster]; n != perService {
					t.Fatalf("the first answer to a proxy has %d endpoints of %s, want %d", n, cluster, perService)
				}
			}
		})
	}
}

// A Consul server that was restarted answers for some seconds with the part of
// the catalog that it has read back from its disk so far, as if that were all.
// Isthmus, when it starts meanwhile, does not take it for the first full
// listing.
func TestRestartingConsulIsNotWhole(t *testing.T) {
	testenv.SkipIfShort(t)
	t.Parallel()
	const services = 3000
	var instances []testconsul.Instance
	for s := range services {
		instances = append(instances, testconsul.Instance{
			Service: fmt.Sprintf("svc-%d", s), ID: fmt.Sprintf("svc-%d", s), Address: fmt.Sprintf("10.4.%d.%d", s/250, s%250+1), Port: 8080,
		})
	}
	// One HTTP connection per service is more than Consul takes from one client
	// by default.
	consul := testconsul.Start(t, testconsul.Config{Persistent: true, ExtraHCL: "limits { http_max_conns_per_client = 10000 }"})
	consul.Register(t, instances...)
	consul.Kill()
	isthmus := testisthmus.Start(t, follow{}.registries(consul.Addr))
	consul.Launch(t)
	isthmus.WaitReady(t)
	if r := isthmus.Registry(t, registryName); r.Services != services {
		t.Errorf("the first full listing has %d services, want %d: %+v", r.Services, services, r)
	}
	consul.WaitReady(t)
}
