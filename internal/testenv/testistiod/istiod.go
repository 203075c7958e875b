package testistiod

import (
	"encoding/json"
	"fmt"
	"maps"
	"net"
	"net/http"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"

	dto "github.com/prometheus/client_model/go"
	"sigs.k8s.io/yaml"

	"github.com/isthmus-mesh/isthmus/internal/testenv"
)

// tags are of those that Istio's own releases are built with: they leave out
// generated checks that istiod does not call.
const tags = "-tags=disable_pgv"

var (
	// Tool121 is istiod 1.21.2.
	Tool121 = testenv.GoTool("istiod-1.21", "pilot-discovery", "istio.io/istio", "istio.io/istio/pilot/cmd/pilot-discovery", tags)
	// Tool124 is istiod 1.24.0.
	Tool124 = testenv.GoTool("istiod-1.24", "pilot-discovery", "istio.io/istio", "istio.io/istio/pilot/cmd/pilot-discovery", tags)
	// Tool126 is istiod 1.26.0, the first that dials with TLS.
	Tool126 = testenv.GoTool("istiod-1.26", "pilot-discovery", "istio.io/istio", "istio.io/istio/pilot/cmd/pilot-discovery", tags)
	// NewestTool is the newest istiod on the module proxy that builds
	// with this repository's version of Go.
	NewestTool = testenv.GoTool("istiod", "pilot-discovery", "istio.io/istio", "istio.io/istio/pilot/cmd/pilot-discovery", tags)
)

// Version is a version of istiod that tests run against.
type Version struct {
	// Name is used in names of tests.
	Name string
	tool testenv.Tool
	// needsKube reports that it requires a Kubernetes API server.
	needsKube bool
}

// The versions of istiod.
var (
	V121   = Version{Name: "istiod-1.21.2", tool: Tool121}
	V124   = Version{Name: "istiod-1.24.0", tool: Tool124}
	V126   = Version{Name: "istiod-1.26.0", tool: Tool126}
	Newest = Version{Name: "istiod-newest", tool: NewestTool, needsKube: true}
)

// Versions returns the versions that a test of every version runs
// against, oldest first: the newest, and if [testenv.Compat] the others.
func Versions() []Version {
	if testenv.Compat() {
		return []Version{V121, V124, V126}
	}
	return []Version{Newest}
}

// TLSVersions are those of [Versions] that dial with TLS if they
// are told to.
func TLSVersions() []Version {
	if testenv.Compat() {
		return []Version{V126}
	}
	return []Version{Newest}
}

// Server is a running istiod without a cluster.
type Server struct {
	// Version is its version.
	Version Version
	// GRPC is the xDS address for proxies, host:port, in plaintext.
	GRPC string
	// HTTP is the address of its debug pages, Monitoring that of its metrics.
	HTTP, Monitoring string

	*testenv.Process
	binary     string
	sources    []string // the configSources, in YAML
	mesh       string   // the mesh configuration, instead of sources
	env        []string // of the process, besides what all of them have
	kubeconfig string
	client     *http.Client
}

// Start starts istiod with the given configSources: "xds://HOST:PORT" or
// "fs:///FOLDER". It does not wait: istiod opens its ports after its sources
// have answered everything, see WaitReady. An xds source must listen already,
// or istiod exits.
func Start(t testing.TB, version Version, sources ...string) *Server {
	t.Helper()
	return startIstiod(t, Options{Version: version}, configSources(sources)...)
}

// Options are the options of [StartAs].
type Options struct {
	// Version is its version.
	Version Version
	// Mesh is its mesh configuration, in YAML. What every test needs is added.
	Mesh string
	// Env holds further environment variables.
	Env []string
	// Kubeconfig is the path to that of a cluster it belongs to, see
	// [Kube.Kubeconfig].
	Kubeconfig string
}

// StartAs is [Start] with options.
func StartAs(t testing.TB, o Options) *Server {
	t.Helper()
	return startIstiod(t, o)
}

// StartWith is [Start] of one source, with fields of the
// configSource besides its address, such as "tlsSettings: {mode: SIMPLE}".
func StartWith(t testing.TB, version Version, source, settings string) *Server {
	t.Helper()
	return startIstiod(t, Options{Version: version}, fmt.Sprintf("{address: %q, %s}", source, settings))
}

func configSources(addresses []string) (sources []string) {
	for _, a := range addresses {
		sources = append(sources, fmt.Sprintf("{address: %q}", a))
	}
	return sources
}

