package e2e

import (
	"cmp"
	"slices"
	"testing"

	"github.com/isthmus-mesh/isthmus/internal/testenv"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testconsul"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testistiod"
)

// cost is what a change makes istiod send to a proxy.
type cost string

const (
	edsOnly cost = "EDS only"
	full    cost = "FULL"
)

// costs is the cost per version of istiod, with the fact behind it.
type costs struct {
	istiod121, istiod124, newest cost
	why                          string
}

func (c costs) of(v testistiod.Version) cost {
	switch v.Name {
	case testistiod.V121.Name:
		return c.istiod121
	case testistiod.V124.Name, testistiod.V126.Name:
		return c.istiod124
	default:
		return c.newest
	}
}

var (
	byEndpoint = costs{edsOnly, edsOnly, edsOnly, "an inline endpoint added or removed is EDS (before 1.25 with an explicit address on the ServiceEntry)"}
	byIPPorts  = costs{full, edsOnly, edsOnly, "the label of an IP's set of ports makes a change among its ports visible to 1.24; 1.21 looks at addresses only, and sees the label of exceptional endpoints change"}
	byAttrs    = costs{full, edsOnly, edsOnly, "1.21 compares endpoints by address: it sees another weight, port or label by the label of exceptional endpoints, which is one of the ServiceEntry"}
	byEmptied  = costs{full, full, edsOnly, "1.24 keeps stale endpoints when the list becomes empty, so the ServiceEntry gets a selector that matches nothing there, and another spec is a full push; 1.30 takes an empty list for what it is"}
	byHost     = costs{full, full, full, "a host comes or goes"}
	byPort     = costs{full, full, full, "the ServiceEntry's own port changes"}
)

