package e2e

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/isthmus-mesh/isthmus/internal/testenv"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testistiod"
	"github.com/isthmus-mesh/isthmus/internal/testwait"
)

// state is what istiod holds besides the fence, and what it did about it.
type state struct {
	Versions  map[string]string   // of each resource, by "Kind namespace/name"
	Created   map[string]string   // when it was made, likewise
	Endpoints map[string][]string // by host
	Hosts     []string
	// Full is the number of pushes of more than endpoints.
	Full int
}

func (m *mesh) state(t *testing.T) state {
	t.Helper()
	s := state{
		Versions: map[string]string{}, Created: map[string]string{},
		Endpoints: m.istiod.EndpointShards(t), Hosts: m.istiod.Hosts(t), Full: m.istiod.PushCounts(t).Full(),
	}
	delete(s.Endpoints, fenceHost)
	for name, c := range m.istiod.Configz(t) {
		if name == "ServiceEntry consul/fence" {
			continue
		}
		s.Versions[name], s.Created[name] = c.Metadata.ResourceVersion, c.Metadata.Created
	}
	return s
}

// wantUntouched checks that since then istiod applied nothing and lost nothing,
// and that it still follows changes.
func (m *mesh) wantUntouched(t *testing.T, before state, from mark) {
	t.Helper()
	m.fence(t)
	if diff := cmp.Diff(before, m.state(t)); diff != "" {
		t.Errorf("istiod holds or did something else than before (-before +after):\n%s", diff)
	}
	if pushes := m.since(from); len(pushes) > 0 {
		t.Errorf("istiod pushed %v, want nothing but the fence", pushes)
	}
}

// Neither the end of Isthmus nor that of Consul takes anything from the mesh,
// and coming back changes nothing.
func TestOutageRemovesNothing(t *testing.T) {
	testenv.SkipIfShort(t)
	t.Parallel()
	cluster := testistiod.OutboundCluster("web.service.consul", 8080)
	three := []string{"10.1.0.1:8080", "10.1.0.2:8080", "10.1.0.3:8080"}
	// What is missing for a while is to be kept until this test brings it back,
	// however long it takes to.
	patient := follow{options: "remove_grace: 1h,"}
	four := append(slices.Clone(three), "10.1.0.4:8080")
	for _, version := range testistiod.Versions() {
		t.Run(version.Name, func(t *testing.T) {
			instances := append(bystanders(20), web(1), web(2), web(3))
			m := startMesh(t, version, patient, instances...)
			m.recorder.WaitEndpoints(t, cluster, three...)
			if held := m.state(t); len(held.Versions) != 21 {
				t.Fatalf("istiod holds %v, want the ServiceEntries of 22 services but the fence's", slices.Sorted(maps.Keys(held.Versions)))
			}

			t.Run("isthmus killed and restarted", func(t *testing.T) {
				before, from := m.state(t), m.mark()
				plugin := m.isthmus.Registry(t, registryName).PID
				m.isthmus.Kill9()
				testwait.Gone(t, testenv.Patience, plugin)
				m.isthmus.Restart(t)
				m.isthmus.WaitSink(t, "ServiceEntry", "current")
				m.wantUntouched(t, before, from)
			})

			t.Run("instance added while isthmus was gone", func(t *testing.T) {
				fullBefore, from := m.istiod.PushCounts(t).Full(), m.mark()
				m.isthmus.Kill9()
				instances = append(instances, web(4))
				m.consul.Register(t, web(4))
				m.isthmus.Restart(t)
				m.recorder.WaitEndpoints(t, cluster, four...)
				m.fence(t)
				if n := m.istiod.PushCounts(t).Full(); n != fullBefore {
					t.Errorf("istiod made %d full pushes, want none: %v", n-fullBefore, m.since(from))
				}
			})

			t.Run("plugin killed", func(t *testing.T) {
				before, from := m.state(t), m.mark()
				was := m.isthmus.Registry(t, registryName)
				if err := syscall.Kill(was.PID, syscall.SIGKILL); err != nil {
					t.Fatal(err)
				}
				testenv.Eventually(t, testenv.Patience, "another plugin, live", func() (string, bool) {
					r := m.isthmus.Registry(t, registryName)
					return fmt.Sprintf("%+v", r), r.Phase == "live" && r.PID != was.PID
				})
				m.wantUntouched(t, before, from)
			})

			t.Run("consul stopped and started", func(t *testing.T) {
				before, from := m.state(t), m.mark()
				m.consul.Kill()
				m.isthmus.WaitPhase(t, registryName, "degraded")
				if diff := cmp.Diff(before, m.state(t)); diff != "" {
					t.Errorf("without Consul, istiod holds or did something else than before (-before +after):\n%s", diff)
				}
				m.consul.Restart(t)
				m.isthmus.WaitPhase(t, registryName, "live")
				m.wantUntouched(t, before, from)
			})

			t.Run("consul replaced by an empty one", func(t *testing.T) {
				before, from := m.state(t), m.mark()
				m.consul.Kill()
				m.consul.RestartEmpty(t)
				testenv.Eventually(t, testenv.Patience, "the registry to say that it keeps what is missing (remove_grace)", func() (string, bool) {
					r := m.isthmus.Registry(t, registryName)
					return fmt.Sprintf("%+v", r), r.Phase == "degraded" && strings.Contains(r.LastError, "remove_grace")
				})
				if diff := cmp.Diff(before, m.state(t)); diff != "" {
					t.Errorf("with an empty Consul, istiod holds or did something else than before (-before +after):\n%s", diff)
				}
				m.consul.Register(t, append(slices.Clone(instances), m.fenceNow())...)
				m.isthmus.WaitPhase(t, registryName, "live")
				m.wantUntouched(t, before, from)
			})

			t.Run("isthmus restarted while consul is gone", func(t *testing.T) {
				before, from := m.state(t), m.mark()
				m.consul.Kill()
				m.isthmus.Kill9()
				m.isthmus.Restart(t)
				// It serves what it served before: "not yet" must not look like
				// "empty".
				m.isthmus.WaitPhase(t, registryName, "restored")
				m.isthmus.WaitSink(t, "ServiceEntry", "current")
				if diff := cmp.Diff(before, m.state(t)); diff != "" {
					t.Errorf("with what isthmus kept on disk, istiod holds or did something else than before (-before +after):\n%s", diff)
				}
				m.consul.Restart(t)
				m.isthmus.WaitPhase(t, registryName, "live")
				m.isthmus.WaitSink(t, "ServiceEntry", "current")
				m.wantUntouched(t, before, from)
			})

			t.Run("isthmus ends when asked", func(t *testing.T) {
				plugin := m.isthmus.Registry(t, registryName).PID
				m.isthmus.Stop(t)
				testwait.Gone(t, testenv.Patience, plugin)
			})
		})
	}
}
