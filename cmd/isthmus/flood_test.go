package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"
	goplugin "github.com/hashicorp/go-plugin"
	"google.golang.org/grpc"
	networking "istio.io/api/networking/v1alpha3"

	"github.com/isthmus-mesh/isthmus/internal/testenv"
	"github.com/isthmus-mesh/isthmus/internal/testresource"
	"github.com/isthmus-mesh/isthmus/internal/testwait"
	"github.com/isthmus-mesh/isthmus/plugin"
	"github.com/isthmus-mesh/isthmus/plugin/collection"
	pluginv1 "github.com/isthmus-mesh/isthmus/plugin/proto/isthmus/plugin/v1"
	"github.com/isthmus-mesh/isthmus/plugin/registry"
	"github.com/isthmus-mesh/isthmus/plugin/wire"
)

// The two executables that flood: "broken" is an adapter made with the SDK that
// has lost control of itself, "hostile" is a plugin that speaks the contract
// without it, so that nothing but the bridge stands in its way. Both list the
// service live, flood, and then say that the listing is complete.
const (
	brokenAdapter  = "isthmus-adapter-broken"
	hostileAdapter = "isthmus-adapter-hostile"
)

// flood is the configuration of both.
type flood struct {
	Do    string `json:"do"`
	Count int    `json:"count,omitempty"`
}

// How much each floods with.
const (
	floodLine     = 60_000
	floodLines    = 7_000 // 420 MB
	floodFlaps    = 20_000
	floodProblems = 950_000 // a fifth of them exceeds what the SDK counts, too
	floodServices = 300_000
	floodHuge     = 1_000   // of some 290 kB each
	floodLarge    = 250_000 // of some 2 kB each
)

func brokenMain() {
	plugin.Main("broken", func(c flood, _ plugin.Env) (plugin.Adapter, error) { return c, nil })
}

// Run implements plugin.Adapter.
func (f flood) Run(ctx context.Context, c plugin.Catalog) error {
	instance := []registry.Instance{{ID: "1", Address: "10.0.0.1", Ports: []registry.Port{{Number: 80}}}}
	c.Set(registry.Service{Key: registry.Key{Name: "live"}}, instance)
	for n := range f.Count {
		switch f.Do {
		case "stderr":
			fmt.Fprintln(os.Stderr, strings.Repeat("x", floodLine))
		case "flap":
			c.Degraded(fmt.Errorf("attempt %d", n))
			c.Degraded(nil)
		case "problems":
			c.Problem(fmt.Sprint("service flood-", n), "it has neither an address nor a port, and so cannot be used as it is")
		case "services":
			c.Set(registry.Service{Key: registry.Key{Name: fmt.Sprint("flood-", n)}}, instance)
		case "large":
			meta := make(map[string]string)
			for i := range 30 {
				meta[fmt.Sprint("key-", i)] = fmt.Sprintf("%s-%d", strings.Repeat("v", 45), n)
			}
			c.Set(registry.Service{Key: registry.Key{Name: fmt.Sprint("flood-", n)}}, []registry.Instance{{ID: "1", Address: "10.0.0.1", Ports: instance[0].Ports, Meta: meta}})
		case "hang":
			<-ctx.Done()
		}
	}
	c.Synced()
	<-ctx.Done()
	return nil
}

func hostileMain() {
	goplugin.Serve(&goplugin.ServeConfig{
		HandshakeConfig: wire.Handshake, VersionedPlugins: wire.Plugins(&hostile{}), Logger: hclog.NewNullLogger(), GRPCServer: goplugin.DefaultGRPCServer,
	})
}

type hostile struct {
	pluginv1.UnimplementedAdapterServiceServer
	flood
}

func (*hostile) Describe(context.Context, *pluginv1.DescribeRequest) (*pluginv1.DescribeResponse, error) {
	return &pluginv1.DescribeResponse{Name: "hostile", ConfigSchema: []byte("{}"), Collections: []string{collection.ServiceEntry, collection.WorkloadEntry}}, nil
}

func (h *hostile) Configure(_ context.Context, req *pluginv1.ConfigureRequest) (*pluginv1.ConfigureResponse, error) {
	return &pluginv1.ConfigureResponse{}, json.Unmarshal(req.GetConfig(), &h.flood)
}

