package plugintest

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"
	goplugin "github.com/hashicorp/go-plugin"
	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/stats"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/timestamppb"
	mcp "istio.io/api/mcp/v1alpha1"
	networking "istio.io/api/networking/v1alpha3"

	"github.com/isthmus-mesh/isthmus/plugin"
	"github.com/isthmus-mesh/isthmus/plugin/collection"
	"github.com/isthmus-mesh/isthmus/plugin/plugintest/suite"
	pluginv1 "github.com/isthmus-mesh/isthmus/plugin/proto/isthmus/plugin/v1"
	"github.com/isthmus-mesh/isthmus/plugin/registry"
	"github.com/isthmus-mesh/isthmus/plugin/wire"
	"github.com/isthmus-mesh/isthmus/server/encode"
)

// The test binary is the plugin too: the variable says which.
const roleKey = "ISTHMUS_TEST_ROLE"

func TestMain(m *testing.M) {
	Self(func() { plugin.Main("good", newGood) })
	switch role := os.Getenv(roleKey); role {
	case "":
		goleak.VerifyTestMain(m)
	default:
		badMain(role)
	}
}

type goodConfig struct {
	Forgets  bool              `json:"forgets,omitempty"`
	Grace    plugin.Duration   `json:"grace,omitempty"`
	Restarts bool              `json:"restarts,omitempty"`
	Socket   string            `json:"socket,omitempty"`
	Services int               `json:"services,omitempty" jsonschema:"minimum=0"`
	Labels   map[string]string `json:"labels,omitempty"`
	Nested   *struct {
		On bool `json:"on,omitempty"`
	} `json:"nested,omitempty"`
}

// good is an adapter that keeps the contract. Each line that it reads from its
// socket is a service with that many instances, and further ones by number:
// "web 3 101 102"; with less than none the registry is away. One that forgets
// removes the service then, and one that restarts begins its grace period
// again.
type good struct{ c goodConfig }

// remembering is a catalog with what was set.
type remembering struct {
	plugin.Catalog
	mu  sync.Mutex // guards has
	has map[registry.Key]plugin.Snapshot
}

func (r *remembering) Set(svc registry.Service, instances []registry.Instance) {
	r.mu.Lock()
	r.has[svc.Key] = plugin.Snapshot{Service: svc, Instances: instances}
	r.mu.Unlock()
	r.Catalog.Set(svc, instances)
}

// again is a grace in the stead of another, which begins anew.
func (r *remembering) again(ctx context.Context, keep time.Duration) (g *plugin.Grace, end func()) {
	g = plugin.NewGrace(r, keep, nil)
	r.mu.Lock()
	has := maps.Clone(r.has)
	r.mu.Unlock()
	for _, s := range has {
		g.Set(s.Service, s.Instances)
	}
	ctx, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	wg.Go(func() { g.Run(ctx) })
	return g, func() {
		cancel()
		wg.Wait()
	}
}

func newGood(c goodConfig, _ plugin.Env) (plugin.Adapter, error) { return &good{c}, nil }

func (g *good) Run(ctx context.Context, c plugin.Catalog) error {
	fmt.Println("this must not get in the way of the handshake")
	all := &remembering{Catalog: c, has: map[registry.Key]plugin.Snapshot{}}
	grace, end := all.again(ctx, time.Duration(g.c.Grace))
	defer func() { end() }()
	set := func(name string, n int, more ...int) {
		var in []registry.Instance
		for i := range n {
			more = append(more, i)
		}
		for _, i := range more {
			in = append(in, registry.Instance{ID: fmt.Sprint(i), Address: fmt.Sprintf("10.0.0.%d", i+1), Ports: []registry.Port{{Number: 8080}}})
		}
		grace.Set(registry.Service{Key: registry.Key{Name: name}}, in)
	}
	for i := range g.c.Services {
		set(fmt.Sprint("svc-", i), 3)
	}
	c.Synced()
	if g.c.Socket == "" {
		<-ctx.Done()
		return nil
	}
	_ = os.Remove(g.c.Socket)
	l, err := net.Listen("unix", g.c.Socket)
	if err != nil {
		return err
	}
	defer context.AfterFunc(ctx, func() { _ = l.Close() })()
	for {
		conn, err := l.Accept()
		if err != nil {
			return nil
		}
		lines := bufio.NewScanner(conn)
		for lines.Scan() {
			fields := strings.Fields(lines.Text())
			name := fields[0]
			var numbers []int
			for _, f := range fields[1:] {
				n, err := strconv.Atoi(f)
				if err != nil {
					return err
				}
				numbers = append(numbers, n)
			}
			if n := numbers[0]; n >= 0 {
				grace.Back()
				set(name, n, numbers[1:]...)
				c.Degraded(nil)
				continue
			}
			if g.c.Forgets {
				c.Remove(registry.Key{Name: name})
			}
			if g.c.Restarts {
				end()
				grace, end = all.again(ctx, time.Duration(g.c.Grace))
			}
			grace.Away()
			c.Degraded(errors.New("cut off"))
		}
		_ = conn.Close()
	}
}

