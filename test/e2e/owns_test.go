package e2e

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/isthmus-mesh/isthmus/internal/testenv"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testisthmus"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testistiod"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testproxy"
)

// What a registry says of others reaches istiod and a proxy behind it only
// where the configuration names it: a route of a host of the cluster, mutual
// TLS and locality by metadata, the address of a cloud's metadata service, an
// instance on loopback.
func TestOwnsReachesProxy(t *testing.T) {
	testenv.SkipIfShort(t)
	const cluster, shop, metadata = "payments.prod.svc.cluster.local", "shop.example.org", "metadata.example.org"
	for _, version := range testistiod.Versions() {
		t.Run(version.Name, func(t *testing.T) {
			dir := t.TempDir()
			write := func(name, text string) {
				t.Helper()
				path := filepath.Join(dir, name)
				if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
					t.Fatal(err)
				}
				if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			write("cluster/payments.yaml", `
services:
- {name: payments, ports: [{name: http, number: 80, protocol: http}], instances: [{address: 10.2.0.1}]}
`)
			write("files/istio.yaml", fmt.Sprintf(`
apiVersion: networking.istio.io/v1
kind: VirtualService
metadata: {name: payments, namespace: files}
spec: {hosts: [%s], http: [{route: [{destination: {host: %s}}]}]}
---
apiVersion: networking.istio.io/v1
kind: ServiceEntry
metadata: {name: metadata, namespace: files}
spec: {hosts: [%s], addresses: [169.254.169.254], ports: [{number: 8169, name: tcp, protocol: TCP}], resolution: STATIC, endpoints: [{address: 10.1.0.2}]}
`, cluster, shop, metadata))
			services := func(admin string) {
				_, port, _ := strings.Cut(admin, ":")
				write("files/services.yaml", fmt.Sprintf(`
services:
- name: shop
  ports: [{name: http, number: 80, protocol: http}]
  instances: [{address: 10.1.0.1, meta: {security.istio.io/tlsMode: disabled, istio-locality: us.us-1}}]
- name: admin
  ports: [{name: http, number: 80, protocol: http}]
  instances: [{id: admin, address: 127.0.0.1, port: %s}]
`, port))
			}
			services(":1")
			config := func(owns string) string {
				return fmt.Sprintf(`
- name: cluster
  type: file
  config: {path: %q}
  translate: {host: "{{.Name}}.prod.svc.cluster.local"}
  owns: {hosts: ["*.prod.svc.cluster.local"]}
- name: files
  type: file
  config: {path: %q}
  translate: {host: "{{.Name}}.example.org", service_account: shop}
  owns: %s
`, filepath.Join(dir, "cluster"), filepath.Join(dir, "files"), owns)
			}
			const named = `{collections: [networking.istio.io/*], hosts: ["*.example.org", ` + cluster + `], addresses: [10.1.0.0/16, 127.0.0.0/8, 169.254.169.254], labels: [security.istio.io/tlsMode, istio-locality]}`
			bridge := testisthmus.Start(t, config(named))
			bridge.WaitReady(t)
			istiod := testistiod.Start(t, version, bridge.Source())
			istiod.WaitReady(t)
			proxy := testistiod.StartRecorder(t, istiod)
			proxy.WaitSubscribed(t)
			envoy := testproxy.StartEnvoy(t, istiod)
			services(envoy.Admin)

			routes := func(to string) {
				t.Helper()
				testenv.Eventually(t, testenv.Patience, "the route of "+cluster+" to "+to, func() (string, bool) {
					got := proxy.Routes("80")[cluster]
					return fmt.Sprint(got), slices.Equal(got, []string{testistiod.OutboundCluster(to, 80)})
				})
			}
			instance := func(mode, locality string) {
				t.Helper()
				testenv.Eventually(t, testenv.Patience, "mode "+mode+" in "+locality, func() (string, bool) {
					got := istiod.Endpoints(t)[shop]
					return fmt.Sprint(got), slices.Equal(got, []testistiod.IstiodEndpoint{{Addr: "10.1.0.1:80", TLSMode: mode, Locality: locality}})
				})
			}
			admin := func(reached bool) {
				t.Helper()
				testenv.Eventually(t, testenv.Patience, fmt.Sprintf("its own admin port to be reached: %t", reached), func() (string, bool) {
					body, err := envoy.Call(t, testistiod.OutboundCluster("admin.example.org", 80))
					return fmt.Sprintf("%.200s, %v", body, err), strings.Contains(body, "config_dump") == reached && (reached || err != nil && strings.Contains(err.Error(), "no healthy upstream"))
				})
			}
			captured := func(want []string) {
				t.Helper()
				testenv.Eventually(t, testenv.Patience, fmt.Sprint("connections to the metadata service to go to ", want), func() (string, bool) {
					got := proxy.TCPListeners(8169)["169.254.169.254:8169"]
					return fmt.Sprint(got), slices.Equal(got, want)
				})
			}
			// What is named does what a registry without rules did.
			routes(shop)
			captured([]string{testistiod.OutboundCluster(metadata, 8169)})
			instance("disabled", "us/us-1")
			admin(true)

			bridge.Configure(t, config("{addresses: []}"))
			routes(cluster)
			captured(nil)
			instance("istio", "")
			admin(false)
		})
	}
}