func (h *hostile) Watch(_ *pluginv1.WatchRequest, s grpc.ServerStreamingServer[pluginv1.WatchResponse]) error {
	send := func(m *pluginv1.WatchResponse) {
		if err := s.Send(m); err != nil {
			os.Exit(1)
		}
	}
	entry := func(name string, hosts ...string) *pluginv1.Upsert {
		return &pluginv1.Upsert{Service: "flood/" + name, Resource: testresource.Encode(testresource.Named("flood/"+name), &networking.ServiceEntry{
			Hosts: hosts, Ports: []*networking.ServicePort{{Number: 80, Name: "http", Protocol: "HTTP"}},
			Location: networking.ServiceEntry_MESH_INTERNAL, Resolution: networking.ServiceEntry_STATIC,
		})}
	}
	send(&pluginv1.WatchResponse{Upserts: []*pluginv1.Upsert{entry("live", "live.example.org")}})
	m := &pluginv1.WatchResponse{}
	for n := range h.Count {
		switch h.Do {
		case "flap":
			send(&pluginv1.WatchResponse{Status: &pluginv1.Status{Error: []string{"no route to host", ""}[n%2]}})
		case "problems":
			m.Problems = append(m.Problems, &pluginv1.Problem{Id: fmt.Sprint("service flood-", n), Reason: strings.Repeat("it cannot be used; ", 10)})
		case "services":
			m.Upserts = append(m.Upserts, entry(fmt.Sprint("flood-", n), fmt.Sprintf("flood-%d.example.org", n)))
		case "huge", "large":
			hosts := make([]string, map[string]int{"huge": 4_000, "large": 26}[h.Do])
			for i := range hosts {
				hosts[i] = fmt.Sprintf("%s-%d-%d.example.org", strings.Repeat("h", 50), n, i)
			}
			if m.Upserts = append(m.Upserts, entry(fmt.Sprint("flood-", n), hosts...)); h.Do == "huge" {
				send(m)
				m = &pluginv1.WatchResponse{}
			}
		}
		if len(m.Problems)+len(m.Upserts) == 1000 {
			send(m)
			m = &pluginv1.WatchResponse{}
		}
	}
	if h.Do == "flap" { // it ends in the worse state
		send(&pluginv1.WatchResponse{Status: &pluginv1.Status{Error: "the last state"}})
	}
	m.Synced = true
	send(m)
	beat := time.NewTicker(wire.Heartbeat)
	defer beat.Stop()
	for {
		select {
		case <-s.Context().Done():
			return nil
		case <-beat.C:
			send(&pluginv1.WatchResponse{})
		}
	}
}

// flooded is a bridge with one plugin that floods.
type flooded struct {
	t       *testing.T
	cmd     *exec.Cmd
	log     *os.File
	admin   string
	started time.Time
}

// startFlooded starts a bridge whose log goes to a file.
func startFlooded(t *testing.T, adapter string, f flood, limits string) *flooded {
	t.Helper()
	path, err := exec.LookPath(adapter)
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	config, err := json.Marshal(f)
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(dir, "isthmus.yaml")
	if err := os.WriteFile(file, []byte(fmt.Sprintf(`
listen: {xds: 127.0.0.1:0, admin: 127.0.0.1:0}
plugin_dir: %s
limits: {%s}
registries:
- {name: flood, type: %s, config: %s}
`, filepath.Dir(path), limits, strings.TrimPrefix(adapter, "isthmus-adapter-"), config)), 0o600); err != nil {
		t.Fatal(err)
	}
	b := &flooded{t: t, started: time.Now()}
	if b.log, err = os.Create(filepath.Join(dir, "log")); err != nil {
		t.Fatal(err)
	}
	b.cmd = exec.CommandContext(t.Context(), "isthmus", "serve", "--config", file)
	b.cmd.Cancel = func() error { return b.cmd.Process.Signal(syscall.SIGTERM) }
	b.cmd.Stdout, b.cmd.Stderr = b.log, b.log
	if err := b.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = b.cmd.Process.Signal(syscall.SIGTERM)
		_ = b.cmd.Wait()
		_ = b.log.Close()
	})
	b.admin = b.find(`msg=serving xds=\S+ admin=(\S+)`)[1]
	return b
}

// find waits until the log matches. Nothing tells of a line but reading again.
func (b *flooded) find(pattern string) []string {
	b.t.Helper()
	re := regexp.MustCompile(pattern)
	var m []string
	testwait.Eventually(b.t, 4*patience, "a log that matches "+pattern, func() (string, bool) {
		text := b.text()
		m = re.FindStringSubmatch(text)
		return fmt.Sprintf("%.10000s", text), m != nil
	})
	return m
}

// text returns the log. Of a long one the beginning and the end are enough.
func (b *flooded) text() string {
	b.t.Helper()
	const most = 8 << 20
	size := b.size()
	text := make([]byte, min(size, most))
	if _, err := b.log.ReadAt(text, max(0, size-most)); err != nil && !errors.Is(err, io.EOF) {
		b.t.Fatal(err)
	}
	return string(text)
}

