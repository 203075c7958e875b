package main

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	core "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	discovery "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/types/known/structpb"

	"github.com/isthmus-mesh/isthmus/internal/testenv"
	"github.com/isthmus-mesh/isthmus/internal/testwait"
)

var reloads = flag.Int("reloads", 50, "how often TestReloadUnderChurn reloads")

// reloaded is a bridge whose configuration changes.
type reloaded struct {
	*process
	file, admin string
	xds         []string // addresses
}

// serveFile serves a configuration, and waits until every registry is in.
func serveFile(t *testing.T, file, text string) *reloaded {
	t.Helper()
	replaceFile(t, file, text)
	r := &reloaded{process: start(t, "serve", "--config", file), file: file}
	at := r.find(r.stderr, `msg=serving xds=(\S+) admin=(\S+)`)
	r.xds, r.admin = []string{at[1]}, "http://"+at[2]
	testwait.Eventually(t, patience, "the bridge to be ready", func() (string, bool) {
		code, body := get(t, r.admin+"/readyz")
		return body, code == http.StatusOK
	})
	return r
}

// replaceFile puts another file in the place of one, at once.
func replaceFile(t *testing.T, file, text string) {
	t.Helper()
	next := file + ".next"
	if err := os.WriteFile(next, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(next, file); err != nil {
		t.Fatal(err)
	}
}

// answer is what the API says of a reload.
type answer struct {
	Result, SHA256 string
	Changed        bool
	Changes        map[string]any
	Problems       []struct {
		File, Field, Reason string
		Line                int
	}
	Error string
}

// post sends a request that changes something.
func post(t *testing.T, url, body string, header ...string) (int, answer) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/json")
	for i := 0; i < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	var a answer
	if err := json.Unmarshal(text, &a); err != nil {
		t.Fatalf("%v: %s", err, text)
	}
	if strings.Contains(string(text), "hush") {
		t.Errorf("the answer has a secret: %s", text)
	}
	return resp.StatusCode, a
}

// reload replaces the file and asks the API to load it, which must go well.
func (r *reloaded) reload(text string) answer {
	r.t.Helper()
	replaceFile(r.t, r.file, text)
	code, a := post(r.t, r.admin+"/api/v1/reload", "")
	if code != http.StatusOK || a.SHA256 != sha(text) {
		r.t.Fatalf("reload: %d %+v of\n%s", code, a, text)
	}
	return a
}

func sha(text string) string {
	sum := sha256.Sum256([]byte(text))
	return hex.EncodeToString(sum[:])
}

// inForce returns the hash of the configuration in force, and what came of the
// last reload.
func (r *reloaded) inForce() (hash, result string) {
	r.t.Helper()
	_, body := get(r.t, r.admin+"/api/v1/status")
	var s struct {
		Config struct {
			SHA256     string
			LastReload struct{ Result string } `json:"last_reload"`
		}
	}
	if err := json.Unmarshal([]byte(body), &s); err != nil {
		r.t.Fatalf("%v: %s", err, body)
	}
	return s.Config.SHA256, s.Config.LastReload.Result
}

// awaitFile waits until a text is in force.
func (r *reloaded) awaitFile(text string) {
	r.t.Helper()
	testwait.Eventually(r.t, patience, "the file to be in force", func() (string, bool) {
		hash, result := r.inForce()
		return hash + " " + result, hash == sha(text)
	})
}

// pids returns the processes of the registries by name.
func (r *reloaded) pids() map[string]int {
	r.t.Helper()
	_, body := get(r.t, r.admin+"/api/v1/registries")
	var all struct {
		Items []struct {
			Name string
			PID  int
		}
	}
	if err := json.Unmarshal([]byte(body), &all); err != nil {
		r.t.Fatal(err)
	}
	out := map[string]int{}
	for _, i := range all.Items {
		out[i.Name] = i.PID
	}
	return out
}

// metric returns the value of a series, "" if there is none.
func (r *reloaded) metric(series string) string {
	r.t.Helper()
	_, body := get(r.t, r.admin+"/metrics")
	if m := regexp.MustCompile(`(?m)^` + regexp.QuoteMeta(series) + ` (\S+)$`).FindStringSubmatch(body); m != nil {
		return m[1]
	}
	return ""
}

// end ends the bridge.
func (r *reloaded) end() {
	r.t.Helper()
	r.signal(syscall.SIGTERM)
	if code := r.wait(); code != exitOK {
		r.t.Errorf("exit code after SIGTERM = %d; it wrote:\n%s", code, strings.Join(r.stderr.seen, "\n"))
	}
}

// deltaSink is a sink that keeps what it is sent.
type deltaSink struct {
	mu      sync.Mutex
	names   map[string]string // version by name, guarded by mu as the rest
	removed []string
	updates int
	ended   error
	at      time.Time // when it ended
	done    chan struct{}
}

// unavailable reports whether a stream ended as one of a bridge that is ending.
func unavailable(err error) bool {
	return err != nil && strings.Contains(err.Error(), "code = Unavailable")
}

const wildcard = "networking.istio.io/v1/"

