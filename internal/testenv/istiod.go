package testenv

import (
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"os"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
	"sigs.k8s.io/yaml"
)

// IstiodVersion is a version of istiod that tests run against.
type IstiodVersion struct {
	// Name is used in names of tests.
	Name string
	tool Tool
	// needsKube reports that it requires a Kubernetes API server.
	needsKube bool
}

// The versions of istiod.
var (
	Istiod121    = IstiodVersion{Name: "istiod-1.21.2", tool: Istiod121Tool}
	Istiod124    = IstiodVersion{Name: "istiod-1.24.0", tool: Istiod124Tool}
	Istiod126    = IstiodVersion{Name: "istiod-1.26.0", tool: Istiod126Tool}
	IstiodNewest = IstiodVersion{Name: "istiod-newest", tool: IstiodNewestTool, needsKube: true}
)

// IstiodVersions returns the versions that a test of every version runs
// against, oldest first: the two ends, or what is between them if [Compat].
func IstiodVersions() []IstiodVersion {
	if Compat() {
		return []IstiodVersion{Istiod124, Istiod126}
	}
	return []IstiodVersion{Istiod121, IstiodNewest}
}

// IstiodTLSVersions are those of [IstiodVersions] that dial with TLS if they
// are told to.
func IstiodTLSVersions() []IstiodVersion {
	if Compat() {
		return []IstiodVersion{Istiod126}
	}
	return []IstiodVersion{IstiodNewest}
}

// Istiod is a running istiod without a cluster.
type Istiod struct {
	// Version is its version.
	Version IstiodVersion
	// GRPC is the xDS address for proxies, host:port, in plaintext.
	GRPC string
	// HTTP is the address of its debug pages, Monitoring that of its metrics.
	HTTP, Monitoring string

	proc       *process
	binary     string
	sources    []string // the configSources, in YAML
	mesh       string   // the mesh configuration, instead of sources
	env        []string // of the process, besides what all of them have
	kubeconfig string
	client     *http.Client
}

// StartIstiod starts istiod with the given configSources: "xds://HOST:PORT" or
// "fs:///FOLDER". It does not wait: istiod opens its ports after its sources
// have answered everything, see WaitReady. An xds source must listen already,
// or istiod exits.
func StartIstiod(t testing.TB, version IstiodVersion, sources ...string) *Istiod {
	t.Helper()
	return startIstiod(t, IstiodOptions{Version: version}, configSources(sources)...)
}

// IstiodOptions are the options of [StartIstiodAs].
type IstiodOptions struct {
	// Version is its version.
	Version IstiodVersion
	// Mesh is its mesh configuration, in YAML. What every test needs is added.
	Mesh string
	// Env holds further environment variables.
	Env []string
	// Kubeconfig is the path to that of a cluster it belongs to, see
	// [Kube.Kubeconfig].
	Kubeconfig string
}

// StartIstiodAs is [StartIstiod] with options.
func StartIstiodAs(t testing.TB, o IstiodOptions) *Istiod {
	t.Helper()
	return startIstiod(t, o)
}

// StartIstiodWith is [StartIstiod] of one source, with fields of the
// configSource besides its address, such as "tlsSettings: {mode: SIMPLE}".
func StartIstiodWith(t testing.TB, version IstiodVersion, source, settings string) *Istiod {
	t.Helper()
	return startIstiod(t, IstiodOptions{Version: version}, fmt.Sprintf("{address: %q, %s}", source, settings))
}

// Pause stops istiod as SIGSTOP does: its connections stay and nothing is read.
func (i *Istiod) Pause() { i.proc.signal(syscall.SIGSTOP) }

// CPU returns the processor time of istiod since its start, on Linux; elsewhere
// it returns 0.
func (i *Istiod) CPU() time.Duration { return i.proc.cpu() }

// Continue ends a pause.
func (i *Istiod) Continue() { i.proc.signal(syscall.SIGCONT) }

func configSources(addresses []string) (sources []string) {
	for _, a := range addresses {
		sources = append(sources, fmt.Sprintf("{address: %q}", a))
	}
	return sources
}

func startIstiod(t testing.TB, o IstiodOptions, sources ...string) *Istiod {
	t.Helper()
	version := o.Version
	i := &Istiod{Version: version, binary: version.tool.fetch(t), sources: sources, mesh: o.Mesh, env: o.Env, client: &http.Client{Transport: &http.Transport{}}}
	t.Cleanup(i.client.CloseIdleConnections)
	i.proc = newProcess(t, version.Name)
	switch {
	case o.Kubeconfig != "":
		i.kubeconfig = o.Kubeconfig
	case version.needsKube:
		i.kubeconfig = i.proc.writeFile(t, "kubeconfig", startKubeStub(t))
	}
	i.assignPorts(t)
	i.launch(t)
	return i
}