func startIstiod(t testing.TB, o Options, sources ...string) *Server {
	t.Helper()
	version := o.Version
	i := &Server{Version: version, binary: version.tool.Binary(t), sources: sources, mesh: o.Mesh, env: o.Env, client: &http.Client{Transport: &http.Transport{}}}
	t.Cleanup(i.client.CloseIdleConnections)
	i.Process = testenv.NewProcess(t, version.Name)
	switch {
	case o.Kubeconfig != "":
		i.kubeconfig = o.Kubeconfig
	case version.needsKube:
		i.kubeconfig = i.Process.WriteFile(t, "kubeconfig", startKubeStub(t))
	}
	i.assignPorts(t)
	i.launch(t)
	return i
}

func (i *Server) assignPorts(t testing.TB) {
	t.Helper()
	i.GRPC, i.HTTP, i.Monitoring = testenv.Loopback(testenv.FreePort(t)), testenv.Loopback(testenv.FreePort(t)), testenv.Loopback(testenv.FreePort(t))
}

func (i *Server) launch(t testing.TB) {
	t.Helper()
	config := map[string]any{}
	text := i.mesh
	if text == "" {
		text = fmt.Sprintf("configSources: [%s]", strings.Join(i.sources, ", "))
	}
	if err := yaml.Unmarshal([]byte(text), &config); err != nil {
		t.Fatalf("%s: its mesh configuration: %v", i.Version.Name, err)
	}
	proxies, _ := config["defaultConfig"].(map[string]any)
	if proxies == nil {
		proxies = map[string]any{}
	}
	proxies["discoveryAddress"] = i.GRPC
	config["defaultConfig"], config["trustDomain"], config["rootNamespace"], config["enableAutoMtls"] = proxies, "cluster.local", "istio-system", false
	file, err := yaml.Marshal(config)
	if err != nil {
		t.Fatal(err)
	}
	mesh := i.Process.WriteFile(t, "mesh.yaml", string(file))
	env := append(os.Environ(),
		"POD_NAME=istiod-test", "POD_NAMESPACE=istio-system", "REVISION=default",
		"ENABLE_CA_SERVER=false", "PILOT_CERT_PROVIDER=none",
		"PILOT_ENABLE_GATEWAY_API=false", "PILOT_ENABLE_ANALYSIS=false",
		"VALIDATION_WEBHOOK_CONFIG_NAME=", "INJECTION_WEBHOOK_CONFIG_NAME=",
		// A stock Envoy lacks this filter, and rejects clusters that name it.
		"PILOT_ENABLE_METADATA_EXCHANGE=false",
	)
	env = append(env, i.env...)
	args := []string{
		"discovery", "--meshConfig", mesh, "--networksConfig", os.DevNull,
		"--httpAddr", i.HTTP, "--grpcAddr", i.GRPC, "--secureGRPCAddr", "", "--httpsAddr", "",
		"--monitoringAddr", i.Monitoring, "--ctrlz_address", "127.0.0.1", "--ctrlz_port", "0",
	}
	if i.kubeconfig != "" {
		args = append(args, "--kubeconfig", i.kubeconfig)
	} else {
		args = append(args, "--registries", "")
	}
	i.Process.Start(t, env, i.binary, args...)
}

// Ready reports whether istiod serves proxies. Without Kubernetes istiod never
// reports it over HTTP, so Ready checks its output and its port.
func (i *Server) Ready() bool {
	if !strings.Contains(i.Process.Since(), "marking server ready") {
		return false
	}
	conn, err := net.Dial("tcp", i.GRPC)
	if err != nil {
		return false
	}
	conn.Close()
	return true
}

// WaitReady waits until istiod serves proxies.
func (i *Server) WaitReady(t testing.TB) {
	t.Helper()
	i.Process.StartReady(t, func() {
		select {
		case <-i.Process.Exited(): // it ended because a port was in use: start it on others
			i.assignPorts(t)
			i.launch(t)
		default: // running since StartIstiod
		}
	}, func() (string, bool) { return "no line \"marking server ready\" in its output", i.Ready() })
}

// MayEnd permits istiod to end by itself, as it does when its source refuses it
// at the start.
func (i *Server) MayEnd() {
	i.Process.MayEnd()
}

// Restart restarts istiod on the same ports, and does not wait.
func (i *Server) Restart(t testing.TB) {
	t.Helper()
	i.Process.Kill()
	i.launch(t)
}

// RestartWith restarts istiod on the same ports with other configSources, and
// waits until it serves proxies.
func (i *Server) RestartWith(t testing.TB, sources ...string) {
	t.Helper()
	i.sources = configSources(sources)
	i.Restart(t)
	i.WaitReady(t)
}

// Pushes counts istiod's pushes by kind: "cds", "eds", "lds", "rds".
type Pushes map[string]int

// Full returns the number of full pushes. A full push sends all kinds, an
// incremental one only eds.
func (p Pushes) Full() int {
	full := 0
	for kind, n := range p {
		if kind != "eds" {
			full += n
		}
	}
	return full
}

