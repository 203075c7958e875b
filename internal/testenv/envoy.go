package testenv

import (
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"strings"
	"testing"
)

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
func StartEnvoy(t testing.TB, i *Istiod) *Envoy {
	t.Helper()
	e := &Envoy{client: &http.Client{Timeout: callTime, Transport: &http.Transport{}}}
	t.Cleanup(e.client.CloseIdleConnections)
	binary := EnvoyTool.fetch(t)
	p := newProcess(t, "envoy")
	p.startReady(t, func() {
		e.Addr, e.Admin = loopback(FreePort(t)), loopback(FreePort(t))
		config := p.writeFile(t, "envoy.json", envoyBootstrap(t, e.Addr, e.Admin, i.GRPC))
		p.start(t, nil, binary, "-c", config, "--disable-hot-restart", "--log-level", "warning", "--concurrency", "1")
	}, func() (string, bool) {
		body, code, err := httpGet(t, e.client, "http://"+e.Admin+"/ready")
		return fmt.Sprintf("/ready: status %d %s, error %v", code, strings.TrimSpace(string(body)), err), code == http.StatusOK
	})
	return e
}

func envoyBootstrap(t testing.TB, addr, admin, istiod string) string {
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
	b, err := json.Marshal(object{
		"node": object{
			"id": "sidecar~127.0.0.2~envoy.default~default.svc.cluster.local", "cluster": "envoy.default",
			"metadata": object{"NAMESPACE": "default", "ISTIO_VERSION": "1.24.0", "CLUSTER_ID": "Kubernetes"},
		},
		"admin": object{"address": address(admin)},
		"dynamic_resources": object{
			"ads_config": object{
				"api_type": "GRPC", "transport_api_version": "V3",
				"grpc_services": list{object{"envoy_grpc": object{"cluster_name": "istiod"}}},
			},
			"cds_config": object{"ads": object{}, "resource_api_version": "V3"},
		},
		"static_resources": object{"listeners": list{listener}, "clusters": list{control}},
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
	Eventually(t, Patience, clusterName+" to have the policy "+policy, func() (string, bool) {
		body, code, err := httpGet(t, e.client, "http://"+e.Admin+"/config_dump?resource=dynamic_active_clusters")
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