// An adapter that uses the SDK conforms.
func TestConformanceOfSDK(t *testing.T) {
	t.Parallel()
	dir, err := os.MkdirTemp("/tmp", "it")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	socket := filepath.Join(dir, "s")
	set := func(line string) func(ctx context.Context) error { return say(socket, line) }
	has := func(service string, n int) func(w *World) error {
		return func(w *World) error {
			if got := len(w.WorkloadEntries(service)); got != n || w.ServiceEntry(service) == nil {
				return fmt.Errorf("%s has %d instances, want %d", service, got, n)
			}
			return nil
		}
	}
	Conformance(t, Config{
		Adapter: "good",
		Config:  fmt.Appendf(nil, `{"socket": %q, "services": 5}`, socket),
		Changes: []Change{
			{Name: "new service", Do: set("web 2"), Want: has("conformance/web", 2), MaxUpserts: 3},
			{Name: "new instance", Do: set("web 3"), Want: has("conformance/web", 3), MaxUpserts: 1},
			{Name: "instance gone", Do: set("web 1"), Want: has("conformance/web", 1)},
		},
		Outages: []Outage{
			{Name: "away", Cut: set("svc-1 -1"), Restore: set("svc-1 3"), Lasts: time.Second},
			{Name: "away, and back with more", Cut: set("svc-1 -1"), Restore: set("svc-1 4"), Lasts: time.Second, Want: has("conformance/svc-1", 4)},
		},
	})
}

// An adapter that forgets what it knew while its registry is away is found out,
// and so is one that does not notice.
func TestOutagesFindFaults(t *testing.T) {
	for name, tt := range map[string]struct {
		forgets bool
		cut     string
		want    string
	}{
		"forgets":         {true, "svc-1 -1", "stale beats empty"},
		"does not notice": {false, "svc-1 3", "does not say that the registry cannot be followed"},
	} {
		t.Run(name, func(t *testing.T) {
			dir, err := os.MkdirTemp("/tmp", "it")
			if err != nil {
				t.Fatal(err)
			}
			defer os.RemoveAll(dir)
			socket := filepath.Join(dir, "s")
			cfg := Config{
				Config: fmt.Appendf(nil, `{"socket": %q, "services": 2, "forgets": %t}`, socket, tt.forgets), Within: 4 * time.Second,
				Outages: []Outage{{Name: "away", Cut: say(socket, tt.cut), Restore: say(socket, "svc-1 3"), Lasts: time.Second}},
			}
			if err := self(&cfg); err != nil {
				t.Fatal(err)
			}
			if err := check(t, "stale beats empty").Run(t.Context(), cfg); err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("error %v, want one with %q", err, tt.want)
			}
		})
	}
}

// A registry that flaps: an adapter that retains what left for its grace period
// conforms; one that begins the period again with each outage is found out, and
// so is one that forgets.
func TestFlaps(t *testing.T) {
	t.Parallel()
	for name, want := range map[string]string{
		"right":    "",
		"restarts": "an outage must not start it again",
		"forgets":  "was removed, which is in the registry",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir, err := os.MkdirTemp("/tmp", "it")
			if err != nil {
				t.Fatal(err)
			}
			defer os.RemoveAll(dir)
			socket, has := filepath.Join(dir, "s"), "svc-1 3"
			now := func(ctx context.Context) error { return say(socket, has)(ctx) }
			cfg := Config{
				Config: fmt.Appendf(nil, `{"socket": %q, "services": 2, "grace": "6s", "forgets": %t, "restarts": %t}`, socket, name == "forgets", name == "restarts"),
				Flaps: &Flaps{
					Grace: 6 * time.Second, Host: "svc-1.conformance", Cut: say(socket, "svc-1 -1"), Restore: now,
					Join: func(ctx context.Context, n int) error {
						has += fmt.Sprint(" ", n)
						return now(ctx)
					},
					Leave: func(context.Context, int) error { has = "svc-1 3"; return nil },
				},
			}
			if err := self(&cfg); err != nil {
				t.Fatal(err)
			}
			switch err := check(t, "the registry flaps").Run(t.Context(), cfg); {
			case want == "" && err != nil:
				t.Error(err)
			case want != "" && (err == nil || !strings.Contains(err.Error(), want)):
				t.Errorf("error %v, want one with %q", err, want)
			}
		})
	}
}