// follow opens a delta stream to an address for ServiceEntries and
// WorkloadEntries.
func follow(t *testing.T, address string) *deltaSink {
	t.Helper()
	conn, err := grpc.NewClient("passthrough:///"+address, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	stream, err := discovery.NewAggregatedDiscoveryServiceClient(conn).DeltaAggregatedResources(ctx)
	if err != nil {
		t.Fatal(err)
	}
	node := &core.Node{Id: "reload", Metadata: &structpb.Struct{Fields: map[string]*structpb.Value{"ISTHMUS_SHAPE": structpb.NewStringValue("workload")}}}
	for _, kind := range []string{"ServiceEntry", "WorkloadEntry"} {
		if err := stream.Send(&discovery.DeltaDiscoveryRequest{Node: node, TypeUrl: wildcard + kind}); err != nil {
			t.Fatal(err)
		}
	}
	s := &deltaSink{names: map[string]string{}, done: make(chan struct{})}
	go func() { // ends with the cleanup
		defer close(s.done)
		err := s.receive(stream)
		s.mu.Lock()
		defer s.mu.Unlock()
		s.ended, s.at = err, time.Now()
	}()
	t.Cleanup(func() {
		cancel()
		<-s.done
		conn.Close()
	})
	return s
}

func (s *deltaSink) receive(stream discovery.AggregatedDiscoveryService_DeltaAggregatedResourcesClient) error {
	for {
		m, err := stream.Recv()
		if err != nil {
			return err
		}
		kind := strings.TrimPrefix(m.GetTypeUrl(), wildcard) + " "
		s.mu.Lock()
		for _, r := range m.GetResources() {
			s.names[kind+r.GetName()] = r.GetVersion()
			s.updates++
		}
		for _, name := range m.GetRemovedResources() {
			delete(s.names, kind+name)
			s.removed = append(s.removed, kind+name)
		}
		s.mu.Unlock()
		if err := stream.Send(&discovery.DeltaDiscoveryRequest{TypeUrl: m.GetTypeUrl(), ResponseNonce: m.GetNonce()}); err != nil && !errors.Is(err, io.EOF) {
			return err
		}
	}
}

// seen returns what the sink has, what was removed, how many updates there
// were, and why the stream ended.
func (s *deltaSink) seen() (names map[string]string, removed []string, updates int, ended error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return maps.Clone(s.names), slices.Clone(s.removed), s.updates, s.ended
}

// await waits until the sink has resources whose names match, and no others.
func (s *deltaSink) await(t *testing.T, count int, namespace string) {
	t.Helper()
	testwait.Eventually(t, patience, fmt.Sprintf("%d resources of %s", count, namespace), func() (string, bool) {
		names, _, _, ended := s.seen()
		n := 0
		for name := range names {
			if strings.Contains(name, " "+namespace+"/") {
				n++
			}
		}
		return fmt.Sprint(n, ended), n == count
	})
}

const steady = "- {name: load, type: sim, config: {services: 20, instances: 3, changes_per_second: 50, changes: {weight: 1}}}\n"

// Over many reloads of all kinds, in random order and by all triggers, no
// stream of a listener that stays ends, nothing is removed but what a registry
// had that is removed, and a registry whose block stays keeps its process.
func TestReloadUnderChurn(t *testing.T) {
	t.Parallel()
	rounds := *reloads
	if testing.Short() {
		rounds = 5
	}
	rnd := rand.New(rand.NewPCG(1, 2))
	port := testenv.FreePort(t)
	name, rate := "moving", 1
	build := func() string {
		listen, registries, drain := "127.0.0.1:0", []string{steady}, rnd.IntN(5)
		if rnd.IntN(2) == 0 {
			listen = fmt.Sprintf("[127.0.0.1:0, 127.0.0.1:%d]", port)
		}
		if rnd.IntN(3) == 0 { // a name and a block at once would make it another registry
			name = map[string]string{"moving": "renamed", "renamed": "moving"}[name]
		} else {
			rate = rnd.IntN(3)
		}
		registries = append(registries, fmt.Sprintf("- {name: %s, type: sim, config: {services: 5, changes_per_second: %d, changes: {weight: 1}}, translate: {namespace: stays}}\n", name, rate))
		if rnd.IntN(2) == 0 {
			registries = append(registries, "- {name: extra, type: sim, config: {services: 2, changes_per_second: 0}}\n")
		}
		rnd.Shuffle(len(registries), func(i, j int) { registries[i], registries[j] = registries[j], registries[i] })
		return fmt.Sprintf("listen: {xds: %s, admin: {address: 127.0.0.1:0, allow: [{peer: {cidr: 127.0.0.0/8}}]}}\ndrain: %ds\nregistries:\n%s", listen, drain, strings.Join(registries, ""))
	}
	const head = "listen: {xds: 127.0.0.1:0, admin: {address: 127.0.0.1:0, allow: [{peer: {cidr: 127.0.0.0/8}}]}}\nregistries:\n"
	r := serveFile(t, filepath.Join(t.TempDir(), "isthmus.yaml"), head+steady+
		"- {name: moving, type: sim, config: {services: 5, changes_per_second: 1, changes: {weight: 1}}, translate: {namespace: stays}}\n")
	go func() { // more than is kept; ends with the process
		for range r.stderr.lines { //nolint:revive // nothing is done with it
		}
	}()
	sinks := []*deltaSink{follow(t, r.xds[0]), follow(t, r.xds[0])}
	for _, s := range sinks {
		s.await(t, 80, "load")
	}
	pid := r.pids()["load"]
	count := func(metric string) float64 {
		n, err := strconv.ParseFloat(r.metric(metric), 64)
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	files, routines := count("process_open_fds"), count("go_goroutines")
	before, _, updates, _ := sinks[0].seen()
	for n := range rounds {
		if n%10 == 3 { // one that is refused
			bad := head + steady + "- {name: bad, type: sim, config: {servces: 1}}\n"
			replaceFile(t, r.file, bad)
			if code, a := post(t, r.admin+"/api/v1/reload", ""); code != http.StatusUnprocessableEntity || len(a.Problems) != 1 {
				t.Fatalf("round %d: a bad file: %d %+v", n, code, a)
			}
		}
		text := build() + fmt.Sprintf("# %d\n", n)
		switch n % 4 {
		case 0:
			replaceFile(t, r.file, text) // it is noticed
		case 1:
			replaceFile(t, r.file, text)
			r.signal(syscall.SIGHUP)
		case 2: // both at once
			replaceFile(t, r.file, text)
			r.signal(syscall.SIGHUP)
			r.signal(syscall.SIGHUP)
			r.reload(text)
		default:
			r.reload(text)
		}
		r.awaitFile(text)
		for i, s := range sinks {
			_, removed, _, ended := s.seen()
			removed = slices.DeleteFunc(removed, func(name string) bool { return strings.Contains(name, " extra/") })
			if ended != nil || len(removed) > 0 {
				t.Fatalf("round %d: sink %d: removed %q, ended %v", n, i, removed, ended)
			}
		}
		if now := r.pids(); now["load"] != pid {
			t.Fatalf("round %d: the process of the registry that stays: %v, it was %d", n, now, pid)
		}
	}
	names, _, now, _ := sinks[0].seen()
	for name := range before {
		if _, there := names[name]; !there {
			t.Errorf("%s is gone", name)
		}
	}
	if now == updates {
		t.Error("no update came over all of it")
	}
	t.Logf("%d reloads, %d updates; %s of them by result", rounds, now-updates, r.metric(`isthmus_config_reloads_total{result="success"}`))
	// What a reload leaves ends at the latest with the streams of a listener
	// that went; an added registry and a listener may be there.
	testwait.Eventually(t, patience, "what the reloads opened to be closed", func() (string, bool) {
		f, g := count("process_open_fds"), count("go_goroutines")
		return fmt.Sprintf("%v files, %v before; %v goroutines, %v before", f, files, g, routines), f <= files+20 && g <= routines+50
	})
	r.signal(syscall.SIGTERM)
	_ = r.cmd.Wait()
	if code := r.cmd.ProcessState.ExitCode(); code != exitOK {
		t.Errorf("exit code after SIGTERM = %d", code)
	}
}

// A configuration that is wrong leaves the one before in force: log, API,
// status and metrics say so, and where.
func TestReloadRefused(t *testing.T) {
	t.Parallel()
	head := "listen: {xds: 127.0.0.1:0, admin: {address: 127.0.0.1:0, allow: [{peer: {cidr: 127.0.0.0/8}}]}}\nregistries:\n"
	good := head + steady
	r := serveFile(t, filepath.Join(t.TempDir(), "isthmus.yaml"), good)
	s := follow(t, r.xds[0])
	s.await(t, 80, "load")
	pids := r.pids()
	_, taken, _ := strings.Cut(r.admin, "://")
	failures := 0
	for _, tt := range []struct{ name, text, field, reason string }{
		{"no YAML", good + "}", "", "YAML"},
		{"an alias within itself", "a: &a [*a]\nregistries: *a\n", "", "an alias (*) that contains itself"},
		{"a field that is not there", "x: 1\n" + good, "x", "unknown field"},
		{"what a plugin refuses", good + "- {name: b, type: sim, config: {services: -1, meta: {token: hush}}}\n", "registries[1].config.services", "-1"},
		{"what the plugin of a registry that runs refuses", head + strings.Replace(steady, "services: 20", "services: -1", 1), "registries[0].config.services", "-1"},
		{"what needs a restart", "limits: {tombstones: 5}\nlog: {format: json}\n" + good, "limits.tombstones", "cannot be changed while the bridge runs"},
		{"a port that is in use", strings.Replace(good, "xds: 127.0.0.1:0", "xds: [127.0.0.1:0, '"+taken+"']", 1), "listen", "address already in use"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			failures++
			replaceFile(t, r.file, tt.text)
			code, a := post(t, r.admin+"/api/v1/reload", "{}")
			if code != http.StatusUnprocessableEntity || a.Result != "failure" || a.SHA256 != sha(good) || len(a.Problems) == 0 ||
				a.Problems[0].Field != tt.field || !strings.Contains(a.Problems[0].Reason, tt.reason) || a.Problems[0].Line == 0 || a.Problems[0].File != r.file {
				t.Errorf("%d %+v", code, a)
			}
			line := r.find(r.stderr, `level=ERROR msg="the configuration was not reloaded; the previous one stays in force" trigger=API (.*)`)[1]
			if !strings.Contains(line, tt.reason) || strings.Contains(line, "hush") {
				t.Errorf("the log has %s", line)
			}
			if hash, result := r.inForce(); hash != sha(good) || result != "failure" {
				t.Errorf("in force: %s, %s", hash, result)
			}
		})
	}
	if code, a := post(t, r.admin+"/api/v1/compare", `{"config": "a: &a [*a]\nregistries: *a\n"}`); code != http.StatusUnprocessableEntity || len(a.Problems) != 1 || a.Problems[0].Line != 1 {
		t.Errorf("a comparison with an alias within itself: %d %+v", code, a)
	}
	if got, err := strconv.Atoi(r.metric(`isthmus_config_reloads_total{result="failure"}`)); err != nil || got < failures { // the file's own trigger may have come too
		t.Errorf("%d failures are counted, %v; want %d", got, err, failures)
	}
	if now := r.pids(); !maps.Equal(now, pids) {
		t.Errorf("processes %v, before %v", now, pids)
	}
	if r.metric(`isthmus_plugin_phase{phase="live",registry="load"}`) != "1" {
		t.Error("a plugin that was only asked shows in the metrics of the registry")
	}
	if a := r.reload(good); a.Changed {
		t.Errorf("the good one again changes %v", a.Changes)
	}
	if _, removed, _, ended := s.seen(); len(removed) > 0 || ended != nil {
		t.Errorf("a sink saw removed %q, ended %v", removed, ended)
	}
	r.end()
}

// The calls that change something refuse what a page of another origin can make
// a browser send.
func TestReloadCrossOrigin(t *testing.T) {
	t.Parallel()
	r := serveFile(t, filepath.Join(t.TempDir(), "isthmus.yaml"), "listen: {xds: 127.0.0.1:0, admin: {address: 127.0.0.1:0, allow: [{peer: {cidr: 127.0.0.0/8}}]}}\nregistries:\n"+steady)
	for _, path := range []string{"/api/v1/reload", "/api/v1/compare"} {
		for want, header := range map[int][]string{
			http.StatusForbidden:            {"Origin", "http://elsewhere.example.org"},
			http.StatusUnsupportedMediaType: {"Content-Type", "text/plain"},
			http.StatusOK:                   {"Origin", r.admin},
		} {
			body := `{"config": "registries: [{name: a}]"}`
			if path == "/api/v1/reload" {
				body = ""
			}
			if code, a := post(t, r.admin+path, body, header...); code != want {
				t.Errorf("%s with %q: %d %+v", path, header, code, a)
			}
		}
		if code, _ := post(t, r.admin+path, "", "Sec-Fetch-Site", "cross-site"); code != http.StatusForbidden {
			t.Errorf("%s from another site: %d", path, code)
		}
		if code, body := get(t, r.admin+path); code != http.StatusMethodNotAllowed {
			t.Errorf("GET %s: %d %s", path, code, body)
		}
		if code, a := post(t, r.admin+path, `{"x": 1}`); code != http.StatusBadRequest {
			t.Errorf("%s with an unknown field: %d %+v", path, code, a)
		}
	}
	r.end()
}

// What Kubernetes does when a ConfigMap changes is noticed.
func TestReloadConfigMap(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	mount := func(version, text string) {
		t.Helper()
		data := filepath.Join(dir, "..data_"+version)
		if err := os.Mkdir(data, 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(data, "isthmus.yaml"), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		link := filepath.Join(dir, "..data_tmp")
		if err := errors.Join(os.Symlink(filepath.Base(data), link), os.Rename(link, filepath.Join(dir, "..data"))); err != nil {
			t.Fatal(err)
		}
	}
	texts := make([]string, 4)
	for i := range texts {
		texts[i] = fmt.Sprintf("listen: {xds: 127.0.0.1:0, admin: {address: 127.0.0.1:0, allow: [{peer: {cidr: 127.0.0.0/8}}]}}\ndrain: %ds\nregistries:\n", i) + steady
	}
	mount("0", texts[0])
	file := filepath.Join(dir, "isthmus.yaml")
	if err := os.Symlink("..data/isthmus.yaml", file); err != nil {
		t.Fatal(err)
	}
	p := start(t, "serve", "--config", file)
	r := &reloaded{process: p, file: file, admin: "http://" + p.find(p.stderr, `msg=serving xds=\S+ admin=(\S+)`)[1]}
	for i, text := range texts[1:] {
		mount(fmt.Sprint(i+1), text)
		if err := os.RemoveAll(filepath.Join(dir, fmt.Sprintf("..data_%d", i))); err != nil {
			t.Fatal(err)
		}
		r.find(r.stderr, `msg="configuration reloaded" trigger=file sha256=`+sha(text))
	}
	r.end()
}

// filesOf writes a registry of files that has a service, and returns its line
// in the configuration.
func filesOf(t *testing.T, name, service, address, more string) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), name)
	text := "services:\n- {name: " + service + ", instances: [{id: one, address: " + address + ", port: 80}]}\n"
	if err := errors.Join(os.Mkdir(dir, 0o700), os.WriteFile(filepath.Join(dir, "data.yaml"), []byte(text), 0o600)); err != nil {
		t.Fatal(err)
	}
	return fmt.Sprintf("- {name: %s, type: file, config: {path: %s}%s}\n", name, dir, more)
}

