package e2e

import (
	"fmt"
	"net"
	"strconv"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/isthmus-mesh/isthmus/internal/testenv"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testconsul"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testistiod"
)

// Services that speak neither HTTP nor TLS can be told apart by their address
// only. Each of them gets one from Isthmus, and keeps it: the table of names
// that the proxy answers DNS from has it, and one listener of its own per host,
// although all of them have one port. Their endpoints change as cheaply as
// those of others.
func TestHostsHaveAddresses(t *testing.T) {
	testenv.SkipIfShort(t)
	t.Parallel()
	const port = 7000
	raw := func(service string, n int) testconsul.Instance {
		// Without a tag that says otherwise the protocol is tcp.
		return testconsul.Instance{Service: service, ID: fmt.Sprintf("%s-%d", service, n), Address: fmt.Sprintf("10.5.0.%d", n), Port: port}
	}
	services := []string{"ledger", "mail", "queue", "store"}
	instances := []testconsul.Instance{web(1)}
	for i, s := range services {
		instances = append(instances, raw(s, 10*i+1), raw(s, 10*i+2))
	}
	for _, version := range testistiod.Versions() {
		t.Run(version.Name, func(t *testing.T) {
			m := startMesh(t, version, follow{}, instances...)
			names := m.recorder.Names()
			t.Logf("names %v, listeners on port %d %v", names, port, m.recorder.TCPListeners(port))
			want := map[string][]string{} // listeners
			for _, s := range services {
				host := s + ".service.consul"
				if len(names[host]) != 1 {
					t.Errorf("the table of names has addresses %q of %s, want one", names[host], host)
					continue
				}
				at := net.JoinHostPort(names[host][0], strconv.Itoa(port))
				want[at] = append(want[at], testistiod.OutboundCluster(host, port))
			}
			if len(want) != len(services) {
				t.Errorf("%d hosts have %d addresses", len(services), len(want))
			}
			if diff := cmp.Diff(want, m.recorder.TCPListeners(port)); diff != "" {
				t.Errorf("listeners on port %d (-one per host +istiod):\n%s", port, diff)
			}
			if host := "web.service.consul"; len(names[host]) != 1 {
				t.Errorf("the table of names has addresses %q of %s, which speaks HTTP, want one", names[host], host)
			}
			if t.Failed() {
				return
			}

			before, from := m.istiod.PushCounts(t), m.mark()
			cluster := testistiod.OutboundCluster("mail.service.consul", port)
			m.consul.Register(t, raw("mail", 13))
			m.recorder.WaitEndpoints(t, cluster, "10.5.0.11:7000", "10.5.0.12:7000", "10.5.0.13:7000")
			m.consul.Deregister(t, "mail-12", "mail-13")
			m.recorder.WaitEndpoints(t, cluster, "10.5.0.11:7000")
			m.fence(t)
			after, pushes := m.istiod.PushCounts(t), m.since(from)
			if after["eds"] <= before["eds"] || after.Full() != before.Full() {
				t.Errorf("pilot_xds_pushes went from %v to %v, want more eds and nothing else; istiod pushed %v", before, after, pushes)
			}

			// Nor does another host, which costs a full push, change the
			// address of one.
			m.consul.Register(t, raw("ninth", 99))
			m.recorder.WaitEndpoints(t, testistiod.OutboundCluster("ninth.service.consul", port), "10.5.0.99:7000")
			m.fence(t)
			now := m.recorder.Names()
			if len(now["ninth.service.consul"]) != 1 {
				t.Errorf("the table of names has addresses %q of the new host, want one", now["ninth.service.consul"])
			}
			delete(now, "ninth.service.consul")
			if diff := cmp.Diff(names, now); diff != "" {
				t.Errorf("addresses (-before +after another host came):\n%s", diff)
			}
		})
	}
}