// say returns a function that sends a line to the good adapter.
func say(socket, line string) func(ctx context.Context) error {
	return func(ctx context.Context) error {
		ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
		defer cancel()
		var conn net.Conn
		var err error
		for { // the adapter listens after its first listing
			if conn, err = (&net.Dialer{}).DialContext(ctx, "unix", socket); err == nil {
				break
			}
			if ctx.Err() != nil {
				return err
			}
		}
		defer conn.Close()
		_, err = fmt.Fprintln(conn, line)
		return err
	}
}

// badMain is a plugin that breaks one part of the contract.
func badMain(role string) {
	switch role {
	case "by-hand":
		if os.Getenv(wire.CookieKey) == "" {
			os.Exit(0)
		}
	case "stays":
		if os.Getenv(wire.CookieKey) == "" {
			select {}
		}
	case "sigterm":
		signal.Ignore(syscall.SIGTERM)
	case "handshake":
		fmt.Println("1|99|unix|/nowhere|grpc|")
		select {}
	}
	stdoutOfProcess = os.Stdout // before go-plugin replaces it
	if role != "lives-on" && role != "sigterm" {
		signal.Notify(terminate, syscall.SIGTERM)
		go func() {
			<-terminate
			os.Exit(0)
		}()
	}
	goplugin.Serve(&goplugin.ServeConfig{
		HandshakeConfig:  wire.Handshake,
		VersionedPlugins: wire.Plugins(&bad{role: role}),
		Logger:           hclog.NewNullLogger(),
		GRPCServer: func(opts []grpc.ServerOption) *grpc.Server {
			if role != "lives-on" { // as go-plugin's server does when its host goes
				opts = append(opts, grpc.StatsHandler(ending{}))
			}
			return grpc.NewServer(opts...)
		},
	})
	select {}
}

var (
	stdoutOfProcess *os.File

	terminate = make(chan os.Signal, 1)
)

// ending ends the process with its connection.
type ending struct{}

func (ending) TagRPC(ctx context.Context, _ *stats.RPCTagInfo) context.Context   { return ctx }
func (ending) HandleRPC(context.Context, stats.RPCStats)                         {}
func (ending) TagConn(ctx context.Context, _ *stats.ConnTagInfo) context.Context { return ctx }
func (ending) HandleConn(_ context.Context, s stats.ConnStats) {
	if _, over := s.(*stats.ConnEnd); over {
		os.Exit(0)
	}
}

type bad struct {
	pluginv1.UnimplementedAdapterServiceServer
	role string

	mu         sync.Mutex // guards what follows
	n          int
	configured bool
}

func (b *bad) Describe(context.Context, *pluginv1.DescribeRequest) (*pluginv1.DescribeResponse, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.n++
	d := &pluginv1.DescribeResponse{
		Name:         "bad",
		ConfigSchema: []byte(`{"type":"object","properties":{"a":{"type":"string"}}}`),
		Collections:  []string{collection.ServiceEntry, collection.WorkloadEntry},
	}
	switch b.role {
	case "name":
		d.Name = "Bad Name"
	case "schema":
		d.ConfigSchema = []byte(`{"type":7}`)
	case "fickle":
		d.Version = fmt.Sprint(b.n)
	}
	return d, nil
}