// An added, a removed and a renamed registry touch no other, and another order
// decides conflicts anew. A sink sees a removal only of what was removed.
func TestReloadRegistries(t *testing.T) {
	t.Parallel()
	const head = "listen: {xds: 127.0.0.1:0, admin: {address: 127.0.0.1:0, allow: [{peer: {cidr: 127.0.0.0/8}}]}}\nregistries:\n"
	a := filesOf(t, "a", "web", "10.0.0.1", ", translate: {namespace: shared}")
	b := filesOf(t, "b", "web", "10.0.0.2", ", translate: {namespace: shared}")
	c := filesOf(t, "c", "api", "10.0.0.3", "")
	r := serveFile(t, filepath.Join(t.TempDir(), "isthmus.yaml"), head+a+b+steady)
	s := follow(t, r.xds[0])
	s.await(t, 80, "load")
	s.await(t, 2, "shared")
	pids := r.pids()
	owner := func(want string) {
		t.Helper()
		testwait.Eventually(t, patience, "web of "+want, func() (string, bool) {
			_, body := get(t, r.admin+"/api/v1/resources?q=shared/web")
			return body, strings.Contains(body, `"registry": "`+want+`"`)
		})
	}
	step := func(what, text string, fresh []string, removed ...string) {
		t.Helper()
		before := r.pids()
		r.reload(head + text)
		for name, pid := range r.pids() {
			if slices.Contains(fresh, name) == (pid == before[name]) {
				t.Errorf("%s: the process of %s is %d, it was %d", what, name, pid, before[name])
			}
		}
		var got []string
		testwait.Eventually(t, patience, fmt.Sprintf("%s: %q removed", what, removed), func() (string, bool) {
			var ended error
			_, got, _, ended = s.seen()
			slices.Sort(got)
			return fmt.Sprint(got, ended), slices.Equal(got, removed) && ended == nil
		})
		s.mu.Lock()
		s.removed = nil
		s.mu.Unlock()
	}
	owner("a")
	step("another order", b+a+steady, nil)
	owner("b")
	step("added", b+a+c+steady, []string{"c"})
	s.await(t, 2, "c")
	step("the owner removed", a+c+steady, nil)
	owner("a")
	step("renamed", strings.Replace(a, "name: a", "name: z", 1)+c+steady, []string{"z"})
	owner("z")
	names, _, _, _ := s.seen()
	var ofC []string
	for name := range names {
		if strings.Contains(name, " c/") {
			ofC = append(ofC, name)
		}
	}
	slices.Sort(ofC)
	renamed := strings.Replace(c, "name: c", "name: d", 1)
	step("renamed, and its namespace with it", strings.Replace(a, "name: a", "name: z", 1)+renamed+steady, []string{"d"}, ofC...)
	s.await(t, 2, "d")
	step("a block changed", strings.Replace(a, "name: a", "name: z", 1)+strings.Replace(renamed, "path:", "namespace: n, path:", 1)+steady, []string{"d"})
	if now := r.pids(); now["load"] != pids["load"] {
		t.Errorf("processes %v, before %v", now, pids)
	}
	for _, gone := range []string{"a", "b", "c"} {
		if _, metrics := get(t, r.admin+"/metrics"); strings.Contains(metrics, `registry="`+gone+`"`) {
			t.Errorf("there are metrics of %s", gone)
		}
	}
	if got := r.metric(`isthmus_plugin_starts_total{registry="d"}`); got != "2" {
		t.Errorf("%s starts of d", got)
	}
	r.end()
}

