// Package testisthmus runs the program of this repository for tests.
//
// The program is built from the working tree, with the race detector if the
// test has it, and kept in the cache until a source changes. Start runs
// `isthmus serve` with a configuration of the test's registries, and waits for
// its ports: a fraction of a second.
package testisthmus

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	dto "github.com/prometheus/client_model/go"
	"sigs.k8s.io/yaml"

	"github.com/isthmus-mesh/isthmus/internal/testenv"
	"github.com/isthmus-mesh/isthmus/internal/testwait"
)

// buildTime bounds a build of the program without cache, with the race
// detector.
const buildTime = 15 * time.Minute

var build = sync.OnceValues(buildIsthmus)

// Binary returns the path of the program, built from the working copy once per
// test process. If the test has the race detector, so does the program; a race
// has a distinct exit status.
func Binary(t testing.TB) string {
	t.Helper()
	path, err := build()
	if err != nil {
		t.Fatalf("build ./cmd/isthmus: %v", err)
	}
	return path
}

// buildIsthmus caches the program in a folder per working copy, so that builds
// are incremental.
func buildIsthmus() (string, error) {
	root, err := testenv.Root()
	if err != nil {
		return "", err
	}
	cache, err := testenv.CacheDir()
	if err != nil {
		return "", err
	}
	name := "isthmus"
	args := []string{"build"}
	if testwait.Raced() {
		name = "isthmus-race"
		args = append(args, "-race")
	}
	path := filepath.Join(cache, "build", fmt.Sprintf("%x", sha256.Sum256([]byte(root)))[:12], name)
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return "", err
	}
	ctx, cancel := context.WithTimeout(context.Background(), buildTime)
	defer cancel()
	unlock, err := testenv.LockFile(ctx, path+".lock", func() {})
	if err != nil {
		return "", fmt.Errorf("wait for another build: %w", err)
	}
	defer unlock()
	cmd := exec.CommandContext(ctx, "go", append(args, "-o", path, "./cmd/isthmus")...)
	cmd.Dir = root
	if err := testenv.RunQuiet(cmd); err != nil {
		return "", err
	}
	return path, nil
}

// Server is a running `isthmus serve`.
type Server struct {
	// XDS is the address of its xDS server, Admin that of its admin API.
	// Restarts keep them.
	XDS, Admin string
	// Views are the addresses of the xDS servers of views, see StartWithViews.
	Views []string

	*testenv.Process
	binary     string
	registries string
	security   string   // fields of the xDS listener's block
	views      []string // of further xDS listeners
}

// Start starts the program with registries, the YAML list under that key
// of the configuration, and waits until its admin API answers. It does not wait
// for the registries, see WaitReady. One without owns.addresses may have
// instances on loopback, too.
func Start(t testing.TB, registries string) *Server {
	return StartSecure(t, registries, "")
}

// StartSecure is [Start] with fields of the xDS listener's block
// besides its address, such as "tls: {...}".
func StartSecure(t testing.TB, registries, security string) *Server {
	t.Helper()
	return start(t, &Server{registries: registries, security: security})
}

// StartWithViews is [Start] with further xDS listeners, each of which serves a
// view such as "{registries: [dc1]}".
func StartWithViews(t testing.TB, registries string, views ...string) *Server {
	t.Helper()
	return start(t, &Server{registries: registries, views: views})
}

func start(t testing.TB, i *Server) *Server {
	t.Helper()
	i.binary = Binary(t)
	i.Process = testenv.NewServer(t, "isthmus", i.launch, func() (string, bool) { return testenv.Answers(i.page("/healthz")) })
	i.Serve(t, func(t testing.TB) {
		i.XDS, i.Admin, i.Views = testenv.Loopback(testenv.FreePort(t)), testenv.Loopback(testenv.FreePort(t)), nil
		for range i.views {
			i.Views = append(i.Views, testenv.Loopback(testenv.FreePort(t)))
		}
	})
	return i
}

func (i *Server) launch(t testing.TB) {
	t.Helper()
	config := i.writeConfig(t, "isthmus.yaml")
	i.Process.Start(t, append(os.Environ(), "XDG_STATE_HOME="+filepath.Join(filepath.Dir(config), "state")), i.binary, "serve", "--config", config)
}

// writeConfig writes the configuration to a file in the process's directory.
func (i *Server) writeConfig(t testing.TB, name string) string {
	t.Helper()
	listeners := fmt.Sprintf("{address: %q", i.XDS)
	if i.security != "" {
		listeners += ", " + i.security
	}
	listeners += "}"
	for n, view := range i.views {
		listeners += fmt.Sprintf(", {address: %q, view: %s}", i.Views[n], view)
	}
	return i.Process.WriteFile(t, name, fmt.Sprintf("listen: {xds: [%s], admin: {address: %q, allow: [{peer: {cidr: 127.0.0.0/8}}]}}\nlog: {level: debug}\n%s\n",
		listeners, i.Admin, owned(t, i.registries)))
}