func (b *bad) Configure(_ context.Context, req *pluginv1.ConfigureRequest) (*pluginv1.ConfigureResponse, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.configured && b.role != "twice" {
		return nil, status.Error(codes.FailedPrecondition, "it is configured")
	}
	var c map[string]any
	resp := &pluginv1.ConfigureResponse{}
	if err := json.Unmarshal(req.GetConfig(), &c); err != nil {
		return nil, err
	}
	for k, v := range c {
		_, isText := v.(string)
		if k != "a" && b.role != "unknown" || !isText && k == "a" && b.role != "types" {
			resp.Violations = append(resp.Violations, &pluginv1.Violation{Field: "config." + k, Reason: "wrong"})
		}
	}
	b.configured = len(resp.GetViolations()) == 0
	return resp, nil
}

func (b *bad) Watch(_ *pluginv1.WatchRequest, s grpc.ServerStreamingServer[pluginv1.WatchResponse]) error {
	b.mu.Lock()
	configured := b.configured
	b.mu.Unlock()
	if !configured && b.role != "eager" {
		return status.Error(codes.FailedPrecondition, "it is not configured")
	}
	name := "ns/web"
	se := &networking.ServiceEntry{
		Hosts:      []string{"web.example.org"},
		Ports:      []*networking.ServicePort{{Name: "http", Number: 80, Protocol: "HTTP"}},
		Resolution: networking.ServiceEntry_STATIC,
	}
	created := timestamppb.New(time.Unix(1e9, 0))
	service := ""
	resp := &pluginv1.WatchResponse{Synced: b.role != "unsynced"}
	switch b.role {
	case "stdout":
		fmt.Fprintln(stdoutOfProcess, "stray")
	case "no-namespace":
		name = "web"
	case "no-create-time":
		created = nil
	case "moving-create-time", "clock":
		created = timestamppb.Now()
	case "ownerless":
		service = "-"
	case "host":
		se.Hosts[0] = "web_1.example.org"
	case "port":
		se.Ports[0].Number = 0
	case "orphan":
		service = "ns/nobody"
	case "kept":
		resp.Kept = []*pluginv1.Kept{{Collection: "networking.istio.io/Gateway", Name: "ns/gw"}}
	case "relisted":
		resp.Relisted = []string{name}
	}
	body, err := anypb.New(se)
	if err != nil {
		return err
	}
	add := func(res *mcp.Resource, service string) {
		raw, err := proto.Marshal(res)
		if err != nil {
			panic(err)
		}
		resp.Upserts = append(resp.Upserts, &pluginv1.Upsert{Resource: raw, Service: service})
	}
	if b.role == "body" {
		body.Value = []byte{0xff}
	}
	add(&mcp.Resource{Metadata: &mcp.Metadata{Name: name, CreateTime: created}, Body: body}, "")
	if service != "" {
		we, err := anypb.New(&networking.WorkloadEntry{Address: "10.0.0.1"})
		if err != nil {
			return err
		}
		add(&mcp.Resource{Metadata: &mcp.Metadata{Name: "ns/web-1", CreateTime: created}, Body: we}, strings.Trim(service, "-"))
	}
	if err := s.Send(resp); err != nil {
		return err
	}
	if b.role == "silent" {
		<-s.Context().Done()
		return nil
	}
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	for {
		select {
		case <-s.Context().Done():
			return nil
		case <-tick.C:
			if err := s.Send(&pluginv1.WatchResponse{}); err != nil {
				return err
			}
		}
	}
}

// check returns the check of a name.
func check(t *testing.T, name string) suite.Check {
	t.Helper()
	all := suite.Checks()
	i := slices.IndexFunc(all, func(c suite.Check) bool { return c.Name == name })
	if i < 0 {
		t.Fatalf("there is no check %q", name)
	}
	return all[i]
}

