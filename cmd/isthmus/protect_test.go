package main

import (
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/isthmus-mesh/isthmus/internal/testenv"
	"github.com/isthmus-mesh/isthmus/internal/testwait"
)

// fileServices is n services with an instance each, as the adapter file has
// them.
func fileServices(n int) string {
	var b strings.Builder
	b.WriteString("services:\n")
	for i := range n {
		fmt.Fprintf(&b, "- {name: s%02d, instances: [{id: s%02d-1, address: 10.0.0.%d, port: 80}]}\n", i, i, i+1)
	}
	return b.String()
}

// await waits until what a path of the admin address answers matches all
// patterns.
func await(t *testing.T, url string, patterns ...string) {
	t.Helper()
	testwait.Eventually(t, patience, fmt.Sprintf("%s to match all of %q", url, patterns), func() (string, bool) {
		_, body := get(t, url)
		return body, !slices.ContainsFunc(patterns, func(p string) bool { return !regexp.MustCompile(p).MatchString(body) })
	})
}

// heldServices is the number of services of the registry files whose removal is
// held back. It may be less than what went: services that a plugin sent alone,
// before the others, went as any service does.
func heldServices(t *testing.T, admin string) int {
	t.Helper()
	_, body := get(t, admin+"/api/v1/registries")
	var page struct {
		Items []struct {
			Name       string
			Protection struct{ Services int }
		}
	}
	if err := json.Unmarshal([]byte(body), &page); err != nil {
		t.Fatalf("%v in %s", err, body)
	}
	for _, r := range page.Items {
		if r.Name == "files" {
			return r.Protection.Services
		}
	}
	t.Fatalf("no registry files in %s", body)
	return 0
}