// Listeners come and go, and the streams of one that stays go on; an address
// may change hands.
func TestReloadListeners(t *testing.T) {
	t.Parallel()
	one, two, admin, other := testenv.FreePort(t), testenv.FreePort(t), testenv.FreePort(t), testenv.FreePort(t)
	text := func(xds, admin, more string) string {
		return "listen: {xds: " + xds + ", admin: {address: '" + admin + "', allow: [{peer: {cidr: 127.0.0.0/8}}]}" + more + "}\ndrain: 1s\nregistries:\n" + steady
	}
	local := func(port int) string { return fmt.Sprintf("127.0.0.1:%d", port) }
	r := serveFile(t, filepath.Join(t.TempDir(), "isthmus.yaml"), text("'"+local(one)+"'", local(admin), ""))
	first := follow(t, local(one))
	first.await(t, 80, "load")
	goesOn := func(what string, s *deltaSink) {
		t.Helper()
		_, _, before, _ := s.seen()
		testwait.Eventually(t, patience, what+": the stream to go on", func() (string, bool) {
			_, removed, now, ended := s.seen()
			return fmt.Sprint(now, removed, ended), now > before && len(removed) == 0 && ended == nil
		})
	}
	r.reload(text(fmt.Sprintf("['%s', '%s']", local(one), local(two)), local(admin), ""))
	goesOn("added", first)
	second := follow(t, local(two))
	second.await(t, 80, "load")

	r.reload(text("'"+local(two)+"'", local(admin), ", mcp: '"+local(other)+"'"))
	goesOn("the other one removed", second)
	testwait.Eventually(t, patience, "the stream of the listener that is removed to end", func() (string, bool) {
		_, removed, _, ended := first.seen()
		return fmt.Sprint(removed, ended), ended != nil && len(removed) == 0
	})
	if c, err := (&net.Dialer{Timeout: time.Second}).DialContext(t.Context(), "tcp", local(one)); err == nil {
		c.Close()
		t.Error("the listener that is removed is open")
	}
	// The same port by another name, taken from the listener that goes.
	r.reload(text(fmt.Sprintf("['%s', 'localhost:%d']", local(two), other), local(admin), ""))
	follow(t, local(other)).await(t, 80, "load")
	goesOn("a port that changes hands", second)

	// An address that cannot be had leaves everything as it is.
	bad := text(fmt.Sprintf("['localhost:%d', '203.0.113.1:1']", two), local(admin), "")
	replaceFile(t, r.file, bad)
	if code, a := post(t, r.admin+"/api/v1/reload", ""); code != http.StatusUnprocessableEntity {
		t.Errorf("an address of another machine: %d %+v", code, a)
	}
	goesOn("refused", second)
	follow(t, local(two)).await(t, 80, "load")

	// The admin port moves, too; who asked for it gets the answer.
	r.reload(text("'"+local(two)+"'", local(one), ""))
	r.admin = "http://" + local(one)
	if code, _ := get(t, r.admin+"/readyz"); code != http.StatusOK {
		t.Errorf("/readyz on the new port: %d", code)
	}
	goesOn("the admin port moved", second)
	r.end()
}

