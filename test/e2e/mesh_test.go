package e2e

import (
	"fmt"
	"slices"
	"testing"

	"github.com/isthmus-mesh/isthmus/internal/testenv/testconsul"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testisthmus"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testistiod"
)

// registryName is the registry's name in the configuration, as in the examples.
const registryName = "dc1"

// follow is how a Consul is followed. The zero value is that of the examples.
type follow struct {
	// options are those of the adapter besides the address, each followed by a
	// comma.
	options string
	// ports are the ports of every service, "" for those that the instances
	// have.
	ports string
}

// registries returns the registries of a configuration that follows the Consul
// at address.
func (f follow) registries(address string) string {
	translate := "namespace: consul"
	if f.ports != "" {
		translate += ", ports: " + f.ports
	}
	return fmt.Sprintf(`- {name: %s, type: consul, config: {%s address: "http://%s"}, translate: {%s}}`, registryName, f.options, address, translate)
}

// The fence's host, and its only port.
const (
	fenceHost = "fence.service.consul"
	fencePort = 80
)

// mesh is everything from the registry to the proxy.
type mesh struct {
	consul   *testconsul.Server
	isthmus  *testisthmus.Server
	istiod   *testistiod.Server
	recorder *testistiod.Recorder

	fenceAt int
}

// fenceNow returns the fence's instance as it stands.
func (m *mesh) fenceNow() testconsul.Instance {
	f := fence
	f.Address = fmt.Sprintf("10.9.9.%d", m.fenceAt)
	return f
}

// The service that a fence changes, and its only instance but for the address.
// A change of an address costs endpoints only in each version of istiod.
var (
	fence        = testconsul.Instance{Service: "fence", ID: "fence-1", Port: fencePort, Tags: []string{"http"}}
	fenceCluster = testistiod.OutboundCluster(fenceHost, fencePort)
)

// startMesh starts everything, with the instances in Consul beforehand and a
// recorder as the only proxy.
func startMesh(t *testing.T, version testistiod.Version, how follow, instances ...testconsul.Instance) *mesh {
	t.Helper()
	m := &mesh{fenceAt: 2}
	m.consul = testconsul.Start(t, testconsul.Config{Persistent: true})
	m.consul.Register(t, append(slices.Clone(instances), m.fenceNow())...)
	m.isthmus = testisthmus.Start(t, how.registries(m.consul.Addr))
	m.isthmus.WaitReady(t)
	m.istiod = testistiod.Start(t, version, m.isthmus.Source())
	m.istiod.WaitReady(t)
	m.recorder = testistiod.StartRecorder(t, m.istiod)
	m.recorder.WaitSubscribed(t)
	// Istiod is ready before the debounce of its start is over, and may push
	// the first fence together with everything, endpoints in the middle. The
	// second one comes after all of that.
	m.fence(t)
	m.fence(t)
	return m
}

// fence changes a service of its own in Consul and waits until the recorder has
// it. All stages keep the order of changes, so whatever an earlier change set
// off at the recorder has happened by then.
func (m *mesh) fence(t *testing.T) {
	t.Helper()
	m.fenceAt = 5 - m.fenceAt // 2 or 3
	f := m.fenceNow()
	m.consul.Register(t, f)
	m.recorder.WaitEndpoints(t, fenceCluster, fmt.Sprintf("%s:%d", f.Address, f.Port))
}

// mark is how far the recorder had come.
type mark int

func (m *mesh) mark() mark { return mark(len(m.recorder.Pushes())) }

// since returns the pushes after the mark but those of nothing else than the
// fence's endpoints.
func (m *mesh) since(from mark) []testistiod.Push {
	return slices.DeleteFunc(m.recorder.Pushes()[from:], func(p testistiod.Push) bool {
		return p.Kind == "eds" && slices.Equal(p.Names, []string{fenceCluster})
	})
}

// pluginResources returns how many changed and removed resources the plugin has
// sent to Isthmus.
func (m *mesh) pluginResources(t *testing.T) int {
	t.Helper()
	families := m.isthmus.Metrics(t)
	n := 0
	for _, name := range []string{"isthmus_plugin_upserts_total", "isthmus_plugin_removals_total"} {
		metrics := families[name].GetMetric()
		if len(metrics) != 1 {
			t.Fatalf("metric %s has %d values, want that of the one registry", name, len(metrics))
		}
		n += int(metrics[0].GetCounter().GetValue())
	}
	return n
}

// web returns an instance of the service web that nothing listens at.
func web(n int, change ...func(*testconsul.Instance)) testconsul.Instance {
	i := testconsul.Instance{Service: "web", ID: fmt.Sprintf("web-%d", n), Address: fmt.Sprintf("10.1.0.%d", n), Port: 8080, Tags: []string{"http"}}
	for _, c := range change {
		c(&i)
	}
	return i
}

func critical(i *testconsul.Instance) { i.Critical = true }

func weight(n int) func(*testconsul.Instance) {
	return func(i *testconsul.Instance) { i.Weight = n }
}

func port(n int) func(*testconsul.Instance) {
	return func(i *testconsul.Instance) { i.Port = n }
}

func version(v string) func(*testconsul.Instance) {
	return func(i *testconsul.Instance) { i.Meta = map[string]string{"version": v} }
}

func address(a string) func(*testconsul.Instance) {
	return func(i *testconsul.Instance) { i.Address = a }
}

// bystanders are services that never change: a push that names one is too big.
func bystanders(n int) []testconsul.Instance {
	var all []testconsul.Instance
	for s := range n {
		for i := range 3 {
			all = append(all, testconsul.Instance{
				Service: fmt.Sprintf("other-%d", s), ID: fmt.Sprintf("other-%d-%d", s, i),
				Address: fmt.Sprintf("10.2.%d.%d", s, i+1), Port: 6000, Tags: []string{"http"},
			})
		}
	}
	return all
}