func (b *flooded) size() int64 {
	b.t.Helper()
	info, err := b.log.Stat()
	if err != nil {
		b.t.Fatal(err)
	}
	return info.Size()
}

// registry returns what the API says of the registry.
func (b *flooded) registry() (r struct {
	Phase     string
	Error     string
	PID       int
	Restarts  int
	Services  int
	Resources int
	Bytes     int
	Count     int `json:"problem_count"`
},
) {
	b.t.Helper()
	code, body := get(b.t, "http://"+b.admin+"/api/v1/registries")
	var all struct{ Items json.RawMessage }
	items := []any{&r}
	if err := json.Unmarshal([]byte(body), &all); err != nil || code != http.StatusOK {
		b.t.Fatalf("%d %v %s", code, err, body)
	}
	if err := json.Unmarshal(all.Items, &items); err != nil {
		b.t.Fatal(err)
	}
	return r
}

// peak returns the most memory that a process has had resident, in MB; 0 where
// the system does not tell.
func peak(t *testing.T, pid int) int {
	t.Helper()
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return 0
	}
	m := regexp.MustCompile(`VmHWM:\s+(\d+) kB`).FindSubmatch(status)
	if m == nil {
		return 0
	}
	kB, _ := strconv.Atoi(string(m[1]))
	return kB / 1000
}

// floods returns how many of n are sent: with the race detector, which makes
// each of them cost several times as much, a fifth.
func floods(n int) int {
	if testwait.Raced() {
		return n / 5
	}
	return n
}

// TestFloods shows what a plugin that floods costs: its log, its memory and the
// bridge's are bounded, what was live stays, and what was left out is counted
// and listed. With -v it prints the figures that docs/performance.md has.
func TestFloods(t *testing.T) {
	if testing.Short() {
		t.Skip("it takes a minute and memory")
	}
	testenv.Wide(t)
	for _, tt := range []struct {
		name, adapter string
		flood
		limits           string
		log, perSecond   int64  // bytes at most, and how many more with each second
		bridge, plugin   int    // MB at most
		resources, bytes int    // at most
		problems         int    // at least
		reason           string // that one of them has, as a pattern on the API's answer
		state            string // that is shown in the end
		onlyOnceLine     string // of the log
	}{
		{name: "nothing", adapter: brokenAdapter, log: 10_000, bridge: 150, plugin: 150},
		// 64 KiB a second and what comes around each line.
		{name: "stderr", adapter: brokenAdapter, flood: flood{"stderr", floodLines}, log: 100_000, perSecond: 80_000, bridge: 150, plugin: 150},
		{name: "flap", adapter: brokenAdapter, flood: flood{"flap", floodFlaps}, log: 20_000, bridge: 150, plugin: 150},
		{name: "flap without SDK", adapter: hostileAdapter, flood: flood{"flap", floodFlaps}, log: 20_000, bridge: 150, plugin: 150, state: "the last state"},
		{name: "problems", adapter: brokenAdapter, flood: flood{"problems", floodProblems}, log: 20_000, bridge: 200, plugin: 200, problems: 10_000, reason: "and more than 110000 more"},
		{name: "problems without SDK", adapter: hostileAdapter, flood: flood{"problems", floodProblems}, log: 20_000, bridge: 250, plugin: 200, problems: 10_000, reason: fmt.Sprint(floods(floodProblems)-10_000, " times")},
		{
			name: "services", adapter: brokenAdapter, flood: flood{"services", floodServices}, limits: "resources_per_registry: 20000", log: 20_000, bridge: 300, plugin: 250,
			problems: 10_000, reason: `"problem_count": 10\d\d\d,(?s:.*)limits.resources_per_registry \(20000\)`, resources: 20_000,
		},
		{
			name: "services without SDK", adapter: hostileAdapter, flood: flood{"services", floodServices}, limits: "resources_per_registry: 20000", log: 20_000, bridge: 300, plugin: 200,
			problems: 10_000, reason: `"problem_count": 10\d\d\d,(?s:.*)limits.resources_per_registry \(20000\)`, resources: 20_000, onlyOnceLine: `msg="the registry has reached a limit; what is beyond it is rejected" registry=flood limit=limits.resources_per_registry value=20000`,
		},
		{
			name: "huge without SDK", adapter: hostileAdapter, flood: flood{"huge", floodHuge}, limits: "bytes_per_registry: 20000000", log: 20_000, bridge: 500, plugin: 250,
			problems: 100, reason: `"problem_count": \d\d\d,(?s:.*)limits.bytes_per_registry \(20000000\)`, bytes: 20_000_000, onlyOnceLine: `msg="the registry has reached a limit; what is beyond it is rejected" registry=flood limit=limits.bytes_per_registry value=20000000`,
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			tt.Count = floods(tt.Count)
			b := startFlooded(t, tt.adapter, tt.flood, tt.limits)
			b.find(`msg="listing complete" registry=flood`)
			took := time.Since(b.started)
			if tt.problems > 0 { // they may come after the listing
				b.await("/api/v1/registries", tt.reason)
			}
			r := b.registry()
			bridge, plugin, log := peak(t, b.cmd.Process.Pid), peak(t, r.PID), b.size()
			t.Logf("%.1f s: log %.3f MB, bridge %d MB, plugin %d MB; %d resources of %d bytes, %d problems",
				took.Seconds(), float64(log)/1e6, bridge, plugin, r.Resources, r.Bytes, r.Count)
			if r.Restarts != 0 {
				t.Errorf("%d restarts", r.Restarts)
			}
			if most := tt.log + tt.perSecond*int64(took/time.Second+2); log > most {
				t.Errorf("%d bytes of log in %v, want at most %d", log, took, most)
			}
			if !testwait.Raced() && (bridge > tt.bridge || plugin > tt.plugin) {
				t.Errorf("bridge %d MB, want at most %d; plugin %d MB, want at most %d", bridge, tt.bridge, plugin, tt.plugin)
			}
			if r.Count < tt.problems || tt.resources > 0 && r.Resources > tt.resources || tt.bytes > 0 && r.Bytes > tt.bytes {
				t.Errorf("%d problems, %d resources of %d bytes", r.Count, r.Resources, r.Bytes)
			}
			if tt.onlyOnceLine != "" && strings.Count(b.text(), tt.onlyOnceLine) != 1 {
				t.Errorf("%d lines %s", strings.Count(b.text(), tt.onlyOnceLine), tt.onlyOnceLine)
			}
			if r.Error != tt.state {
				t.Errorf("it is shown that %q, want %q", r.Error, tt.state)
			}
			if _, body := get(t, "http://"+b.admin+"/api/v1/services?q=live"); !strings.Contains(body, `"total": 1`) {
				t.Errorf("what was live: %s", body)
			}
		})
	}
}

