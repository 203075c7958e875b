// Package testistiod runs istiods without a cluster, and records what they
// push.
//
// Each version is pilot-discovery, built from the module pinned in
// tools/istiod-VERSION (four minutes on two cores, once). Start runs one; it is
// ready in two to five seconds, once its config sources have answered
// everything. The newest needs an API server and gets a stub.
package testistiod

import (
	"fmt"
	"maps"
	"net"
	"os"
	"slices"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"

	"github.com/isthmus-mesh/isthmus/internal/testenv"
)

// Version is a version of istiod that tests run against.
type Version struct {
	// Name is used in names of tests.
	Name string
	Tool testenv.Tool
	// needsKube reports that it requires a Kubernetes API server.
	needsKube bool
}

// The versions of istiod: 1.26 is the first that dials with TLS, Newest the
// newest on the module proxy that builds with this repository's version of Go.
var (
	V121   = Version{Name: "istiod-1.21.2", Tool: tool("istiod-1.21")}
	V124   = Version{Name: "istiod-1.24.0", Tool: tool("istiod-1.24")}
	V126   = Version{Name: "istiod-1.26.0", Tool: tool("istiod-1.26")}
	Newest = Version{Name: "istiod-newest", Tool: tool("istiod"), needsKube: true}
)

// tool has a tag of those that Istio's own releases are built with: it leaves
// out generated checks that istiod does not call.
func tool(folder string) testenv.Tool {
	return testenv.GoTool(folder, "pilot-discovery", "istio.io/istio", "istio.io/istio/pilot/cmd/pilot-discovery", "-tags=disable_pgv")
}

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
	Pages

	*testenv.Process
	binary  string
	options Options
}

// Start starts istiod with the given configSources: "xds://HOST:PORT" or
// "fs:///FOLDER". It does not wait: istiod opens its ports after its sources
// have answered everything, see WaitReady. An xds source must listen already,
// or istiod exits.
func Start(t testing.TB, version Version, sources ...string) *Server {
	t.Helper()
	return StartAs(t, Options{Version: version, Mesh: configSources(sources)})
}

// StartWith is [Start] of one source, with fields of the
// configSource besides its address, such as "tlsSettings: {mode: SIMPLE}".
func StartWith(t testing.TB, version Version, source, settings string) *Server {
	t.Helper()
	return StartAs(t, Options{Version: version, Mesh: fmt.Sprintf("configSources: [{address: %q, %s}]", source, settings)})
}

func configSources(addresses []string) (mesh string) {
	mesh = "configSources:\n"
	for _, a := range addresses {
		mesh += fmt.Sprintf("- {address: %q}\n", a)
	}
	return mesh
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
	i := &Server{Version: o.Version, binary: o.Version.Tool.Binary(t), options: o}
	i.Process = testenv.NewServer(t, o.Version.Name, i.launch, i.serves)
	if o.Kubeconfig == "" && o.Version.needsKube {
		i.options.Kubeconfig = i.Process.WriteFile(t, "kubeconfig", startKubeStub(t))
	}
	i.assignPorts(t)
	i.Launch(t)
	return i
}

func (i *Server) assignPorts(t testing.TB) {
	t.Helper()
	i.GRPC, i.HTTP, i.Monitoring = testenv.Loopback(testenv.FreePort(t)), testenv.Loopback(testenv.FreePort(t)), testenv.Loopback(testenv.FreePort(t))
}

func (i *Server) launch(t testing.TB) {
	t.Helper()
	config := map[string]any{}
	if err := yaml.Unmarshal([]byte(i.options.Mesh), &config); err != nil {
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
	args := []string{
		"discovery", "--meshConfig", mesh, "--networksConfig", os.DevNull,
		"--httpAddr", i.HTTP, "--grpcAddr", i.GRPC, "--secureGRPCAddr", "", "--httpsAddr", "",
		"--monitoringAddr", i.Monitoring, "--ctrlz_address", "127.0.0.1", "--ctrlz_port", "0",
	}
	if i.options.Kubeconfig != "" {
		args = append(args, "--kubeconfig", i.options.Kubeconfig)
	} else {
		args = append(args, "--registries", "")
	}
	i.Process.Start(t, append(env, i.options.Env...), i.binary, args...)
}

// Ready reports whether istiod serves proxies. Without Kubernetes istiod never
// reports it over HTTP, so Ready checks its output and its port.
func (i *Server) Ready() bool {
	_, ok := i.serves()
	return ok
}

func (i *Server) serves() (seen string, ok bool) {
	if !strings.Contains(i.Log(), "marking server ready") {
		return `no line "marking server ready" in its output`, false
	}
	conn, err := net.Dial("tcp", i.GRPC)
	if err == nil {
		conn.Close()
	}
	return fmt.Sprint(err), err == nil
}

// WaitReady waits until istiod serves proxies.
func (i *Server) WaitReady(t testing.TB) {
	t.Helper()
	i.Process.StartReady(t, func() {
		select {
		case <-i.Process.Exited(): // it ended because a port was in use: start it on others
			i.assignPorts(t)
			i.launch(t)
		default: // running since StartAs
		}
	}, i.serves)
}

// RestartWith restarts istiod on the same ports with other configSources, and
// waits until it serves proxies.
func (i *Server) RestartWith(t testing.TB, sources ...string) {
	t.Helper()
	i.options.Mesh = configSources(sources)
	i.Restart(t)
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
	return testenv.ByLabel(i.Metrics(t)["pilot_xds_pushes"], "type")
}