// owned returns the part of a configuration that begins with registries, which
// may have instances on this machine as well as anywhere, unless they say where
// they have them.
func owned(t testing.TB, registries string) string {
	t.Helper()
	text := "registries:\n" + registries
	var part struct {
		Registries []map[string]any `json:"registries"`
	}
	var whole map[string]any
	if yaml.Unmarshal([]byte(text), &part) != nil || yaml.Unmarshal([]byte(text), &whole) != nil {
		return text // for the program to report
	}
	for _, r := range part.Registries {
		owns, _ := r["owns"].(map[string]any)
		if owns == nil {
			owns = map[string]any{}
		}
		if owns["addresses"] == nil {
			owns["addresses"] = []string{"0.0.0.0/0", "::/0", "127.0.0.0/8", "::1"}
		}
		r["owns"] = owns
	}
	whole["registries"] = part.Registries
	out, err := yaml.Marshal(whole)
	if err != nil {
		t.Fatal(err)
	}
	return string(out)
}

// Secure replaces the fields of the xDS listener's block. The program reloads
// them.
func (i *Server) Secure(t testing.TB, security string) {
	t.Helper()
	i.security = security
	i.Configure(t, i.registries)
}

// Configure replaces the configuration file. The program reloads it.
func (i *Server) Configure(t testing.TB, registries string) {
	t.Helper()
	i.registries = registries
	next := i.writeConfig(t, "isthmus.yaml.new")
	if err := os.Rename(next, strings.TrimSuffix(next, ".new")); err != nil {
		t.Fatal(err)
	}
}

// page returns the URL of a page of the admin listener.
func (i *Server) page(path string) string { return "http://" + i.Admin + path }

// Source returns the program's URL for istiod's configSource.
func (i *Server) Source() string { return "xds://" + i.XDS }

// WaitReady waits until every registry has sent its first full listing
// (/readyz).
func (i *Server) WaitReady(t testing.TB) {
	t.Helper()
	i.Process.Await(t, func() (string, bool) { return testenv.Answers(i.page("/readyz")) })
}

// Kill9 kills the program as kill -9 does, without its plugins, which must
// detect it.
func (i *Server) Kill9() { i.Process.KillAlone() }

// Stop terminates the program, and fails the test if it does not exit cleanly
// in time.
func (i *Server) Stop(t testing.TB) {
	t.Helper()
	if err := i.Process.Terminate(); err != nil {
		t.Errorf("isthmus ended by SIGTERM: %v", err)
	}
}

// Registry is the admin API's state of a registry, as far as tests need
// it.
type Registry struct {
	Name      string `json:"name"`
	Phase     string `json:"phase"`
	LastError string `json:"last_error"`
	PID       int    `json:"pid"`
	Services  int    `json:"services"`
	Instances int    `json:"instances"`
	// Protection describes the paused removals, nil for none.
	Protection *Protection `json:"protection"`
}

// Protection describes a registry's paused removals.
type Protection struct {
	Pending   bool `json:"pending"`
	Services  int  `json:"services"`
	Of        int  `json:"of"`
	Endpoints int  `json:"endpoints"`
}

// Registry returns the admin API's state of one registry.
func (i *Server) Registry(t testing.TB, name string) Registry {
	t.Helper()
	var all struct {
		Items []Registry `json:"items"`
	}
	testenv.JSON(t, i.page("/api/v1/registries"), &all)
	for _, r := range all.Items {
		if r.Name == name {
			return r
		}
	}
	t.Fatalf("isthmus: the admin API has no registry %q but %+v", name, all.Items)
	return Registry{}
}

// WaitPhase waits until the registry is in one of the phases.
func (i *Server) WaitPhase(t testing.TB, name string, phases ...string) {
	t.Helper()
	testenv.Eventually(t, testenv.Patience, fmt.Sprintf("registry %s to be %s", name, strings.Join(phases, " or ")), func() (string, bool) {
		r := i.Registry(t, name)
		return fmt.Sprintf("%+v", r), slices.Contains(phases, r.Phase)
	})
}

// Sink is the admin API's state of a connected sink, as far as tests
// need it.
type Sink struct {
	Node          string         `json:"node"`
	Protocol      string         `json:"protocol"`
	Profile       string         `json:"profile"`
	Subscriptions []Subscription `json:"subscriptions"`
}

// Subscription is a sink's subscription to one type.
type Subscription struct {
	TypeURL string `json:"type_url"`
	// State is "waiting", "sent" or "current".
	State string `json:"state"`
}

// Subscription returns the subscription to a kind of resource, such as
// "ServiceEntry".
func (s Sink) Subscription(kind string) (Subscription, bool) {
	for _, sub := range s.Subscriptions {
		if strings.HasSuffix(sub.TypeURL, "/"+kind) {
			return sub, true
		}
	}
	return Subscription{}, false
}

// Sinks returns the admin API's state of the connected sinks.
func (i *Server) Sinks(t testing.TB) []Sink {
	t.Helper()
	var all struct {
		Items []Sink `json:"items"`
	}
	testenv.JSON(t, i.page("/api/v1/sinks"), &all)
	return all.Items
}

