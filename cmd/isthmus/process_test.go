package main

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/isthmus-mesh/isthmus/internal/testwait"
)

// patience is how long a process may take for one step on a busy machine.
const patience = time.Minute

// process is the program, started as users start it.
type process struct {
	t              *testing.T
	cmd            *exec.Cmd
	stdout, stderr *lineReader
}

// lineReader hands out what a process writes, line by line.
type lineReader struct {
	lines chan string // what the test has not read yet; more than a test here can come to makes the process wait
	seen  []string
}

func readLines(r io.Reader) *lineReader {
	l := &lineReader{lines: make(chan string, 10_000)}
	go func() {
		// Ends with the process.
		defer close(l.lines)
		for s := bufio.NewScanner(r); s.Scan(); {
			l.lines <- s.Text()
		}
	}()
	return l
}

func start(t *testing.T, args ...string) *process {
	t.Helper()
	return startWith(t, surroundings{}, args...)
}

// surroundings are what a process is started in.
type surroundings struct {
	env []string
	// out is where it writes all that it does, and read what can be read of it;
	// nil means two pipes. With terminal, out is its controlling one.
	out, read *os.File
	terminal  bool
}

func startWith(t *testing.T, in surroundings, args ...string) *process {
	t.Helper()
	p := &process{t: t, cmd: exec.CommandContext(t.Context(), "isthmus", args...)}
	p.cmd.Cancel = func() error { return p.cmd.Process.Signal(syscall.SIGTERM) }
	stateHome, err := os.MkdirTemp("", "isthmus-test-state-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(stateHome) }) // not t.TempDir: the process may still be ending
	p.cmd.Env = append(append(os.Environ(), "XDG_STATE_HOME="+stateHome), in.env...)
	var stdout, stderr io.Reader
	if in.out != nil {
		defer in.out.Close() // the process has its own
		p.cmd.Stdout, p.cmd.Stderr = in.out, in.out
		stdout, stderr = strings.NewReader(""), in.read
		if in.terminal {
			p.cmd.Stdin = in.out
			p.cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}
		}
	} else {
		if stdout, err = p.cmd.StdoutPipe(); err != nil {
			t.Fatal(err)
		}
		if stderr, err = p.cmd.StderrPipe(); err != nil {
			t.Fatal(err)
		}
	}
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	p.stdout, p.stderr = readLines(stdout), readLines(stderr)
	return p
}

// find reads lines until one matches, and returns what the groups matched.
func (p *process) find(l *lineReader, pattern string) []string {
	p.t.Helper()
	re := regexp.MustCompile(pattern)
	timer := time.NewTimer(patience)
	defer timer.Stop()
	for {
		select {
		case s, ok := <-l.lines:
			if !ok {
				p.t.Fatalf("the process ended and wrote nothing that matches %s, but:\n%s", pattern, strings.Join(l.seen, "\n"))
			}
			l.seen = append(l.seen, s)
			if m := re.FindStringSubmatch(s); m != nil {
				return m
			}
		case <-timer.C:
			p.t.Fatalf("nothing that matches %s was written within %s, but:\n%s", pattern, patience, strings.Join(l.seen, "\n"))
		}
	}
}

// findAll reads lines until each pattern has matched one, in any order, as
// lines of different goroutines come in any.
func (p *process) findAll(l *lineReader, patterns ...string) {
	p.t.Helper()
	for len(patterns) > 0 {
		p.find(l, strings.Join(patterns, "|"))
		line := l.seen[len(l.seen)-1]
		patterns = slices.DeleteFunc(slices.Clone(patterns), func(pattern string) bool { return regexp.MustCompile(pattern).MatchString(line) })
	}
}