// Each check fails for a plugin that breaks what it checks, and says what is
// wrong.
func TestConformanceFindsFaults(t *testing.T) {
	t.Parallel()
	for role, want := range map[string]struct {
		check string
		text  string
	}{
		"by-hand":            {"a person who starts it is told what it is", "exit code other than 0"},
		"stays":              {"a person who starts it is told what it is", "still runs"},
		"handshake":          {"it shakes hands with its host", `another version of the contract: "99", must be 1`},
		"name":               {"describe works before configure", "Bad Name"},
		"schema":             {"describe works before configure", "config_schema"},
		"fickle":             {"describe works before configure", "differs"},
		"eager":              {"watch before configure is refused", "FAILED_PRECONDITION"},
		"unknown":            {"unknown field is refused with its path", "config.no_such_field"},
		"types":              {"wrong types are refused with their path", `want one of "config.a"`},
		"twice":              {"configuration is taken once", "FAILED_PRECONDITION"},
		"unsynced":           {"everything is sent, then synced", "synced was not sent"},
		"no-namespace":       {"everything is sent, then synced", `"namespace/name"`},
		"no-create-time":     {"everything is sent, then synced", "create_time"},
		"host":               {"everything is sent, then synced", "web_1.example.org"},
		"port":               {"everything is sent, then synced", "not a port"},
		"orphan":             {"everything is sent, then synced", "ns/nobody"},
		"body":               {"everything is sent, then synced", "ServiceEntry"},
		"ownerless":          {"everything is sent, then synced", `no service has an endpoint, and the WorkloadEntry "ns/web-1" belongs to none`},
		"empty":              {"everything is sent, then synced", `1 of 1 services have no endpoint, "ns/web" among them`},
		"clock":              {"another process sends the same", "create_time of networking.istio.io/ServiceEntry \"ns/web\" was "},
		"kept":               {"everything is sent, then synced", "Describe does not name"},
		"relisted":           {"everything is sent, then synced", `ServiceEntry "ns/web" is relisted`},
		"moving-create-time": {"a second watch begins again", "create_time"},
		"silent":             {"it gives a sign of life", "every 5s"},
		"lives-on":           {"it ends when the host goes", "still runs"},
		"sigterm":            {"it ends at SIGTERM", "still runs"},
		"stdout":             {"standard output is for the handshake only", "stray"},
	} {
		t.Run(role, func(t *testing.T) {
			t.Parallel()
			cfg := Config{Command: []string{os.Args[0]}, Env: []string{roleKey + "=" + role}, Within: 4 * time.Second}
			err := check(t, want.check).Run(t.Context(), cfg)
			if err == nil || !strings.Contains(err.Error(), want.text) {
				t.Errorf("error %v, want one with %q", err, want.text)
			}
		})
	}
}

// Of all checks, those that fail for one cause are one failure: the first. The
// others are skipped, and what does not build on it passes.
func TestFirstCauseAlone(t *testing.T) {
	t.Parallel()
	// The runs wait most of the time, and so do it together.
	results := make(map[string]chan string)
	wants := map[string]string{
		"eager": "watch before configure is refused", "name": "describe works before configure", "unsynced": "everything is sent, then synced",
		"ownerless": "everything is sent, then synced", "clock": "a second watch begins again", "silent": "it gives a sign of life",
		"lives-on": "it ends when the host goes", "stdout": "standard output is for the handshake only",
	}
	for role := range wants {
		done := make(chan string, 1)
		results[role] = done
		go func() {
			cfg := Config{Command: []string{os.Args[0]}, Env: []string{roleKey + "=" + role}, Within: 20 * time.Second}
			failed, found := suite.Failed{}, []string{}
			for _, c := range suite.Checks() {
				if failed.Before(c) != "" {
					continue
				}
				err := c.Run(t.Context(), cfg)
				if _, warning := errors.AsType[*suite.Warning](err); err != nil && !warning {
					failed[c.Name] = true
					found = append(found, c.Name)
				}
			}
			done <- strings.Join(found, "; ")
		}()
	}
	for role, want := range wants {
		if got := <-results[role]; got != want {
			t.Errorf("%s: %q failed, want %q alone", role, got, want)
		}
	}
}

// A check ends with its context, whatever the plugin does not do.
func TestCheckEnds(t *testing.T) {
	t.Parallel()
	for role, name := range map[string]string{
		"stays": "a person who starts it is told what it is", "unsynced": "everything is sent, then synced", "silent": "it gives a sign of life",
		"lives-on": "it ends when the host goes", "sigterm": "it ends at SIGTERM",
	} {
		ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
		cfg := Config{Command: []string{os.Args[0]}, Env: []string{roleKey + "=" + role}, Within: time.Hour}
		if err := check(t, name).Run(ctx, cfg); err == nil {
			t.Errorf("%s: the check passes", role)
		}
		cancel()
	}
}

// The SDK and the bridge agree on the size of the largest resource, so that
// what the SDK cuts off is refused.
func TestMaxResource(t *testing.T) {
	if wire.MaxResource != encode.MaxSize {
		t.Errorf("the SDK sends up to %d bytes, the bridge accepts %d", wire.MaxResource, encode.MaxSize)
	}
}