// Reloads that come at once are all carried out, one after the other, and the
// last file is in force.
func TestReloadsAtOnce(t *testing.T) {
	t.Parallel()
	text := func(n int) string {
		return "listen: {xds: 127.0.0.1:0, admin: {address: 127.0.0.1:0, allow: [{peer: {cidr: 127.0.0.0/8}}]}}\nregistries:\n" + steady + fmt.Sprintf("- {name: b, type: sim, config: {services: %d, changes_per_second: 0}}\n", n)
	}
	r := serveFile(t, filepath.Join(t.TempDir(), "isthmus.yaml"), text(1))
	for n := 2; n < 6; n++ {
		replaceFile(t, r.file, text(n))
		r.signal(syscall.SIGHUP)
		r.signal(syscall.SIGHUP)
		var both sync.WaitGroup
		for range 2 {
			both.Go(func() {
				resp, err := http.Post(r.admin+"/api/v1/reload", "application/json", bytes.NewReader(nil)) //nolint:noctx // the process ends with the test
				if err != nil {
					t.Error(err)
					return
				}
				defer resp.Body.Close()
				if body, _ := io.ReadAll(resp.Body); resp.StatusCode != http.StatusOK || !strings.Contains(string(body), sha(text(n))) {
					t.Errorf("%s %s", resp.Status, body)
				}
			})
		}
		both.Wait()
	}
	r.awaitFile(text(5))
	testwait.Eventually(t, patience, "b with 5 services", func() (string, bool) {
		_, body := get(t, r.admin+"/api/v1/services?registry=b")
		return body, strings.Contains(body, `"total": 5`)
	})
	r.end()
}

