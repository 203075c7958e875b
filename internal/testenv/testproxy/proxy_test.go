package testproxy

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/isthmus-mesh/isthmus/internal/testenv"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testistiod"
)

func TestIstiodServesProxiesFromFolder(t *testing.T) {
	testenv.SkipIfShort(t)
	for _, version := range testistiod.Versions() {
		t.Run(version.Name, func(t *testing.T) {
			web, web2 := StartHTTPBackend(t, "web-1"), StartHTTPBackend(t, "web-2")
			rpc := StartGRPCBackend(t, "rpc-1")
			dir := t.TempDir()
			// istiod 1.21 does not see a second endpoint on an address that it
			// knows, unless something of the entry changes with it, such as a
			// label.
			blind := version.Name == testistiod.V121.Name
			entry := func(name string, protocol string, port int, backends ...Backend) string {
				generation := 0
				if blind {
					generation = len(backends)
				}
				s := fmt.Sprintf(`apiVersion: networking.istio.io/v1alpha3
kind: ServiceEntry
metadata: {name: %s, namespace: consul, labels: {generation: "%d"}}
spec:
  hosts: [%s.service.consul]
  addresses: [240.0.0.%d]
  location: MESH_INTERNAL
  resolution: STATIC
  ports: [{number: %d, name: %s, protocol: %s}]
  endpoints:
`, name, generation, name, port%200+1, port, protocol, protocol)
				for _, b := range backends {
					s += fmt.Sprintf("  - {address: %s, ports: {%s: %d}}\n", b.Address, protocol, b.Port)
				}
				return s
			}
			write := func(name, content string) {
				tmp := filepath.Join(t.TempDir(), name)
				if err := os.WriteFile(tmp, []byte(content), 0o600); err != nil {
					t.Fatal(err)
				}
				if err := os.Rename(tmp, filepath.Join(dir, name)); err != nil {
					t.Fatal(err)
				}
			}
			write("web.yaml", entry("web", "http", 80, web))
			write("rpc.yaml", entry("rpc", "grpc", 90, rpc))

			istiod := testistiod.Start(t, version, "fs://"+dir)
			istiod.WaitReady(t)
			waitHosts(t, istiod, 2)
			if got := istiod.Configz(t); len(got) != 2 || got["ServiceEntry consul/web"].Kind == "" {
				t.Errorf("configz %v", got)
			}
			if got := istiod.EndpointShards(t)["web.service.consul"]; len(got) != 1 || got[0] != web.Addr() {
				t.Errorf("endpointShardz of web %v, want %s", got, web.Addr())
			}
			recorder := testistiod.StartRecorder(t, istiod)
			recorder.WaitEndpoints(t, webCluster, web.Addr())
			recorder.WaitSubscribed(t)
			envoy := StartEnvoy(t, istiod)
			envoy.WaitReaches(t, webCluster, "web-1")

			// A push of istiod's start may still be on its way: it tells that
			// it is ready before its debounce is over. It cannot come again.
			var before, after testistiod.Pushes
			for range 4 {
				before = istiod.PushCounts(t)
				write("web.yaml", entry("web", "http", 80, web, web2))
				recorder.WaitEndpoints(t, webCluster, web.Addr(), web2.Addr())
				envoy.WaitReaches(t, webCluster, "web-1", "web-2")
				after = istiod.PushCounts(t)
				if blind || after.Full() == before.Full() {
					break
				}
				write("web.yaml", entry("web", "http", 80, web))
				recorder.WaitEndpoints(t, webCluster, web.Addr())
			}
			if full := after.Full() != before.Full(); after["eds"] <= before["eds"] || full != blind {
				t.Errorf("an endpoint more: pushes went from %v to %v, want more eds; and anything else: %v", before, after, blind)
			}

			if err := os.Remove(filepath.Join(dir, "web.yaml")); err != nil {
				t.Fatal(err)
			}
			recorder.WaitNoCluster(t, webCluster)
			testenv.Eventually(t, testenv.Patience, "a full push counted as a host is gone", func() (string, bool) { // counted after it is sent
				now := istiod.PushCounts(t)
				return now.String(), now.Full() > after.Full()
			})

			NewProxyless(t, istiod, "rpc.service.consul", 90).WaitReaches(t, "rpc-1")

			istiod.Kill()
			istiod.Restart(t)
			istiod.WaitReady(t)
			waitHosts(t, istiod, 1)
		})
	}
}

const webCluster = "outbound|80||web.service.consul"

func waitHosts(t *testing.T, istiod *testistiod.Server, want int) {
	t.Helper()
	testenv.Eventually(t, testenv.Patience, "the hosts of the folder", func() (string, bool) {
		hosts := istiod.Hosts(t)
		return fmt.Sprint(hosts), len(hosts) == want
	})
}