func (i *Istiod) assignPorts(t testing.TB) {
	t.Helper()
	i.GRPC, i.HTTP, i.Monitoring = loopback(FreePort(t)), loopback(FreePort(t)), loopback(FreePort(t))
}

func (i *Istiod) launch(t testing.TB) {
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
	mesh := i.proc.writeFile(t, "mesh.yaml", string(file))
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
	i.proc.start(t, env, i.binary, args...)
}

// Ready reports whether istiod serves proxies. Without Kubernetes istiod never
// reports it over HTTP, so Ready checks its output and its port.
func (i *Istiod) Ready() bool {
	if !strings.Contains(i.proc.since(), "marking server ready") {
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
func (i *Istiod) WaitReady(t testing.TB) {
	t.Helper()
	i.proc.startReady(t, func() {
		select {
		case <-i.proc.exited(): // it ended because a port was in use: start it on others
			i.assignPorts(t)
			i.launch(t)
		default: // running since StartIstiod
		}
	}, func() (string, bool) { return "no line \"marking server ready\" in its output", i.Ready() })
}

// MayEnd permits istiod to end by itself, as it does when its source refuses it
// at the start.
func (i *Istiod) MayEnd() {
	i.proc.mu.Lock()
	defer i.proc.mu.Unlock()
	i.proc.run.ended = true
}

// Kill ends istiod as kill -9 does.
func (i *Istiod) Kill() { i.proc.kill() }

// Restart restarts istiod on the same ports, and does not wait.
func (i *Istiod) Restart(t testing.TB) {
	t.Helper()
	i.proc.kill()
	i.launch(t)
}

// RestartWith restarts istiod on the same ports with other configSources, and
// waits until it serves proxies.
func (i *Istiod) RestartWith(t testing.TB, sources ...string) {
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
func (i *Istiod) PushCounts(t testing.TB) Pushes {
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
func (i *Istiod) Metrics(t testing.TB) map[string]*dto.MetricFamily {
	t.Helper()
	return parseMetrics(t, i.Version.Name, i.get(t, "http://"+i.Monitoring+"/metrics"))
}

func parseMetrics(t testing.TB, name string, text []byte) map[string]*dto.MetricFamily {
	t.Helper()
	parser := expfmt.NewTextParser(model.UTF8Validation)
	families, err := parser.TextToMetricFamilies(strings.NewReader(string(text)))
	if err != nil {
		t.Fatalf("%s: parse its metrics: %v", name, err)
	}
	return families
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
func (i *Istiod) Configz(t testing.TB) map[string]Config {
	t.Helper()
	var list []Config
	i.debug(t, "configz", &list)
	m := map[string]Config{}
	for _, c := range list {
		m[c.Kind+" "+c.Metadata.Namespace+"/"+c.Metadata.Name] = c
	}
	return m
}

// EndpointShards returns istiod's endpoint addresses by host, as "IP:PORT",
// sorted.
func (i *Istiod) EndpointShards(t testing.TB) map[string][]string {
	t.Helper()
	// host, namespace, then shards by cluster.
	var all map[string]map[string]struct {
		Shards map[string][]struct {
			Address      string // before 1.25
			Addresses    []string
			EndpointPort int
		}
	}
	i.debug(t, "endpointShardz", &all)
	hosts := map[string][]string{}
	for host, namespaces := range all {
		for _, namespace := range namespaces {
			for _, shard := range namespace.Shards {
				for _, e := range shard {
					address := e.Address
					if len(e.Addresses) > 0 {
						address = e.Addresses[0]
					}
					hosts[host] = append(hosts[host], net.JoinHostPort(address, strconv.Itoa(e.EndpointPort)))
				}
			}
		}
		slices.Sort(hosts[host])
	}
	return hosts
}

// Hosts returns the hosts of all services in istiod, sorted.
func (i *Istiod) Hosts(t testing.TB) []string {
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

func (i *Istiod) debug(t testing.TB, page string, into any) {
	t.Helper()
	body := i.get(t, "http://"+i.HTTP+"/debug/"+page)
	if err := json.Unmarshal(body, into); err != nil {
		t.Fatalf("%s: parse /debug/%s: %v\n%.2000s", i.Version.Name, page, err, body)
	}
}

func (i *Istiod) get(t testing.TB, url string) []byte {
	t.Helper()
	body, code, err := httpGet(t, i.client, url)
	if err != nil || code != http.StatusOK {
		t.Fatalf("%s: get %s: status %d, error %v: %.500s", i.Version.Name, url, code, err, body)
	}
	return body
}

func httpGet(t testing.TB, client *http.Client, url string) (body []byte, code int, err error) {
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url, nil)
	if err != nil {
		return nil, 0, err
	}
	res, err := client.Do(req)
	if err != nil {
		return nil, 0, err
	}
	defer res.Body.Close()
	body, err = io.ReadAll(res.Body)
	return body, res.StatusCode, err
}
