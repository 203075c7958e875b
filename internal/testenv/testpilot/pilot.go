// Package testpilot runs sinks of the legacy protocol for tests: Pilot 1.8, and
// programs made of its own sink and source libraries.
//
// They are built from the module pinned in tools/pilot-1.8 (three minutes,
// once). Start runs Pilot without Kubernetes; it is ready when every collection
// was answered, a second or two.
package testpilot

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/isthmus-mesh/isthmus/internal/testenv"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testistiod"
	"github.com/isthmus-mesh/isthmus/internal/testwait"
)

// Tools of Istio 1.8.0.
var (
	// Tool is Pilot 1.8.0, the last version that supports the legacy Mesh
	// Configuration Protocol.
	Tool = testenv.GoTool("pilot-1.8", "pilot-discovery", "istio.io/istio", "istio.io/istio/pilot/cmd/pilot-discovery")
	// LegacyTool is tools/pilot-1.8/cmd/legacy: sinks and a source built with
	// the libraries of Istio 1.8.0.
	LegacyTool = testenv.OwnTool("pilot-1.8-legacy", "legacy", "./cmd/legacy", "tools", "pilot-1.8")
)

// Server is a running Pilot 1.8.0 without a cluster, configured over the legacy
// Mesh Configuration Protocol.
type Server struct {
	// GRPC is the xDS address for proxies.
	GRPC string
	testistiod.Pages

	*testenv.Process
	binary  string
	options Options
	sources []string
}

// Options configure a Pilot. The zero value works.
type Options struct {
	// Incremental permits incremental responses.
	Incremental bool
	// LogMCP logs stream events (scope mcp). If a source refuses connections
	// these are tens of thousands of lines per second.
	LogMCP bool
	// Settings are fields of each configSource besides its address, such as
	// "tlsSettings: {...}".
	Settings string
}

// Start starts Pilot with sources as its configSources. It does not wait
// until Pilot is ready, see WaitReady: until then none of its ports is open.
func Start(t testing.TB, o Options, sources ...string) *Server {
	t.Helper()
	p := &Server{binary: Tool.Binary(t), options: o, sources: sources}
	p.Process = testenv.NewServer(t, "pilot-1.8.0", p.launch, func() (string, bool) {
		// It opens its ports once it has its configuration.
		return `no line "Starting ADS server" in its output`, strings.Contains(p.Log(), "Starting ADS server")
	})
	p.Serve(t, func(t testing.TB) {
		p.GRPC, p.HTTP, p.Monitoring = testenv.Loopback(testenv.FreePort(t)), testenv.Loopback(testenv.FreePort(t)), testenv.Loopback(testenv.FreePort(t))
	})
	return p
}

func (p *Server) launch(t testing.TB) {
	t.Helper()
	sources := ""
	for _, s := range p.sources {
		sources += fmt.Sprintf("- {address: %q, %s}\n", s, p.options.Settings)
	}
	mesh := p.Process.WriteFile(t, "mesh.yaml", fmt.Sprintf(`configSources:
%sdefaultConfig: {discoveryAddress: %q}
trustDomain: cluster.local
rootNamespace: istio-system
enableAutoMtls: false
`, sources, p.GRPC))
	level := "default:info,mcp:none"
	if p.options.LogMCP {
		level = "default:info"
	}
	env := append(os.Environ(),
		"POD_NAME=pilot-0", "POD_NAMESPACE=istio-system", "ENABLE_CA_SERVER=false", "ISTIOD_ADDR="+p.GRPC, "PILOT_CERT_PROVIDER=",
		"INJECT_ENABLED=false", // 1.8.0 asks Kubernetes for its templates without having a client
		fmt.Sprintf("PILOT_ENABLE_INCREMENTAL_MCP=%v", p.options.Incremental),
		// No debouncing, so that pushes correspond to changes.
		"PILOT_DEBOUNCE_AFTER=10ms",
	)
	p.Process.Start(t, env, p.binary, "discovery", "--meshConfig", mesh, "--registries=", "--networksConfig", "/nonexistent",
		"--grpcAddr", p.GRPC, "--secureGRPCAddr", "", "--httpAddr", p.HTTP, "--httpsAddr", "", "--monitoringAddr", p.Monitoring,
		"--ctrlz_address", "127.0.0.1", "--ctrlz_port", "0", "--log_output_level", level)
}

// Ready reports whether Pilot has all collections and serves proxies.
func (p *Server) Ready() bool {
	_, ok := testenv.Answers("http://" + p.HTTP + "/ready")
	return ok
}

// WaitReady waits until Pilot is ready.
func (p *Server) WaitReady(t testing.TB) {
	t.Helper()
	p.Process.Await(t, func() (string, bool) { return "/ready is not 200", p.Ready() })
}