// WaitSink waits until the only sink's subscription to a kind of resource is in
// the state.
func (i *Server) WaitSink(t testing.TB, kind, state string) {
	t.Helper()
	testenv.Eventually(t, testenv.Patience, fmt.Sprintf("one sink, its %s %s", kind, state), func() (string, bool) {
		sinks := i.Sinks(t)
		if len(sinks) != 1 {
			return fmt.Sprintf("%d sinks: %+v", len(sinks), sinks), false
		}
		sub, ok := sinks[0].Subscription(kind)
		return fmt.Sprintf("%+v", sinks[0]), ok && sub.State == state
	})
}

// Endpoints returns the number of endpoints of each served service, by the name
// of its ServiceEntry.
func (i *Server) Endpoints(t testing.TB) map[string]int {
	t.Helper()
	var all struct {
		Items []struct {
			Name      string `json:"name"`
			Endpoints int    `json:"endpoints"`
		} `json:"items"`
	}
	testenv.JSON(t, i.page("/api/v1/services?limit=1000"), &all)
	out := make(map[string]int)
	for _, s := range all.Items {
		out[s.Name] = s.Endpoints
	}
	return out
}

// Run runs a command of the program and returns its output. The test ends if it
// does not succeed.
func (i *Server) Run(t testing.TB, args ...string) string {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), i.binary, args...)
	var stderr strings.Builder
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("isthmus %s: %v: %s%s", strings.Join(args, " "), err, out, stderr.String())
	}
	return string(out)
}

// Decide runs `isthmus removals VERB`, and returns its output.
func (i *Server) Decide(t testing.TB, verb, registry string) string {
	t.Helper()
	return i.Run(t, "removals", verb, registry, "--address", i.Admin)
}

// Doctor runs `isthmus doctor` with the program's configuration, and returns
// its findings by check. Those that are notes begin with note.
func (i *Server) Doctor(t testing.TB, args ...string) map[string]string {
	t.Helper()
	return doctor(t, append(args, "--config", i.writeConfig(t, "doctor.yaml"))...)
}

// DoctorOf runs `isthmus doctor` with registries, without a bridge that runs.
func DoctorOf(t testing.TB, registries string) map[string]string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "isthmus.yaml")
	if err := os.WriteFile(file, []byte("registries:\n"+registries), 0o600); err != nil {
		t.Fatal(err)
	}
	return doctor(t, "--config", file)
}

func doctor(t testing.TB, args ...string) map[string]string {
	t.Helper()
	args = append([]string{"doctor", "--output", "json"}, args...)
	cmd := exec.CommandContext(t.Context(), Binary(t), args...)
	var stderr strings.Builder
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	var report struct {
		Findings []struct{ Check, Severity, Subject, Problem, Change string }
	}
	if bad := json.Unmarshal(out, &report); bad != nil {
		t.Fatalf("isthmus %s: %v, %v: %s%s", strings.Join(args, " "), err, bad, out, stderr.String())
	}
	found := map[string]string{}
	bad := 0
	for _, f := range report.Findings {
		if f.Severity != "note" {
			bad++
		}
		found[f.Check] += fmt.Sprintf("%s: %s: %s; change: %s\n", f.Severity, f.Subject, f.Problem, f.Change)
	}
	if (bad > 0) != (err != nil) {
		t.Errorf("isthmus doctor ended with %v, with %d findings: %v", err, bad, found)
	}
	return found
}

// Configured is Run of a command that reads the program's configuration.
func (i *Server) Configured(t testing.TB, command ...string) string {
	t.Helper()
	return i.Run(t, append(command, "--config", i.writeConfig(t, "command.yaml"))...)
}

// Refused returns how many connections, streams and requests were refused for a
// reason, as isthmus_access_refused_total counts them.
func (i *Server) Refused(t testing.TB, reason string) int {
	t.Helper()
	return testenv.ByLabel(i.Metrics(t)["isthmus_access_refused_total"], "reason")[reason]
}

// Metrics returns the program's metrics by name.
func (i *Server) Metrics(t testing.TB) map[string]*dto.MetricFamily {
	t.Helper()
	return testenv.Metrics(t, i.page("/metrics"))
}

// WaitKept waits until all that is there now is on disk, so that
// [Isthmus.Kill9] loses nothing of it.
func (i *Server) WaitKept(t testing.TB) {
	t.Helper()
	now := float64(time.Now().UnixMilli()) / 1000
	testenv.Eventually(t, testenv.Patience, "the last good state to be written", func() (string, bool) {
		all := i.Metrics(t)["isthmus_state_written_timestamp_seconds"].GetMetric()
		return fmt.Sprint(all), len(all) == 1 && all[0].GetGauge().GetValue() > now
	})
}

// Page returns the admin page at a path.
func (i *Server) Page(t testing.TB, path string) []byte {
	t.Helper()
	return testenv.Page(t, i.page(path))
}

// Get returns the status and the body of a path of the admin API.
func (i *Server) Get(t testing.TB, path string) (code int, body string) {
	t.Helper()
	text, code, err := testenv.Get(t, i.page(path))
	if err != nil {
		t.Fatalf("isthmus: get %s: %v", path, err)
	}
	return code, string(text)
}