// String returns the pushes sorted by kind.
func (p Pushes) String() string {
	var b strings.Builder
	for _, kind := range slices.Sorted(maps.Keys(p)) {
		fmt.Fprintf(&b, "%s=%d ", kind, p[kind])
	}
	return strings.TrimSuffix(b.String(), " ")
}

// PushCounts returns the number of pushes to proxies since istiod's start
// (metric pilot_xds_pushes). A proxyless client gets every kind on every push,
// so there must be none where full pushes are counted.
func (i *Server) PushCounts(t testing.TB) Pushes {
	t.Helper()
	p := Pushes{}
	for _, m := range i.Metrics(t)["pilot_xds_pushes"].GetMetric() {
		for _, l := range m.GetLabel() {
			if l.GetName() == "type" {
				p[l.GetValue()] += int(m.GetCounter().GetValue())
			}
		}
	}
	return p
}

// Metrics returns all of istiod's metrics by name.
func (i *Server) Metrics(t testing.TB) map[string]*dto.MetricFamily {
	t.Helper()
	return testenv.ParseMetrics(t, i.Version.Name, i.get(t, "http://"+i.Monitoring+"/metrics"))
}

// Config is one resource in istiod.
type Config struct {
	Kind     string `json:"kind"`
	Metadata struct {
		Name            string `json:"name"`
		Namespace       string `json:"namespace"`
		ResourceVersion string `json:"resourceVersion"`
		Created         string `json:"creationTimestamp"`
	} `json:"metadata"`
	Spec json.RawMessage `json:"spec"`
}

// Configz returns istiod's resources from its source, by "Kind namespace/name".
func (i *Server) Configz(t testing.TB) map[string]Config {
	t.Helper()
	var list []Config
	i.debug(t, "configz", &list)
	m := map[string]Config{}
	for _, c := range list {
		m[c.Kind+" "+c.Metadata.Namespace+"/"+c.Metadata.Name] = c
	}
	return m
}

// IstiodEndpoint is an endpoint in istiod.
type IstiodEndpoint struct {
	// Addr is "IP:PORT".
	Addr    string
	TLSMode string
	// Locality is "region/zone/subzone".
	Locality string
}

// EndpointShards returns istiod's endpoint addresses by host, as "IP:PORT",
// sorted.
func (i *Server) EndpointShards(t testing.TB) map[string][]string {
	t.Helper()
	hosts := map[string][]string{}
	for host, all := range i.Endpoints(t) {
		for _, e := range all {
			hosts[host] = append(hosts[host], e.Addr)
		}
	}
	return hosts
}

// Endpoints returns istiod's endpoints by host, sorted by address.
func (i *Server) Endpoints(t testing.TB) map[string][]IstiodEndpoint {
	t.Helper()
	// host, namespace, then shards by cluster.
	var all map[string]map[string]struct {
		Shards map[string][]struct {
			Address      string // before 1.25
			Addresses    []string
			EndpointPort int
			TLSMode      string
			Locality     struct{ Label string }
		}
	}
	i.debug(t, "endpointShardz", &all)
	hosts := map[string][]IstiodEndpoint{}
	for host, namespaces := range all {
		for _, namespace := range namespaces {
			for _, shard := range namespace.Shards {
				for _, e := range shard {
					address := e.Address
					if len(e.Addresses) > 0 {
						address = e.Addresses[0]
					}
					hosts[host] = append(hosts[host], IstiodEndpoint{net.JoinHostPort(address, strconv.Itoa(e.EndpointPort)), e.TLSMode, e.Locality.Label})
				}
			}
		}
		slices.SortFunc(hosts[host], func(a, b IstiodEndpoint) int { return strings.Compare(a.Addr, b.Addr) })
	}
	return hosts
}

// Hosts returns the hosts of all services in istiod, sorted.
func (i *Server) Hosts(t testing.TB) []string {
	t.Helper()
	var services []struct {
		Hostname string `json:"hostname"`
	}
	i.debug(t, "registryz", &services)
	var hosts []string
	for _, s := range services {
		hosts = append(hosts, s.Hostname)
	}
	slices.Sort(hosts)
	return slices.Compact(hosts)
}

func (i *Server) debug(t testing.TB, page string, into any) {
	t.Helper()
	body := i.get(t, "http://"+i.HTTP+"/debug/"+page)
	if err := json.Unmarshal(body, into); err != nil {
		t.Fatalf("%s: parse /debug/%s: %v\n%.2000s", i.Version.Name, page, err, body)
	}
}

func (i *Server) get(t testing.TB, url string) []byte {
	t.Helper()
	body, code, err := testenv.HttpGet(t, i.client, url)
	if err != nil || code != http.StatusOK {
		t.Fatalf("%s: get %s: status %d, error %v: %.500s", i.Version.Name, url, code, err, body)
	}
	return body
}