// validate --against says what a reload would change, and changes nothing.
func TestValidateAgainst(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	good := "listen: {xds: 127.0.0.1:0, admin: {address: 127.0.0.1:0, allow: [{peer: {cidr: 127.0.0.0/8}}]}}\nregistries:\n" + steady + "- {name: b, type: sim, config: {services: 1, meta: {token: hush}}}\n- {name: c, type: sim}\n"
	r := serveFile(t, filepath.Join(dir, "isthmus.yaml"), good)
	other := filepath.Join(dir, "other.yaml")
	_, address, _ := strings.Cut(r.admin, "://")
	for _, tt := range []struct {
		name, text string
		code       int
		out, err   []string
	}{
		{"the same", good, exitOK, []string{`^` + regexp.QuoteMeta(other) + ` is valid: 3 registries$`, `^nothing would change at ` + address + `, sha256 ` + sha(good) + `$`}, nil},
		{
			"much", strings.NewReplacer("- {name: c, type: sim}\n", "- {name: d, type: sim}\n- {name: e, type: sim, config: {services: 4}}\n", "hush", "hush2", "xds: 127.0.0.1:0", "xds: 127.0.0.1:1").Replace(good) + "drain: 1s\n",
			exitChanges,
			[]string{
				`^what would change at `, `^  registry added: e$`, `^  registry renamed: c, now d$`, `^  registry changed: b: config.meta.token$`,
				`^  listener added: listen.xds 127.0.0.1:1$`, `^  listener removed: listen.xds 127.0.0.1:0$`, `^  field changed: drain$`,
			},
			nil,
		},
		{"a restart", good + "limits: {tombstones: 5}\n", exitConfig, []string{`^  field changed: limits.tombstones$`}, []string{`other.yaml:\d+:\d+: limits.tombstones: cannot be changed while the bridge runs`}},
		{"invalid", good + "x: 1\n", exitConfig, nil, []string{`unknown field`}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			replaceFile(t, other, tt.text)
			p := start(t, "validate", "--config", other, "--against", address)
			if code := p.wait(); code != tt.code {
				t.Errorf("exit code %d, want %d", code, tt.code)
			}
			out, errs := strings.Join(p.stdout.seen, "\n"), strings.Join(p.stderr.seen, "\n")
			for _, want := range tt.out {
				if !regexp.MustCompile("(?m)" + want).MatchString(out) {
					t.Errorf("the output lacks %s:\n%s", want, out)
				}
			}
			for _, want := range tt.err {
				if !regexp.MustCompile("(?m)" + want).MatchString(errs) {
					t.Errorf("the errors lack %s:\n%s", want, errs)
				}
			}
			if strings.Contains(out+errs, "hush") {
				t.Errorf("a secret is told:\n%s%s", out, errs)
			}
		})
	}
	if hash, _ := r.inForce(); hash != sha(good) {
		t.Error("something was changed")
	}
	r.end()
	p := start(t, "validate", "--config", r.file, "--against", address)
	if code := p.wait(); code != exitFailed {
		t.Errorf("exit code without a bridge: %d", code)
	}
}