// wait reads the rest of what the process writes and returns its exit code.
func (p *process) wait() int {
	p.t.Helper()
	timer := time.NewTimer(patience)
	defer timer.Stop()
	for _, l := range []*lineReader{p.stdout, p.stderr} {
		for open := true; open; {
			var s string
			select {
			case s, open = <-l.lines:
				l.seen = append(l.seen, s)
			case <-timer.C:
				p.t.Fatalf("the process did not end within %s; it wrote:\n%s", patience, strings.Join(l.seen, "\n"))
			}
		}
	}
	_ = p.cmd.Wait() // the exit code says it
	return p.cmd.ProcessState.ExitCode()
}

func (p *process) signal(s os.Signal) {
	p.t.Helper()
	if err := p.cmd.Process.Signal(s); err != nil {
		p.t.Fatal(err)
	}
}

func get(t *testing.T, url string) (code int, body string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		t.Fatal(err)
	}
	r, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Body.Close()
	b, err := io.ReadAll(r.Body)
	if err != nil {
		t.Fatal(err)
	}
	return r.StatusCode, string(b)
}

// serve serves until SIGTERM, says where, and a second one on the same ports
// says what to do.
func TestServe(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "isthmus.yaml")
	write := func(listen string) {
		t.Helper()
		if err := os.WriteFile(file, []byte("listen: "+listen+"\nregistries: [{name: load, type: sim, config: {services: 3, changes_per_second: 0}}]\n"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("{xds: 127.0.0.1:0, admin: 127.0.0.1:0}")
	p := start(t, "serve", "--config", file)
	at := p.find(p.stderr, `msg=serving xds=(\S+) admin=(\S+) .*version=(\S+)`)
	p.find(p.stderr, `msg="plugin started" registry=load adapter=sim version=`+regexp.QuoteMeta(at[3])+` `)
	p.find(p.stderr, `msg="listing complete" registry=load`)
	if code, body := get(t, "http://"+at[2]+"/readyz"); code != http.StatusOK {
		t.Errorf("/readyz = %d %s", code, body)
	}
	if code, body := get(t, "http://"+at[2]+"/api/v1/services"); code != http.StatusOK || strings.Count(body, ".load\"") != 3 {
		t.Errorf("/api/v1/services = %d %s", code, body)
	}
	if code, body := get(t, "http://"+at[2]+"/metrics"); code != http.StatusOK || !strings.Contains(body, "\nisthmus_") || !strings.Contains(body, fmt.Sprintf("\ngo_gc_gogc_percent %d\n", gcPercent)) {
		t.Errorf("/metrics = %d %.500s", code, body)
	}

	write("{xds: \"" + at[1] + "\", admin: 127.0.0.1:0}")
	second := start(t, "serve", "--config", file)
	if code := second.wait(); code != exitListen {
		t.Errorf("exit code on a port in use = %d, want %d", code, exitListen)
	}
	if text := strings.Join(second.stderr.seen, "\n"); !strings.Contains(text, "listen.xds") || !strings.Contains(text, "another program has the port") || !strings.Contains(text, file) {
		t.Errorf("message on a port in use: %s", text)
	}

	p.signal(syscall.SIGTERM)
	if code := p.wait(); code != exitOK {
		t.Errorf("exit code after SIGTERM = %d; it wrote:\n%s", code, strings.Join(p.stderr.seen, "\n"))
	}
}

// The ports answer whatever the plugins do: one that hangs keeps nobody from
// connecting, and shows where it hangs.
func TestHangingPlugin(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	for _, name := range []string{"silent", "noisy"} {
		script := "#!/bin/sh\nexec sleep 1000\n"
		if name == "noisy" {
			script = "#!/bin/sh\nwhile echo noise >&2; do :; done\n"
		}
		if err := os.WriteFile(filepath.Join(dir, "isthmus-adapter-"+name), []byte(script), 0o700); err != nil { //nolint:gosec // it is executed
			t.Fatal(err)
		}
	}
	file := filepath.Join(dir, "isthmus.yaml")
	if err := os.WriteFile(file, []byte(`
listen: {xds: 127.0.0.1:0, admin: 127.0.0.1:0}
plugin_dir: `+dir+`
registries:
- {name: load, type: sim, config: {services: 3, changes_per_second: 0}}
- {name: quiet, type: silent}
- {name: loud, type: noisy}
`), 0o600); err != nil {
		t.Fatal(err)
	}
	p := start(t, "serve", "--config", file)
	at := p.find(p.stderr, `msg=serving xds=(\S+) admin=(\S+)`)
	// Nothing tells of these but asking again.
	await := func(path string, patterns ...string) {
		t.Helper()
		testwait.Eventually(t, patience, fmt.Sprintf("%s to match all of %q", path, patterns), func() (string, bool) {
			_, body := get(t, "http://"+at[2]+path)
			return body, !slices.ContainsFunc(patterns, func(p string) bool { return !regexp.MustCompile(p).MatchString(body) })
		})
	}
	await("/readyz",
		`(?m)^registry quiet: the first listing is not complete: starting, no handshake for \d+ s, of at most 10 s; waiting for it: every type, since \S+Z$`,
		`(?m)^registry loud: the first listing is not complete: starting, no handshake for \d+ s, of at most 10 s; waiting for it: every type, since \S+Z$`)
	await("/api/v1/registries", `"explanation": "The plugin's process is being started. So far: no handshake for \d+ s, of at most 10 s."`)
	watch := start(t, "watch", "--address", at[1])
	await("/api/v1/sinks", `"node": "isthmus-watch~[^"]+",(?s:.*)"state": "waiting"`)
	// The others are followed as soon as it is clear that these two hang.
	p.find(p.stderr, `msg="listing complete" registry=load`)
	await("/readyz",
		`(?m)^registry quiet: .*the plugin hangs: .*no handshake on its standard output within 10s`,
		`(?m)^registry loud: .*no handshake on its standard output within 10s; its last words: noise; is this an adapter`)

	for _, p := range []*process{watch, p} {
		p.signal(syscall.SIGTERM)
		if code := p.wait(); code != exitOK {
			t.Errorf("exit code after SIGTERM = %d; it wrote:\n%s", code, strings.Join(p.stderr.seen[:min(100, len(p.stderr.seen))], "\n"))
		}
	}
}

// An instance and a resource that are listed again with more than is accepted,
// after their plugin was killed, are served as they were.
func TestTooLargeAfterRestart(t *testing.T) {
	dir := t.TempDir()
	write := func(name, text string) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	services := func(second string, meta int) string {
		var text strings.Builder
		text.WriteString("services:\n- name: web\n  instances:\n  - {id: web-1, address: 10.0.0.1, port: 80, meta: {version: v1")
		for i := range meta {
			fmt.Fprintf(&text, ", %s%d: %s", strings.Repeat("k", 50), i, strings.Repeat("v", 60))
		}
		return text.String() + "}}\n  - {id: " + second + ", address: 10.0.0.2, port: 80}\n"
	}
	route := func(value string) string {
		return "apiVersion: networking.istio.io/v1\nkind: VirtualService\nmetadata: {name: r, namespace: ns, annotations: {a: \"" + value + "\"}}\n" +
			"spec: {hosts: [r.example.org], http: [{route: [{destination: {host: web.example.org}}]}]}\n"
	}
	write("data.yaml", services("web-2", 0))
	write("route.yaml", route("small"))
	file := filepath.Join(t.TempDir(), "isthmus.yaml")
	if err := os.WriteFile(file, []byte("listen: {xds: 127.0.0.1:0, admin: 127.0.0.1:0}\nregistries: [{name: files, type: file, config: {path: "+dir+"}, owns: {collections: ['*']}}]\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	p := start(t, "serve", "--config", file)
	admin := "http://" + p.find(p.stderr, `msg=serving xds=\S+ admin=(\S+)`)[1]
	pid, err := strconv.Atoi(p.find(p.stderr, `msg="plugin started" .*pid=(\d+)`)[1])
	if err != nil {
		t.Fatal(err)
	}
	p.find(p.stderr, `msg="listing complete"`)
	small := served(t, admin)
	if len(small) != 4 { // the ServiceEntry, two WorkloadEntries, the VirtualService
		t.Fatalf("served: %v", small)
	}
	plugin, err := os.FindProcess(pid)
	if err != nil {
		t.Fatal(err)
	}
	// What happens while it is stopped it never sees.
	if err := plugin.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	write("data.yaml", services("web-3", 12_000))
	write("route.yaml", route(strings.Repeat("x", 2<<20)))
	if err := plugin.Kill(); err != nil {
		t.Fatal(err)
	}
	p.find(p.stderr, `level=ERROR msg="the plugin ended; what it has listed is served meanwhile"`)
	p.find(p.stderr, `msg="listing complete"`)
	large := served(t, admin)
	kept := 0
	for name, version := range small {
		if large[name] == version {
			kept++
		}
	}
	// The ServiceEntry has other endpoints, the third instance took the place
	// of the second, and the rest is as it was.
	if kept != 2 || len(large) != len(small) {
		t.Errorf("served %v, before the plugin was killed %v; want the WorkloadEntry of web-1 and the VirtualService unchanged", large, small)
	}
	_, problems := get(t, admin+"/api/v1/registries")
	for _, want := range []string{
		`"resource networking.istio.io/WorkloadEntry files/web-\S+"`, `"resource of unknown kind \\"ns/r\\""`, "more than 1048576 bytes .*the last good one is served",
	} {
		if !regexp.MustCompile(want).MatchString(problems) {
			t.Errorf("the problems lack %s:\n%.3000s", want, problems)
		}
	}
	p.signal(syscall.SIGTERM)
	if code := p.wait(); code != exitOK {
		t.Errorf("exit code after SIGTERM = %d", code)
	}
}

// What a plugin that was killed cannot list again, as it is invalid now or
// beyond a limit, is served as it was, until the registry says otherwise.
func TestKeptAfterRestart(t *testing.T) {
	dir := t.TempDir()
	write := func(name, text string) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	services := func(web ...int) string {
		text := "services:\n- {name: api, instances: [{id: api-1, address: 10.0.1.1, port: 80}]}\n- name: web\n  instances:\n"
		for _, n := range web {
			text += fmt.Sprintf("  - {id: web-%d, address: 10.0.0.%d, port: 80}\n", n, n)
		}
		return text
	}
	external := func(host string) string {
		return "apiVersion: networking.istio.io/v1\nkind: ServiceEntry\nmetadata: {name: ext, namespace: ns}\n" +
			"spec: {hosts: [\"" + host + "\"], ports: [{name: http, number: 80, protocol: HTTP}], resolution: DNS}\n"
	}
	write("data.yaml", services(1, 2))
	write("ext.yaml", external("ext.example.org"))
	file := filepath.Join(t.TempDir(), "isthmus.yaml")
	if err := os.WriteFile(file, []byte("listen: {xds: 127.0.0.1:0, admin: 127.0.0.1:0}\nlimits: {resources_per_registry: 7}\n"+
		"registries: [{name: files, type: file, config: {path: "+dir+"}, owns: {collections: ['*']}}]\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	p := start(t, "serve", "--config", file)
	admin := "http://" + p.find(p.stderr, `msg=serving xds=\S+ admin=(\S+)`)[1]
	pid, err := strconv.Atoi(p.find(p.stderr, `msg="plugin started" .*pid=(\d+)`)[1])
	if err != nil {
		t.Fatal(err)
	}
	p.find(p.stderr, `msg="listing complete"`)
	before := served(t, admin)
	if len(before) != 6 { // api and web, with one instance and two; ext
		t.Fatalf("served: %v", before)
	}
	plugin, err := os.FindProcess(pid)
	if err != nil {
		t.Fatal(err)
	}
	// What happens while it is stopped it never sees.
	if err := plugin.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	write("data.yaml", services(2, 3, 4, 5, 6, 7))
	write("ext.yaml", external("no host"))
	if err := plugin.Kill(); err != nil {
		t.Fatal(err)
	}
	p.find(p.stderr, `level=ERROR msg="the plugin ended; what it has listed is served meanwhile"`)
	p.find(p.stderr, `msg="listing complete"`)
	if after := served(t, admin); !maps.Equal(before, after) {
		t.Errorf("served %v, before the plugin was killed %v", after, before)
	}
	_, problems := get(t, admin+"/api/v1/registries")
	for _, want := range []string{`"service web"(?s:.*)left out(?s:.*)limits.resources_per_registry \(7\)`, `"resource networking.istio.io/ServiceEntry ns/ext"`} {
		if !regexp.MustCompile(want).MatchString(problems) {
			t.Errorf("the problems lack %s:\n%.3000s", want, problems)
		}
	}

	write("data.yaml", services(2, 3))
	if err := os.Remove(filepath.Join(dir, "ext.yaml")); err != nil {
		t.Fatal(err)
	}
	testwait.Eventually(t, patience, "web with its present instances, and no ext", func() (string, bool) {
		now := served(t, admin)
		same := 0
		for name, version := range before {
			if now[name] == version {
				same++
			}
		}
		_, ext := now["networking.istio.io/ServiceEntry ns/ext"]
		return fmt.Sprint(now), len(now) == 5 && same == 3 && !ext // api with its instance, and web-2
	})
	p.signal(syscall.SIGTERM)
	if code := p.wait(); code != exitOK {
		t.Errorf("exit code after SIGTERM = %d", code)
	}
}

// served returns the versions of what a server serves, by collection and name.
func served(t *testing.T, admin string) map[string]string {
	t.Helper()
	_, body := get(t, admin+"/api/v1/resources")
	var all struct {
		Items []struct{ Collection, Name, Version string }
	}
	if err := json.Unmarshal([]byte(body), &all); err != nil {
		t.Fatalf("%v: %.1000s", err, body)
	}
	out := make(map[string]string)
	for _, r := range all.Items {
		out[r.Collection+" "+r.Name] = r.Version
	}
	return out
}

// The demo shows the first listing and then single changes, and what it
// suggests works beside it.
func TestDemo(t *testing.T) {
	p := start(t, "demo", "--xds", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--changes-per-second", "20")
	address := p.find(p.stdout, `^  xDS    (\S+)$`)[1]
	admin := p.find(p.stdout, `^  admin  (http://\S+)/$`)[1]
	p.find(p.stdout, `push \d+ +\d+ resources at once: ServiceEntry `)
	p.find(p.stdout, `push \d+ +\d+ resources at once: WorkloadEntry `)
	p.find(p.stdout, `push \d+ +(upsert|remove) +WorkloadEntry +demo/`)

	watch := start(t, "watch", "--address", address, "--protocol", "delta", "--output", "json")
	watch.find(watch.stdout, `"op":"upsert"`)
	watch.signal(syscall.SIGINT)
	if code := watch.wait(); code != exitOK {
		t.Errorf("exit code of watch after SIGINT = %d; it wrote:\n%s", code, strings.Join(watch.stderr.seen, "\n"))
	}

	// Every metric is explained.
	reference, err := os.ReadFile("../../docs/reference/metrics.md")
	if err != nil {
		t.Fatal(err)
	}
	_, metrics := get(t, admin+"/metrics")
	names := regexp.MustCompile(`(?m)^# TYPE (isthmus_\S+) `).FindAllStringSubmatch(metrics, -1)
	if len(names) < 10 {
		t.Errorf("%d metrics:\n%s", len(names), metrics)
	}
	for _, name := range names {
		if !strings.Contains(string(reference), "| `"+name[1]+"` |") {
			t.Errorf("docs/reference/metrics.md lacks the metric %s", name[1])
		}
	}

	p.signal(syscall.SIGINT)
	if code := p.wait(); code != exitOK {
		t.Errorf("exit code of demo after SIGINT = %d; it wrote:\n%s", code, strings.Join(p.stderr.seen, "\n"))
	}
}