// The change happens in Consul, and the proxy behind istiod gets the endpoints
// by the smallest push that istiod has.
func TestConsulChangeReachesProxy(t *testing.T) {
	testenv.SkipIfShort(t)
	t.Parallel()
	const host = "web.service.consul"
	cluster := testistiod.OutboundCluster(host, 8080)
	all := []string{"10.1.0.1:8080", "10.1.0.2:8080", "10.1.0.3:8080"}
	steps := []struct {
		name   string
		change func(t *testing.T, c *testconsul.Server)
		// cluster is the cluster that is looked at if it is another than that
		// of port 8080.
		cluster string
		want    []string // nil: the proxy has no such cluster
		costs   costs
		// resources is how many resources the plugin sends for a change that
		// costs endpoints only, if not one.
		resources int
	}{
		{
			name:   "instance added",
			change: func(t *testing.T, c *testconsul.Server) { c.Register(t, web(4)) },
			want:   append(slices.Clone(all), "10.1.0.4:8080"), costs: byEndpoint,
		},
		{
			name:   "instance removed",
			change: func(t *testing.T, c *testconsul.Server) { c.Deregister(t, "web-4") },
			want:   all, costs: byEndpoint,
		},
		{
			name:   "instance fails its check",
			change: func(t *testing.T, c *testconsul.Server) { c.Register(t, web(3, critical)) },
			want:   all[:2], costs: byEndpoint,
		},
		{
			name:   "instance passes its check again",
			change: func(t *testing.T, c *testconsul.Server) { c.Register(t, web(3)) },
			want:   all, costs: byEndpoint,
		},
		{
			name:   "weight changed",
			change: func(t *testing.T, c *testconsul.Server) { c.Register(t, web(2, weight(5))) },
			want:   []string{all[0], all[1] + "*5", all[2]}, costs: byAttrs,
		},
		{
			name:   "weight changed back",
			change: func(t *testing.T, c *testconsul.Server) { c.Register(t, web(2, weight(1))) },
			want:   all, costs: byAttrs,
		},
		{
			name:   "port of one instance changed",
			change: func(t *testing.T, c *testconsul.Server) { c.Register(t, web(2, port(8081))) },
			want:   []string{all[0], "10.1.0.2:8081", all[2]}, costs: byAttrs,
		},
		{
			name:   "port of one instance changed back",
			change: func(t *testing.T, c *testconsul.Server) { c.Register(t, web(2)) },
			want:   all, costs: byAttrs,
		},
		{
			name:   "label of one instance changed",
			change: func(t *testing.T, c *testconsul.Server) { c.Register(t, web(2, version("v2"))) },
			want:   []string{all[0], all[1] + "@v2", all[2]}, costs: byAttrs,
		},
		{
			name:   "label of one instance changed again",
			change: func(t *testing.T, c *testconsul.Server) { c.Register(t, web(2, version("v3"))) },
			want:   []string{all[0], all[1] + "@v3", all[2]}, costs: byAttrs,
		},
		{
			name:   "ordinary instance added beside one that is not",
			change: func(t *testing.T, c *testconsul.Server) { c.Register(t, web(4)) },
			want:   []string{all[0], all[1] + "@v3", all[2], "10.1.0.4:8080"}, costs: byEndpoint,
		},
		{
			name:   "instance with a label of its own removed",
			change: func(t *testing.T, c *testconsul.Server) { c.Deregister(t, "web-2") },
			want:   []string{all[0], all[2], "10.1.0.4:8080"}, costs: byAttrs,
		},
		{
			name:   "instance with a label of its own added",
			change: func(t *testing.T, c *testconsul.Server) { c.Register(t, web(2, version("v4"))) },
			want:   []string{all[0], all[1] + "@v4", all[2], "10.1.0.4:8080"}, costs: byAttrs,
		},
		{
			name: "label of all instances changed",
			change: func(t *testing.T, c *testconsul.Server) {
				c.Register(t, web(1, version("v5")), web(2, version("v5")), web(3, version("v5")), web(4, version("v5")))
			},
			want: []string{all[0] + "@v5", all[1] + "@v5", all[2] + "@v5", "10.1.0.4:8080@v5"}, costs: byAttrs, resources: 4,
		},
		{
			name:   "label of all instances gone",
			change: func(t *testing.T, c *testconsul.Server) { c.Register(t, web(1), web(2), web(3), web(4)) },
			want:   append(slices.Clone(all), "10.1.0.4:8080"), costs: byAttrs, resources: 4,
		},
		{
			name:   "instance removed again",
			change: func(t *testing.T, c *testconsul.Server) { c.Deregister(t, "web-4") },
			want:   all, costs: byEndpoint,
		},
		{
			name:   "address changed",
			change: func(t *testing.T, c *testconsul.Server) { c.Register(t, web(2, address("10.1.0.22"))) },
			want:   []string{all[0], "10.1.0.22:8080", all[2]}, costs: byEndpoint,
		},
		{
			name: "second instance on an IP",
			change: func(t *testing.T, c *testconsul.Server) {
				c.Register(t, web(2), web(5, address("10.1.0.1"), port(8082)))
			},
			want: append(slices.Clone(all), "10.1.0.1:8082"), costs: byIPPorts, resources: 2,
		},
		{
			name:   "first of two instances on an IP gone",
			change: func(t *testing.T, c *testconsul.Server) { c.Deregister(t, "web-1") },
			want:   []string{"10.1.0.1:8082", all[1], all[2]}, costs: byIPPorts,
		},
		{
			name:   "and back",
			change: func(t *testing.T, c *testconsul.Server) { c.Register(t, web(1)) },
			want:   append(slices.Clone(all), "10.1.0.1:8082"), costs: byIPPorts,
		},
		{
			name:   "second instance on an IP gone",
			change: func(t *testing.T, c *testconsul.Server) { c.Deregister(t, "web-5") },
			want:   all, costs: byIPPorts,
		},
		{
			name:   "all but one removed",
			change: func(t *testing.T, c *testconsul.Server) { c.Deregister(t, "web-2", "web-3") },
			want:   all[:1], costs: byEndpoint, resources: 2,
		},
		{
			name:   "last instance fails its check",
			change: func(t *testing.T, c *testconsul.Server) { c.Register(t, web(1, critical)) },
			want:   []string{}, costs: byEmptied,
		},
		{
			name:   "last instance passes its check again",
			change: func(t *testing.T, c *testconsul.Server) { c.Register(t, web(1)) },
			want:   all[:1], costs: byEmptied,
		},
		{
			name:   "last instance removed",
			change: func(t *testing.T, c *testconsul.Server) { c.Deregister(t, "web-1") },
			want:   nil, costs: byHost,
		},
		{
			name:   "instances back",
			change: func(t *testing.T, c *testconsul.Server) { c.Register(t, web(1), web(2), web(3)) },
			want:   all, costs: byHost,
		},
		{
			name: "port of all instances changed",
			change: func(t *testing.T, c *testconsul.Server) {
				c.Register(t, web(1, port(9090)), web(2, port(9090)), web(3, port(9090)))
			},
			cluster: testistiod.OutboundCluster(host, 9090),
			want:    []string{"10.1.0.1:9090", "10.1.0.2:9090", "10.1.0.3:9090"}, costs: byPort,
		},
	}
	for _, version := range testistiod.Versions() {
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
					// Counted from the end of the step before, so that a push
					// that came late is not overlooked.
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