// TestListingHangs shows that an adapter that hangs before its listing is
// complete is seen as such, and so is one that does not tell when it heard from
// its registry; beside them one whose registry answers.
func TestListingHangs(t *testing.T) {
	b := startFlooded(t, brokenAdapter, flood{"hang", 1}, "")
	for path, patterns := range map[string][]string{
		"/readyz":            {`^registry flood: the first listing is not complete: syncing; it began [1-9]\d*s ago`},
		"/":                  {`listing incomplete for [1-9]\d* s`},
		"/registries":        {`Last heard from</dt><dd>not told`},
		"/api/v1/registries": {`"listing_since": "20`},
		"/metrics":           {`isthmus_registry_listing_since_timestamp_seconds\{registry="flood"\} 1\.\d+e\+09`},
	} {
		for _, pattern := range patterns {
			b.await(path, pattern)
		}
	}
	if _, body := get(t, "http://"+b.admin+"/api/v1/registries"); strings.Contains(body, "last_heard") {
		t.Errorf("what was not told is shown: %s", body)
	}
}

// TestHeardFrom shows when a registry was last heard from, everywhere.
func TestHeardFrom(t *testing.T) {
	file := filepath.Join(t.TempDir(), "isthmus.yaml")
	if err := os.WriteFile(file, []byte("listen: {xds: 127.0.0.1:0, admin: 127.0.0.1:0}\nregistries: [{name: load, type: sim}]\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	p := start(t, "serve", "--config", file)
	b := &flooded{t: t, admin: p.find(p.stderr, `msg=serving xds=\S+ admin=(\S+)`)[1]}
	b.await("/registries", `Last heard from</dt><dd>\d+ s ago`)
	b.await("/api/v1/registries", `"last_heard": "20`)
	b.await("/metrics", `isthmus_registry_last_heard_timestamp_seconds\{registry="load"\} 1\.\d+e\+09`)
	p.signal(syscall.SIGTERM)
	if code := p.wait(); code != exitOK {
		t.Errorf("exit code after SIGTERM = %d", code)
	}
}

// await waits until what the bridge answers matches.
func (b *flooded) await(path, pattern string) {
	b.t.Helper()
	re := regexp.MustCompile(pattern)
	testwait.Eventually(b.t, patience, path+" to match "+pattern, func() (string, bool) {
		_, body := get(b.t, "http://"+b.admin+path)
		return body, re.MatchString(body)
	})
}