// At SIGTERM new streams are refused and those that there are end one after the
// other, with what changes until then and without a removal.
func TestDrain(t *testing.T) {
	t.Parallel()
	r := serveFile(t, filepath.Join(t.TempDir(), "isthmus.yaml"), "listen: {xds: 127.0.0.1:0, admin: {address: 127.0.0.1:0, allow: [{peer: {cidr: 127.0.0.0/8}}]}}\ndrain: 4s\nregistries:\n"+steady)
	var sinks []*deltaSink
	for range 4 {
		sinks = append(sinks, follow(t, r.xds[0]))
	}
	for _, s := range sinks {
		s.await(t, 80, "load")
	}
	began := time.Now()
	_, _, before, _ := sinks[0].seen()
	r.signal(syscall.SIGTERM)
	testwait.Eventually(t, patience, "/readyz to refuse", func() (string, bool) {
		code, body := get(t, r.admin+"/readyz")
		return body, code == http.StatusServiceUnavailable && strings.Contains(body, "the bridge is ending")
	})
	conn, err := grpc.NewClient("passthrough:///"+r.xds[0], grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	late, err := discovery.NewAggregatedDiscoveryServiceClient(conn).DeltaAggregatedResources(t.Context())
	if err == nil {
		_, err = late.Recv()
	}
	if !unavailable(err) {
		t.Errorf("a new stream: %v", err)
	}
	if code := r.wait(); code != exitOK {
		t.Errorf("exit code %d", code)
	}
	var ends []time.Duration
	last := 0
	for _, s := range sinks {
		<-s.done
		names, removed, updates, err := s.seen()
		if len(names) != 80 || len(removed) > 0 || !unavailable(err) {
			t.Errorf("%d resources, removed %q, ended with %v", len(names), removed, err)
		}
		ends = append(ends, s.at.Sub(began))
		last = max(last, updates)
	}
	slices.Sort(ends)
	for n, end := range ends { // each a second after the one before
		if least := time.Duration(n+1) * time.Second; end < least {
			t.Errorf("streams ended after %v; want the next one no earlier than %v", ends, least)
		}
	}
	if last <= before {
		t.Error("no change came while it drained")
	}
}

// The streams of a listener that a reload removes end one after the other as
// well, with what changes until then and without a removal. Those of the other
// listener go on.
func TestDrainOfListener(t *testing.T) {
	t.Parallel()
	one, two, admin := testenv.FreePort(t), testenv.FreePort(t), testenv.FreePort(t)
	text := func(ports ...int) string {
		var xds []string
		for _, p := range ports {
			xds = append(xds, fmt.Sprintf("'127.0.0.1:%d'", p))
		}
		return fmt.Sprintf("listen: {xds: [%s], admin: {address: '127.0.0.1:%d', allow: [{peer: {cidr: 127.0.0.0/8}}]}}\ndrain: 2s\nregistries:\n%s", strings.Join(xds, ", "), admin, steady)
	}
	r := serveFile(t, filepath.Join(t.TempDir(), "isthmus.yaml"), text(one, two))
	stays := follow(t, fmt.Sprintf("127.0.0.1:%d", two))
	stays.await(t, 80, "load")
	var sinks []*deltaSink
	for range 4 {
		s := follow(t, fmt.Sprintf("127.0.0.1:%d", one))
		s.await(t, 80, "load")
		sinks = append(sinks, s)
	}
	began := time.Now()
	_, _, before, _ := sinks[0].seen()
	r.reload(text(two))
	var ends []time.Duration
	last := 0
	for _, s := range sinks {
		<-s.done
		names, removed, updates, err := s.seen()
		if len(names) != 80 || len(removed) > 0 || !unavailable(err) || !strings.Contains(err.Error(), "no longer in the configuration") {
			t.Errorf("%d resources, removed %q, ended with %v", len(names), removed, err)
		}
		ends = append(ends, s.at.Sub(began))
		last = max(last, updates)
	}
	slices.Sort(ends)
	for n, end := range ends { // each half a second after the one before
		if least := time.Duration(n+1) * time.Second / 2; end < least {
			t.Errorf("streams ended after %v; want the next one no earlier than %v", ends, least)
		}
	}
	if last <= before {
		t.Error("no change came to the listener that goes")
	}
	_, _, before, _ = stays.seen()
	testwait.Eventually(t, patience, "the stream of the other listener to go on", func() (string, bool) {
		_, removed, now, ended := stays.seen()
		return fmt.Sprint(now, removed, ended), now > before && len(removed) == 0 && ended == nil
	})
	r.end()
}

// A second signal ends a bridge that drains at once.
func TestSecondSignal(t *testing.T) {
	t.Parallel()
	r := serveFile(t, filepath.Join(t.TempDir(), "isthmus.yaml"), "listen: {xds: 127.0.0.1:0, admin: {address: 127.0.0.1:0, allow: [{peer: {cidr: 127.0.0.0/8}}]}}\ndrain: 5m\nregistries:\n"+steady)
	pids := r.pids()
	s := follow(t, r.xds[0])
	s.await(t, 80, "load")
	r.signal(syscall.SIGTERM)
	testwait.Eventually(t, patience, "/readyz to refuse", func() (string, bool) {
		code, body := get(t, r.admin+"/readyz")
		return body, code == http.StatusServiceUnavailable
	})
	// The program hears a signal for a moment after it began to end.
	testwait.Eventually(t, patience, "the bridge to end", func() (string, bool) {
		_ = r.cmd.Process.Signal(syscall.SIGTERM)
		return "it runs", !testwait.Running(r.cmd.Process.Pid)
	})
	if code := r.wait(); code != -1 {
		t.Errorf("exit code %d, want an end by the signal", code)
	}
	testwait.Gone(t, patience, slices.Collect(maps.Values(pids))...)
}

// What says which registry is waited for, and which removals are held back, is
// changed in a running bridge, and touches neither a plugin nor a resource.
func TestReloadProtection(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	write := func(n int) { replaceFile(t, filepath.Join(dir, "services.yaml"), fileServices(n)) }
	write(20)
	text := func(protect, extra string) string {
		return "listen: {xds: 127.0.0.1:0, admin: {address: 127.0.0.1:0, allow: [{peer: {cidr: 127.0.0.0/8}}]}}\nregistries:\n" +
			"- {name: files, type: file, config: {path: " + dir + "}, protect: {" + protect + "}}\n" +
			"- {name: extra, type: consul, config: {address: \"http://127.0.0.1:1\"}" + extra + "}\n"
	}
	file := filepath.Join(t.TempDir(), "isthmus.yaml")
	replaceFile(t, file, text("hold: 1h", ""))
	r := &reloaded{process: start(t, "serve", "--config", file), file: file}
	at := r.find(r.stderr, `msg=serving xds=(\S+) admin=(\S+)`)
	r.xds, r.admin = []string{at[1]}, "http://"+at[2]
	r.find(r.stderr, `msg="listing complete" registry=files`)
	await(t, r.admin+"/readyz", `registry extra: the first listing is not complete: degraded: .*; waiting for it: `)
	pids := r.pids()
	load := func(protect, extra string, fields ...string) {
		t.Helper()
		a := r.reload(text(protect, extra))
		if a.Result != "success" {
			t.Fatalf("reload = %+v", a)
		}
		changes := fmt.Sprint(a.Changes["registries_changed"])
		for _, field := range fields {
			// Without a change the bridge saw the file before it was asked.
			if a.Changed && !strings.Contains(changes, field) {
				t.Errorf("%s are the changes, without %s", changes, field)
			}
		}
		if now := r.pids(); !maps.Equal(pids, now) {
			t.Errorf("the plugins are %v, and were %v", now, pids)
		}
	}
	reload := func(protect, extra string, fields ...string) {
		t.Helper()
		before := served(t, r.admin)
		load(protect, extra, fields...)
		if now := served(t, r.admin); !maps.Equal(before, now) {
			t.Errorf("%v is served, and was %v", now, before)
		}
	}

	reload("hold: 1h", ", sync_timeout: 1h", "sync_timeout")
	await(t, r.admin+"/api/v1/registries", `"name": "extra"(?s:.*)"required": true`)
	reload("hold: 1h", ", sync_timeout: 1h, required: false", "required")
	await(t, r.admin+"/readyz", `(?m)^ready\n(?s:.*)^registry extra: serves-without: `)
	reload("hold: 1h", ", sync_timeout: 1h", "required")
	await(t, r.admin+"/readyz", `^ready\n`) // what is open stays so

	reload("min_share: 0.1, hold: 1h", ", sync_timeout: 1h", "protect.min_share")
	write(3)
	await(t, r.admin+"/api/v1/services?registry=files", `"total": 3,?\n`)
	write(20)
	await(t, r.admin+"/api/v1/services?registry=files", `"total": 20,?\n`)

	reload("hold: 1h", ", sync_timeout: 1h", "protect.min_share")
	write(3)
	r.find(r.stderr, `msg="a removal looks like an accident and is paused" registry=files services=\d+ of=20`)
	await(t, r.admin+"/api/v1/registries", `"services": 3,\s*"instances": 3,`)
	held := heldServices(t, r.admin)
	load("hold: 1s", ", sync_timeout: 1h", "protect.hold") // it may be over already
	r.find(r.stderr, `msg="nobody decided on the paused removal; it is carried out" registry=files services=`+strconv.Itoa(held)+` `)
	await(t, r.admin+"/api/v1/services?registry=files", `"total": 3,?\n`)
	if now := r.pids(); !maps.Equal(pids, now) {
		t.Errorf("the plugins are %v, and were %v", now, pids)
	}
	r.end()
}
