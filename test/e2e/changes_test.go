package e2e

import (
	"cmp"
	"slices"
	"testing"

	"github.com/isthmus-mesh/isthmus/internal/testenv"
)

// cost is what a change makes istiod send to a proxy.
type cost string

const (
	edsOnly cost = "EDS only"
	full    cost = "FULL"
)

// costs is the cost per version of istiod, with the fact behind it.
type costs struct {
	istiod124, newest cost
	why               string
}

func (c costs) of(v testenv.IstiodVersion) cost {
	if v.Name == testenv.Istiod124.Name {
		return c.istiod124
	}
	return c.newest
}

var (
	byEndpoint = costs{edsOnly, edsOnly, "an inline endpoint added, removed or changed is EDS (before 1.25 with an explicit address on the ServiceEntry)"}
	byIPPorts  = costs{edsOnly, edsOnly, "the label of an IP's set of ports makes a change among its ports visible to 1.24, too"}
	byEmptied  = costs{full, edsOnly, "1.24 keeps stale endpoints when the list becomes empty, so the ServiceEntry gets a selector that matches nothing there, and another spec is a full push; 1.30 takes an empty list for what it is"}
	byHost     = costs{full, full, "a host comes or goes"}
	byPort     = costs{full, full, "the ServiceEntry's own port changes"}
)

