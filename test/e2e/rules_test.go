package e2e

import (
	"fmt"
	"maps"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/isthmus-mesh/isthmus/internal/testenv"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testisthmus"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testistiod"
)

// What the rules of translate say of a service reaches the proxy: its weights,
// its localities by network, its versions as subsets, its two protocols, and a
// name that is in the mesh's table of names with an address of the configured
// network, which a reload changes.
func TestRulesReachProxy(t *testing.T) {
	testenv.SkipIfShort(t)
	const host, httpPort, tcpPort = "shop.example.org", 80, 6379
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "shop.yaml"), []byte(`
services:
- name: shop
  ports: [{name: http, number: 80, protocol: http}, {name: cache, number: 6379, protocol: tcp}]
  instances:
  - {id: a, address: 10.6.1.1, ports: [{name: http, number: 8080}, {name: cache, number: 6380}], weight: 1, meta: {version: v1}}
  - {id: b, address: 10.6.2.1, ports: [{name: http, number: 8080}, {name: cache, number: 6380}], weight: 3, meta: {version: v2}}
  - {id: c, address: 10.6.2.2, ports: [{name: http, number: 8080}, {name: cache, number: 6380}], meta: {version: v2}, health: critical}
`), 0o600); err != nil {
		t.Fatal(err)
	}
	config := func(network netip.Prefix) string {
		return fmt.Sprintf(`- name: files
  type: file
  config: {path: %q}
  translate:
    host: "{{.Name}}.example.org"
    subsets: {key: version, destination_rule: true}
    locality: {cidrs: [{cidr: 10.6.1.0/24, locality: eu/eu-1}, {cidr: 10.6.2.0/24, locality: eu/eu-2}]}
addresses: {cidr: %s}
`, dir, network)
	}
	before, after := netip.MustParsePrefix("10.96.0.0/16"), netip.MustParsePrefix("10.97.0.0/16")
	bridge := testisthmus.Start(t, config(before))
	bridge.WaitReady(t)
	for _, version := range testistiod.Versions() {
		t.Run(version.Name, func(t *testing.T) {
			bridge.Configure(t, config(before))
			istiod := testistiod.Start(t, version, bridge.Source())
			istiod.WaitReady(t)
			proxy := testistiod.StartRecorder(t, istiod)
			proxy.WaitSubscribed(t)
			a, b := "10.6.1.1:8080@v1", "10.6.2.1:8080*3@v2"
			proxy.WaitEndpoints(t, testistiod.OutboundCluster(host, httpPort), a, b)
			proxy.WaitEndpoints(t, testistiod.OutboundCluster(host, tcpPort), "10.6.1.1:6380@v1", "10.6.2.1:6380*3@v2")
			proxy.WaitEndpoints(t, fmt.Sprintf("outbound|%d|v1|%s", httpPort, host), a)
			proxy.WaitEndpoints(t, fmt.Sprintf("outbound|%d|v2|%s", httpPort, host), b)
			if d := cmp.Diff(map[string]string{"10.6.1.1": "eu/eu-1", "10.6.2.1": "eu/eu-2"}, proxy.Localities(testistiod.OutboundCluster(host, httpPort))); d != "" {
				t.Errorf("localities (-want +got):\n%s", d)
			}
			if routes := proxy.Routes(strconv.Itoa(httpPort)); routes[host] == nil {
				t.Errorf("the route of port %d has hosts %v, want %s", httpPort, slices.Sorted(maps.Keys(routes)), host)
			}

			// The name leads to an address, and there is the listener of the
			// service's other protocol.
			resolves := func(network netip.Prefix) {
				t.Helper()
				testenv.Eventually(t, testenv.Patience, fmt.Sprintf("the name to have an address of %s", network), func() (string, bool) {
					ips, listeners := proxy.Names()[host], proxy.TCPListeners(tcpPort)
					seen := fmt.Sprintf("addresses %v, listeners %v", ips, listeners)
					if len(ips) != 1 {
						return seen, false
					}
					ip, err := netip.ParseAddr(ips[0])
					at := net.JoinHostPort(ips[0], strconv.Itoa(tcpPort))
					return seen, err == nil && network.Contains(ip) && slices.Equal(listeners[at], []string{testistiod.OutboundCluster(host, tcpPort)})
				})
			}
			resolves(before)
			bridge.Configure(t, config(after))
			resolves(after)
		})
	}
}