// Attempts returns how often Pilot has tried to open a stream to a source since
// its start. It requires LogMCP.
func (p *Server) Attempts() int {
	return strings.Count(p.Log(), "(re)trying to establish new MCP sink stream")
}

// Updates counts updates from Pilot's registries, by kind (metric
// pilot_inbound_updates). "svc" and "svcdelete" are changes of services, "eds"
// of endpoints. 1.8 counts each of them as "config" as well.
type Updates map[string]int

// Sub returns u - o without zeros.
func (u Updates) Sub(o Updates) Updates {
	d := Updates{}
	for kind, n := range u {
		if n -= o[kind]; n != 0 {
			d[kind] = n
		}
	}
	return d
}

// Updates returns Pilot's counts.
func (p *Server) Updates(t testing.TB) Updates {
	t.Helper()
	return testenv.ByLabel(p.Metrics(t)["pilot_inbound_updates"], "type")
}

// FullPushes returns the number of full pushes since Pilot's start.
func (p *Server) FullPushes() int { return strings.Count(p.Log(), ", full=true") }

// Ports returns the ports of Pilot's services, by host (debug page registryz).
func (p *Server) Ports(t testing.TB) map[string][]int {
	t.Helper()
	var services []struct {
		Hostname string `json:"hostname"`
		Ports    []struct {
			Port int `json:"port"`
		} `json:"ports"`
	}
	testenv.JSON(t, "http://"+p.HTTP+"/debug/registryz", &services)
	out := map[string][]int{}
	for _, s := range services {
		for _, port := range s.Ports {
			out[s.Hostname] = append(out[s.Hostname], port.Port)
		}
	}
	return out
}

// Legacy is a running peer built with the libraries of Istio 1.8.0.
type Legacy struct {
	t     testing.TB
	cmd   *exec.Cmd
	lines chan []byte

	mu sync.Mutex
	in io.WriteCloser // guarded by mu
}

// StartLegacy starts the peer: args begin with "sink" or "source". The test's
// end stops it.
func StartLegacy(t testing.TB, args ...string) *Legacy {
	t.Helper()
	return StartPeer(t, LegacyTool.Binary(t), args...)
}

// StartPeer starts a program that reads commands from standard input and
// answers each with a line of JSON, as LegacyTool does.
func StartPeer(t testing.TB, binary string, args ...string) *Legacy {
	t.Helper()
	log, err := os.Create(testenv.UniquePath(t, filepath.Base(binary)))
	if err != nil {
		t.Fatal(err)
	}
	defer log.Close() // the child has its own descriptor
	l := &Legacy{t: t, cmd: exec.Command(binary, args...), lines: make(chan []byte, 100_000)}
	l.cmd.Stderr = log
	testenv.OwnGroup(l.cmd)
	if l.in, err = l.cmd.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	out, err := l.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := testenv.StartCommand(l.cmd); err != nil {
		t.Fatalf("%s: start: %v", binary, err)
	}
	// Owned by the peer; ends with the child's output, which ends with its
	// input.
	go func() {
		defer close(l.lines)
		lines := bufio.NewScanner(out)
		lines.Buffer(nil, 16<<20)
		for lines.Scan() {
			l.lines <- slices.Clone(lines.Bytes())
		}
	}()
	t.Cleanup(func() {
		l.Close()
		if t.Failed() {
			b, _ := os.ReadFile(log.Name())
			t.Logf("---- %s\n%s", strings.Join(l.cmd.Args, " "), b[max(0, len(b)-10_000):])
		}
	})
	return l
}

// Close stops the peer and waits for it.
func (l *Legacy) Close() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.in == nil {
		return
	}
	l.in.Close()
	l.in = nil
	for range l.lines { // until its output ends
	}
	if err := l.cmd.Wait(); err != nil {
		l.t.Errorf("%s: %v", strings.Join(l.cmd.Args, " "), err)
	}
}

// Send sends a command.
func (l *Legacy) Send(t testing.TB, command string) {
	t.Helper()
	l.mu.Lock()
	defer l.mu.Unlock()
	if _, err := io.WriteString(l.in, command+"\n"); err != nil {
		t.Fatalf("%s: %v", command, err)
	}
}

// Read decodes the peer's next line.
func (l *Legacy) Read(t testing.TB, into any) {
	t.Helper()
	line := testwait.Receive(t, testenv.Patience, "an answer of "+strings.Join(l.cmd.Args, " "), l.lines)
	if err := json.Unmarshal(line, into); err != nil { // an empty line is its end
		t.Fatalf("%v: %q", err, line)
	}
}

// Ask sends a command and decodes the answer.
func (l *Legacy) Ask(t testing.TB, command string, into any) {
	t.Helper()
	l.Send(t, command)
	l.Read(t, into)
}