// The change happens in Consul, and the proxy behind istiod gets the endpoints by the smallest push that istiod has.
func TestConsulChangeReachesProxy(t *testing.T) {
	testenv.SkipIfShort(t)
	const host = "web.service.consul"
	cluster := testenv.OutboundCluster(host, 8080)
	all := []string{"10.1.0.1:8080", "10.1.0.2:8080", "10.1.0.3:8080"}
	steps := []struct {
		name   string
		change func(t *testing.T, c *testenv.Consul)
		// cluster is the cluster that is looked at if it is another than that of port 8080.
		cluster string
		want    []string // nil: the proxy has no such cluster
		costs   costs
		// resources is how many resources the plugin sends for a change that costs endpoints only, if not one.
		resources int
	}{
		{
			name:   "instance added",
			change: func(t *testing.T, c *testenv.Consul) { c.Register(t, web(4)) },
			want:   append(slices.Clone(all), "10.1.0.4:8080"), costs: byEndpoint,
		},
		{
			name:   "instance removed",
			change: func(t *testing.T, c *testenv.Consul) { c.Deregister(t, "web-4") },
			want:   all, costs: byEndpoint,
		},
		{
			name:   "instance fails its check",
			change: func(t *testing.T, c *testenv.Consul) { c.Register(t, web(3, critical)) },
			want:   all[:2], costs: byEndpoint,
		},
		{
			name:   "instance passes its check again",
			change: func(t *testing.T, c *testenv.Consul) { c.Register(t, web(3)) },
			want:   all, costs: byEndpoint,
		},
		{
			name:   "weight changed",
			change: func(t *testing.T, c *testenv.Consul) { c.Register(t, web(2, weight(5))) },
			want:   []string{all[0], all[1] + "*5", all[2]}, costs: byEndpoint,
		},
		{
			name:   "weight changed back",
			change: func(t *testing.T, c *testenv.Consul) { c.Register(t, web(2, weight(1))) },
			want:   all, costs: byEndpoint,
		},
		{
			name:   "port of one instance changed",
			change: func(t *testing.T, c *testenv.Consul) { c.Register(t, web(2, port(8081))) },
			want:   []string{all[0], "10.1.0.2:8081", all[2]}, costs: byEndpoint,
		},
		{
			name:   "port of one instance changed back",
			change: func(t *testing.T, c *testenv.Consul) { c.Register(t, web(2)) },
			want:   all, costs: byEndpoint,
		},
		{
			name:   "address changed",
			change: func(t *testing.T, c *testenv.Consul) { c.Register(t, web(2, address("10.1.0.22"))) },
			want:   []string{all[0], "10.1.0.22:8080", all[2]}, costs: byEndpoint,
		},
		{
			name:   "second instance on an IP",
			change: func(t *testing.T, c *testenv.Consul) { c.Register(t, web(2), web(5, address("10.1.0.1"), port(8082))) },
			want:   append(slices.Clone(all), "10.1.0.1:8082"), costs: byIPPorts, resources: 2,
		},
		{
			name:   "second instance on an IP gone",
			change: func(t *testing.T, c *testenv.Consul) { c.Deregister(t, "web-5") },
			want:   all, costs: byIPPorts,
		},
		{
			name:   "all but one removed",
			change: func(t *testing.T, c *testenv.Consul) { c.Deregister(t, "web-2", "web-3") },
			want:   all[:1], costs: byEndpoint, resources: 2,
		},
		{
			name:   "last instance fails its check",
			change: func(t *testing.T, c *testenv.Consul) { c.Register(t, web(1, critical)) },
			want:   []string{}, costs: byEmptied,
		},
		{
			name:   "last instance passes its check again",
			change: func(t *testing.T, c *testenv.Consul) { c.Register(t, web(1)) },
			want:   all[:1], costs: byEmptied,
		},
		{
			name:   "last instance removed",
			change: func(t *testing.T, c *testenv.Consul) { c.Deregister(t, "web-1") },
			want:   nil, costs: byHost,
		},
		{
			name:   "instances back",
			change: func(t *testing.T, c *testenv.Consul) { c.Register(t, web(1), web(2), web(3)) },
			want:   all, costs: byHost,
		},
		{
			name: "port of all instances changed",
			change: func(t *testing.T, c *testenv.Consul) {
				c.Register(t, web(1, port(9090)), web(2, port(9090)), web(3, port(9090)))
			},
			cluster: testenv.OutboundCluster(host, 9090),
			want:    []string{"10.1.0.1:9090", "10.1.0.2:9090", "10.1.0.3:9090"}, costs: byPort,
		},
	}
	for _, version := range testenv.IstiodVersions {
		t.Run(version.Name, func(t *testing.T) {
			m := startMesh(t, version, follow{}, append(bystanders(20), web(1), web(2), web(3))...)
			m.recorder.WaitEndpoints(t, cluster, all...)
			counted := m.istiod.PushCounts(t)
			for _, step := range steps {
				ok := t.Run(step.name, func(t *testing.T) {
					cluster := cluster
					if step.cluster != "" {
						cluster = step.cluster
					}
					from, resources := m.mark(), m.pluginResources(t)
					step.change(t, m.consul)
					if step.want == nil {
						m.recorder.WaitNoCluster(t, cluster)
					} else {
						m.recorder.WaitEndpoints(t, cluster, step.want...)
					}
					m.fence(t)
					if step.want != nil { // nothing came after it that undid it
						m.recorder.WaitEndpoints(t, cluster, step.want...)
					}
					pushes := m.since(from)
					// Counted from the end of the step before, so that a push that came late is not overlooked.
					before, after := counted, m.istiod.PushCounts(t)
					counted = after
					t.Logf("pilot_xds_pushes %v, then %v; pushes %v", before, after, pushes)
					switch want := step.costs.of(version); want {
					case edsOnly:
						// The fence is one more.
						if got, want := m.pluginResources(t)-resources, cmp.Or(step.resources, 1)+1; got != want {
							t.Errorf("the plugin sent %d resources, want %d", got, want)
						}
						if after["eds"] <= before["eds"] || after.Full() != before.Full() {
							t.Errorf("pilot_xds_pushes went from %v to %v, want %s: %s\nistiod pushed %v", before, after, want, step.costs.why, pushes)
						}
						for _, p := range pushes {
							if p.Kind != "eds" || slices.ContainsFunc(p.Names, func(n string) bool { return n != cluster && n != fenceCluster }) {
								t.Errorf("push of %v, want endpoints of %s and nothing else", p, cluster)
							}
						}
					case full:
						if after["cds"] <= before["cds"] {
							t.Errorf("pilot_xds_pushes went from %v to %v, want %s: %s (if it is better now, say so here)", before, after, want, step.costs.why)
						}
					}
				})
				if !ok {
					return // the next steps build on this one
				}
			}
		})
	}
}