// A directory that is emptied by accident takes nothing from the mesh, in a
// running stream as in the listing of a plugin that starts again. An operator
// decides, by the program.
func TestProtect(t *testing.T) {
	dir := t.TempDir()
	write := func(n int) {
		t.Helper()
		// A rename, so that no half of a file is ever read.
		part := filepath.Join(dir, "part")
		if err := os.WriteFile(part, []byte(fileServices(n)), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(part, filepath.Join(dir, "services.yaml")); err != nil {
			t.Fatal(err)
		}
	}
	write(20)
	file := filepath.Join(t.TempDir(), "isthmus.yaml")
	if err := os.WriteFile(file, []byte("listen: {xds: 127.0.0.1:0, admin: {address: 127.0.0.1:0, allow: [{peer: {cidr: 127.0.0.0/8}}]}}\n"+
		"registries: [{name: files, type: file, config: {path: "+dir+"}}]\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	p := start(t, "serve", "--config", file)
	address := p.find(p.stderr, `msg=serving xds=\S+ admin=(\S+)`)[1]
	admin := "http://" + address
	pid, err := strconv.Atoi(p.find(p.stderr, `msg="plugin started" .*pid=(\d+)`)[1])
	if err != nil {
		t.Fatal(err)
	}
	p.find(p.stderr, `msg="listing complete"`)
	wantServed := func(services int) {
		t.Helper()
		if got := len(served(t, admin)); got != 2*services {
			t.Errorf("%d resources are served, want the ServiceEntry and the WorkloadEntry of %d services", got, services)
		}
	}
	wantServed(20)
	decide := func(verb string, code int, pattern string) {
		t.Helper()
		d := start(t, "removals", verb, "files", "--address", address)
		got := d.wait()
		if text := strings.TrimSpace(strings.Join(append(d.stdout.seen, d.stderr.seen...), "\n")); got != code || !regexp.MustCompile(pattern).MatchString(text) {
			t.Errorf("%s ended with %d and wrote %s; want %d and %s", verb, got, text, code, pattern)
		}
	}
	decide("allow", exitFailed, `registry files: no removal is paused`)

	t.Run("in a running stream", func(t *testing.T) {
		write(3)
		p.find(p.stderr, `level=WARN msg="a removal looks like an accident and is paused" registry=files services=\d+ of=20 endpoints=\d+ resources=0 put_back=\d+ until=\S+ decide="isthmus removals allow files or isthmus removals keep files"`)
		await(t, admin+"/api/v1/registries", `"phase": "removal-paused"`, `"services": 3,\s*"instances": 3,`)
		held := heldServices(t, admin)
		wantServed(3 + held)
		await(t, admin+"/readyz", fmt.Sprintf(`^ready\nregistry files: removal-paused: a removal that looks like an accident is paused until \S+Z: it would remove %d of 20 services, %[1]d endpoints(; \d+ resources of these had gone and are put back)?, since \S+Z\. .* isthmus removals allow files\. .*isthmus removals keep files .*\n$`, held))
		await(t, admin+"/api/v1/registries", fmt.Sprintf(`"protection": \{\s*"pending": true,\s*"services": %d,\s*"of": 20,\s*"endpoints": %[1]d`, held))
		await(t, admin+"/", "removal-paused", fmt.Sprintf("would remove %d of 20 services, %[1]d endpoints", held))
		await(t, admin+"/metrics", `(?m)^isthmus_registry_removal_paused\{registry="files"\} 1$`, fmt.Sprintf(`(?m)^isthmus_registry_removals\{registry="files"\} %d$`, 2*held))
		await(t, admin+"/api/v1/removals?registry=files&limit=5", fmt.Sprintf(`"total": %d`, 2*held), `"reason": "the registry removed it (together with most of its services|before the run of removals looked like an accident, and it was put back); the removal is paused"`, `"since": "20`, `"until": "20`)
		write(12)
		await(t, admin+"/api/v1/registries", `"services": 12,\s*"instances": 12,`)
		if left := heldServices(t, admin); left == 0 || left > 8 {
			t.Errorf("%d services are held back, want some of the 8 that are not there", left)
		} else {
			wantServed(12 + left)
			await(t, admin+"/api/v1/removals", fmt.Sprintf(`"total": %d`, 2*left))
		}
		write(20)
		p.find(p.stderr, `level=INFO msg="the registry has everything again; no removal is paused any more"`)
		await(t, admin+"/api/v1/registries", `"phase": "live"`)
		await(t, admin+"/readyz", `^ready\n$`)
		await(t, admin+"/api/v1/registries", `"services": 20,\s*"instances": 20,`)
		wantServed(20)
	})

	t.Run("in a new listing", func(t *testing.T) {
		plugin, err := os.FindProcess(pid)
		if err != nil {
			t.Fatal(err)
		}
		// What happens while it is stopped it never sees.
		if err := plugin.Signal(syscall.SIGSTOP); err != nil {
			t.Fatal(err)
		}
		write(1)
		if err := plugin.Kill(); err != nil {
			t.Fatal(err)
		}
		p.find(p.stderr, `msg="a removal looks like an accident and is paused" registry=files services=19 of=20`)
		wantServed(20)
		decide("keep", exitOK, `^registry files: removal kept: 19 services, 19 endpoints, 0 other resources$`)
		decide("keep", exitFailed, `is kept already`)
		await(t, admin+"/api/v1/registries", `"phase": "live"`, `"pending": false`)
		await(t, admin+"/readyz", `^ready\nregistry files: removal-kept: an operator kept what the registry no longer has; it would remove 19 of 20 services, 19 endpoints, since `)
		await(t, admin+"/api/v1/removals", `"total": 38`, "an operator keeps it")
		list := start(t, "removals", "list", "files", "--address", address)
		if code := list.wait(); code != exitOK || strings.Count(strings.Join(list.stdout.seen, "\n"), "an operator keeps it") != 38 {
			t.Errorf("removals list ended with %d and wrote %q", code, list.stdout.seen)
		}
		write(4) // three are back
		await(t, admin+"/api/v1/removals", `"total": 32`)
		wantServed(20)
		decide("allow", exitOK, `^registry files: removal allowed: 16 services, 16 endpoints, 0 other resources$`)
		wantServed(4)
		await(t, admin+"/api/v1/removals", `"total": 0`)
	})

	t.Run("another origin decides nothing", func(t *testing.T) {
		for header, code := range map[string]int{"": http.StatusUnsupportedMediaType, "Origin": http.StatusForbidden} {
			req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, admin+"/api/v1/registries/files/accept", strings.NewReader("{}"))
			if err != nil {
				t.Fatal(err)
			}
			if header != "" {
				req.Header.Set("Content-Type", "application/json")
				req.Header.Set(header, "http://pages.example.org")
			}
			r, err := http.DefaultClient.Do(req)
			if err != nil {
				t.Fatal(err)
			}
			_ = r.Body.Close()
			if r.StatusCode != code {
				t.Errorf("POST with %q = %d, want %d", header, r.StatusCode, code)
			}
		}
	})

	for _, args := range [][]string{{"removals", "allow"}, {"removals", "allow", "files", "--address", "nowhere"}, {"removals", "list", "a", "b"}} {
		if code := start(t, args...).wait(); code != exitUsage {
			t.Errorf("isthmus %q ended with %d, want %d", args, code, exitUsage)
		}
	}
	p.signal(syscall.SIGTERM)
	if code := p.wait(); code != exitOK {
		t.Errorf("exit code after SIGTERM = %d", code)
	}
}

// A bridge that was killed, and starts again against registries that came up
// empty meanwhile, keeps what it restored, for an operator to decide: that of a
// large registry as that of a small one. A refusal does not outlive the bridge,
// which then asks again; what was accepted does not come back.
func TestRestartAgainstEmptyRegistries(t *testing.T) {
	t.Parallel()
	const large, small = 20, 3
	w := newFileWorld(t, filepath.Join(t.TempDir(), "state"))
	w.write("dc1", "services.yaml", fileServices(large))
	w.write("dc2", "services.yaml", fileServices(small))
	p := w.serve()
	listed := w.listed(p)
	old := w.sink()
	old.until(2 * (large + small))
	before := maps.Clone(old.have)
	w.kept(listed)
	wantKept := func() {
		t.Helper()
		held := func(registry string, n int) string {
			return fmt.Sprintf(`level=WARN msg="a removal looks like an accident and is paused" registry=%s services=%d of=%[2]d endpoints=%[2]d `, registry, n)
		}
		p.findAll(p.stderr, held("dc1", large), held("dc2", small))
		await(t, "http://"+w.api+"/api/v1/registries", `(?s)"name": "dc1".*"phase": "removal-paused".*"name": "dc2".*"phase": "removal-paused"`)
		await(t, "http://"+w.api+"/api/v1/removals", fmt.Sprintf(`"total": %d`, 2*(large+small)), "a complete listing was without it and most other services")
		await(t, "http://"+w.api+"/readyz", `^ready\nregistry dc1: removal-paused: .*\nregistry dc2: removal-paused: .*\n$`)
		fresh := w.sink()
		fresh.until(2 * (large + small))
		if diff := cmp.Diff(before, fresh.have); diff != "" {
			t.Errorf("what a new sink has (-before +after):\n%s", diff)
		}
	}
	w.write("dc1", "services.yaml", "")
	w.write("dc2", "services.yaml", "")
	for _, end := range []syscall.Signal{syscall.SIGKILL, syscall.SIGTERM} {
		w.stop(p, end)
		p = w.serve()
		wantKept()
		d := start(t, "removals", "keep", "dc1", "--address", w.api)
		if code := d.wait(); code != exitOK {
			t.Errorf("removals keep ended with %d and wrote %q", code, d.stderr.seen)
		}
	}
	// One is back, and one is meant to be empty.
	w.write("dc2", "services.yaml", fileServices(small))
	p.find(p.stderr, `msg="the registry has everything again; no removal is paused any more" registry=dc2`)
	d := start(t, "accept", "dc1", "--address", w.api) // the former name
	if code := d.wait(); code != exitOK || !strings.Contains(strings.Join(append(d.stdout.seen, d.stderr.seen...), "\n"), "isthmus removals allow") {
		t.Errorf("accept ended with %d and wrote %q, %q", code, d.stdout.seen, d.stderr.seen)
	}
	for _, op := range old.until(2 * large) {
		if !strings.HasPrefix(op, "remove ServiceEntry dc1/") && !strings.HasPrefix(op, "remove WorkloadEntry dc1/") {
			t.Errorf("the sink that was there all the time got %s", op)
		}
	}
	if len(old.have) != 2*small {
		t.Errorf("it has %d resources left, want %d", len(old.have), 2*small)
	}
	w.stop(p, syscall.SIGTERM)
	p = w.serve()
	w.listed(p)
	if got := len(served(t, "http://"+w.api)); got != 2*small {
		t.Errorf("after a restart %d resources are served, want %d", got, 2*small)
	}
	await(t, "http://"+w.api+"/readyz", `^ready\n$`)
	w.stop(p, syscall.SIGTERM)
}

// Of two registries that cannot be reached the required one holds, and is
// named; when it is there, everything is open without the optional one.
func TestRequired(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "later")
	file := filepath.Join(t.TempDir(), "isthmus.yaml")
	closed := fmt.Sprintf("127.0.0.1:%d", testenv.FreePort(t))
	reverse := start(t, "watch", "--listen", "127.0.0.1:0", "--protocol", "mcp")
	dialled := reverse.find(reverse.stderr, `listening at (\S+)`)[1]
	if err := os.WriteFile(file, []byte(`
listen: {xds: 127.0.0.1:0, admin: {address: 127.0.0.1:0, allow: [{peer: {cidr: 127.0.0.0/8}}]}}
sinks: [{address: "`+dialled+`"}]
registries:
- {name: files, type: file, config: {path: `+dir+`}, sync_timeout: 1s}
- {name: extra, type: consul, required: false, config: {address: "http://`+closed+`"}}
`), 0o600); err != nil {
		t.Fatal(err)
	}
	p := start(t, "serve", "--config", file)
	at := p.find(p.stderr, `msg=serving xds=(\S+) admin=(\S+)`)
	admin := "http://" + at[2]
	p.findAll(p.stderr,
		`level=WARN msg="the registry is optional and its first listing is not complete; its types are served without it" registry=extra`,
		`level=WARN msg="types wait for a required registry; sinks that connect get nothing of them" registry=files waiting_since=\S+ waiting="?\[`)
	await(t, admin+"/readyz", `^registry files: the first listing is not complete: degraded: .*; waiting for it: .* since \S+Z\n`)
	await(t, admin+"/metrics", `(?m)^isthmus_waiting\{collection="networking.istio.io/ServiceEntry"\} 1$`)
	_, body := get(t, admin+"/api/v1/registries")
	var all struct {
		Items []struct {
			Name               string
			Required, Released bool
			Waiting, Holds     []string
			WaitingSince       string `json:"waiting_since"`
		}
	}
	if err := json.Unmarshal([]byte(body), &all); err != nil {
		t.Fatal(err)
	}
	if r := all.Items[0]; !r.Required || r.Released || !slices.Contains(r.Waiting, "networking.istio.io/ServiceEntry") || !slices.Equal(r.Waiting, r.Waiting) || r.WaitingSince == "" {
		t.Errorf("the required registry is shown as %+v", r)
	}
	if r := all.Items[1]; r.Required || !r.Released || len(r.Waiting) > 0 {
		t.Errorf("the optional registry is shown as %+v", r)
	}
	await(t, admin+"/", `types that wait for it, for \d+ s: .*ServiceEntry`, "optional: served without it")
	for _, protocol := range []string{"sotw", "delta", "mcp", "mcp, dialled"} {
		watch := reverse
		if protocol != "mcp, dialled" {
			watch = start(t, "watch", "--address", at[1], "--protocol", protocol)
		}
		watch.find(watch.stderr, `networking.istio.io/ServiceEntry.*: waiting since \S+Z: registry files has not completed its first listing`)
		watch.signal(syscall.SIGTERM)
		if code := watch.wait(); code != exitOK {
			t.Errorf("watch ended with %d", code)
		}
	}

	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "services.yaml"), []byte(fileServices(2)), 0o600); err != nil {
		t.Fatal(err)
	}
	await(t, admin+"/readyz", `(?m)^ready\n(?s:.*)^registry extra: serves-without: it is optional, and served without it, as the first listing is not complete: degraded: .*connection refused`)
	await(t, admin+"/metrics", `(?m)^isthmus_waiting\{collection="networking.istio.io/ServiceEntry"\} 0$`)
	if got := len(served(t, admin)); got != 4 {
		t.Errorf("%d resources are served, want those of 2 services", got)
	}
	dump := start(t, "dump", "--config", file)
	if code := dump.wait(); code != exitOK || strings.Count(strings.Join(dump.stdout.seen, "\n"), "kind: ServiceEntry") != 2 ||
		!strings.Contains(strings.Join(dump.stderr.seen, "\n"), "registry extra: serves-without: it is optional, and served without it") {
		t.Errorf("dump ended with %d and wrote %q, %q", code, dump.stdout.seen, dump.stderr.seen)
	}
	p.signal(syscall.SIGTERM)
	if code := p.wait(); code != exitOK {
		t.Errorf("exit code after SIGTERM = %d", code)
	}
}
