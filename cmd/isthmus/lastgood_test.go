package main

import (
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/isthmus-mesh/isthmus/internal/testenv"
	"github.com/isthmus-mesh/isthmus/internal/testwait"
)

// fileWorld is a configuration with two file registries, on ports that stay the
// same.
type fileWorld struct {
	t                          *testing.T
	config, stateDir, xds, api string
	dirs                       map[string]string // of the registries
}

func newFileWorld(t *testing.T, stateDir string) *fileWorld {
	t.Helper()
	base := t.TempDir()
	w := &fileWorld{
		t: t, config: filepath.Join(base, "isthmus.yaml"), stateDir: stateDir, dirs: map[string]string{},
		xds: fmt.Sprintf("127.0.0.1:%d", testenv.FreePort(t)), api: fmt.Sprintf("127.0.0.1:%d", testenv.FreePort(t)),
	}
	for _, name := range []string{"dc1", "dc2"} {
		w.dirs[name] = filepath.Join(base, name)
		if err := os.Mkdir(w.dirs[name], 0o700); err != nil {
			t.Fatal(err)
		}
	}
	w.configure("")
	w.write("dc1", "services.yaml", fileService("web", 1, 2, 3)+fileService("db", 4))
	w.write("dc2", "services.yaml", fileService("mail", 5, 6))
	return w
}

// configure writes the configuration; more is added to it.
func (w *fileWorld) configure(more string, registries ...string) {
	w.t.Helper()
	if registries == nil {
		registries = []string{"dc1", "dc2"}
	}
	text := fmt.Sprintf("listen: {xds: %q, admin: {address: %q, allow: [{peer: {cidr: 127.0.0.0/8}}]}}\nstate: {dir: %q}\n%sregistries:\n", w.xds, w.api, w.stateDir, more)
	for _, name := range registries {
		text += fmt.Sprintf("- {name: %s, type: file, config: {path: %q}}\n", name, w.dirs[name])
	}
	if err := os.WriteFile(w.config, []byte(text), 0o600); err != nil {
		w.t.Fatal(err)
	}
}

// fileService is a service in the words of the file adapter.
func fileService(name string, instances ...int) string {
	text := fmt.Sprintf("services:\n- name: %s\n  ports: [{name: http, number: 80}]\n  instances:\n", name)
	for _, n := range instances {
		text += fmt.Sprintf("  - {id: i%d, address: 10.0.0.%d}\n", n, n)
	}
	return text + "---\n"
}

// write changes a file of a registry in one step.
func (w *fileWorld) write(registry, name, text string) {
	w.t.Helper()
	path := filepath.Join(w.dirs[registry], name)
	if err := os.WriteFile(path+".new", []byte(text), 0o600); err != nil {
		w.t.Fatal(err)
	}
	if err := os.Rename(path+".new", path); err != nil {
		w.t.Fatal(err)
	}
}

// breakAll makes every registry one whose listing does not become complete.
func (w *fileWorld) breakAll() {
	for name := range w.dirs {
		w.write(name, "broken.yaml", "services: [")
	}
}

func (w *fileWorld) serve() *process {
	w.t.Helper()
	p := start(w.t, "serve", "--config", w.config)
	p.find(p.stderr, `msg=serving `)
	return p
}

// listed waits for the listings of both registries, and returns a time after
// them.
func (w *fileWorld) listed(p *process) time.Time {
	w.t.Helper()
	p.findAll(p.stderr, `msg="listing complete" registry=dc1`, `msg="listing complete" registry=dc2`)
	return time.Now()
}

// kept waits until all that was there at a time is on disk.
func (w *fileWorld) kept(at time.Time) {
	w.t.Helper()
	written := regexp.MustCompile(`(?m)^isthmus_state_written_timestamp_seconds (\S+)$`)
	testwait.Eventually(w.t, patience, fmt.Sprintf("the last good state to be written after %v", at), func() (string, bool) {
		_, body := get(w.t, "http://"+w.api+"/metrics")
		m := written.FindStringSubmatch(body)
		if m == nil {
			return body, false
		}
		seconds, err := strconv.ParseFloat(m[1], 64)
		return m[1], err == nil && seconds > float64(at.UnixMilli())/1000
	})
}

// stop ends the program in good order, or at once.
func (w *fileWorld) stop(p *process, s syscall.Signal) {
	w.t.Helper()
	p.signal(s)
	p.wait()
}

// sink is `isthmus watch`, and what it printed.
type sink struct {
	*process
	t    *testing.T
	have map[string]string // version by collection and name
	ops  []string          // what it got since it was asked last, sorted
}

func (w *fileWorld) sink() *sink {
	w.t.Helper()
	return &sink{start(w.t, "watch", "--address", w.xds, "--output", "json"), w.t, map[string]string{}, nil}
}

// until reads changes until it has seen so many, and as many as come within a
// moment.
func (s *sink) until(n int) []string {
	s.t.Helper()
	var ops []string
	patient := time.After(patience)
	for {
		var moment <-chan time.Time
		if len(ops) >= n {
			moment = time.After(time.Second)
		}
		select {
		case line, open := <-s.stdout.lines:
			if !open {
				s.t.Fatalf("the sink ended: %q", s.stderr.seen)
			}
			var c struct{ Collection, Name, Op, Version string }
			if err := json.Unmarshal([]byte(line), &c); err != nil {
				s.t.Fatalf("%s: %v", line, err)
			}
			_, kind, _ := strings.Cut(c.Collection, "/")
			ops = append(ops, c.Op+" "+kind+" "+c.Name)
			s.have[kind+" "+c.Name] = c.Version
			if c.Op == "remove" {
				delete(s.have, kind+" "+c.Name)
			}
		case <-moment:
			slices.Sort(ops)
			return ops
		case <-patient:
			s.t.Fatalf("the sink got %d changes within %s, want %d: %q; it says %q", len(ops), patience, n, ops, s.stderr.seen)
		}
	}
}

// With every registry down a restarted bridge serves what it served before, a
// sink that comes new gets everything, one that was there gets nothing, and
// when the registries are back both get the difference.
func TestLastGoodState(t *testing.T) {
	t.Parallel()
	w := newFileWorld(t, filepath.Join(t.TempDir(), "state"))
	p := w.serve()
	listed := w.listed(p)
	all := []string{
		"upsert ServiceEntry dc1/db", "upsert ServiceEntry dc1/web", "upsert ServiceEntry dc2/mail",
		"upsert WorkloadEntry dc1/db-i4", "upsert WorkloadEntry dc1/web-i1", "upsert WorkloadEntry dc1/web-i2", "upsert WorkloadEntry dc1/web-i3",
		"upsert WorkloadEntry dc2/mail-i5", "upsert WorkloadEntry dc2/mail-i6",
	}
	old := w.sink()
	got := old.until(len(all))
	for i, op := range got { // the name has a hash, or has none
		if !strings.HasPrefix(op, all[i][:strings.LastIndex(all[i], "/")]) {
			t.Fatalf("the first sink got %q", got)
		}
	}
	all = got
	before := old.have
	if code, body := get(t, "http://"+w.api+"/readyz"); code != http.StatusOK || body != "ready\n" {
		t.Errorf("/readyz = %d %q", code, body)
	}
	w.kept(listed)

	w.breakAll()
	w.stop(p, syscall.SIGKILL)
	p = w.serve()
	fresh := w.sink()
	if diff := cmp.Diff(all, fresh.until(len(all))); diff != "" {
		t.Errorf("a new sink got something else than before (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff(before, fresh.have); diff != "" {
		t.Errorf("versions of a new sink (-want +got):\n%s", diff)
	}
	p.find(p.stderr, `msg="the registry cannot be followed; what is known is served" registry=dc1`)
	readyz := func(what string, status int, says func(body string) bool) {
		t.Helper()
		testwait.Eventually(t, patience, "/readyz to say "+what, func() (string, bool) {
			code, body := get(t, "http://"+w.api+"/readyz")
			return fmt.Sprintf("%d %q", code, body), code == status && says(body)
		})
	}
	readyz("what it waits for", http.StatusOK, func(body string) bool {
		return strings.Contains(body, "registry dc1: serves-restored: restored, it is served as it was ") && strings.Contains(body, "waits for broken.yaml")
	})
	if _, body := get(t, "http://"+w.api+"/api/v1/registries"); strings.Count(body, `"phase": "restored"`) != 2 || strings.Count(body, `"restored": "20`) != 2 {
		t.Errorf("/api/v1/registries = %s", body)
	}
	if _, body := get(t, "http://"+w.api+"/metrics"); strings.Count(body, "\nisthmus_registry_restored_timestamp_seconds{") != 2 || !strings.Contains(body, "\nisthmus_state_failing 0\n") {
		t.Errorf("/metrics = %s", body)
	}
	if _, body := get(t, "http://"+w.api+"/"); !strings.Contains(body, "served as it was") || !strings.Contains(body, w.stateDir) {
		t.Errorf("the page = %s", body)
	}

	// One registry is back: db is gone, web has another instance.
	w.write("dc1", "services.yaml", fileService("web", 1, 2, 7))
	if err := os.Remove(filepath.Join(w.dirs["dc1"], "broken.yaml")); err != nil {
		t.Fatal(err)
	}
	for name, s := range map[string]*sink{"old": old, "new": fresh} {
		ops := s.until(4)
		removed, added := 0, 0
		for _, op := range ops {
			switch {
			case strings.HasPrefix(op, "remove ServiceEntry dc1/db"), strings.HasPrefix(op, "remove WorkloadEntry dc1/db"), strings.HasPrefix(op, "remove WorkloadEntry dc1/web"):
				removed++
			case strings.HasPrefix(op, "upsert WorkloadEntry dc1/web"):
				added++
			default:
				t.Errorf("the %s sink got %s", name, op)
			}
		}
		if removed != 3 || added != 1 {
			t.Errorf("the %s sink got %q, want the removal of db, its instance and one of web, and one more of web", name, ops)
		}
	}
	if diff := cmp.Diff(old.have, fresh.have); diff != "" {
		t.Errorf("the sinks have (-old +new):\n%s", diff)
	}
	p.find(p.stderr, `msg="listing complete" registry=dc1`)
	readyz("that dc2 alone is restored", http.StatusOK, func(body string) bool {
		return !strings.Contains(body, "dc1") && strings.Contains(body, "registry dc2: serves-restored: restored")
	})
	w.stop(p, syscall.SIGTERM)

	// A registry that the configuration does not have any more is neither
	// served nor kept.
	w.breakAll()
	w.configure("", "dc1")
	p = w.serve()
	p.find(p.stderr, `msg="the registry is no longer in the configuration: its saved state is not served, and is deleted" .*registry=dc2`)
	if ops := w.sink().until(4); slices.ContainsFunc(ops, func(op string) bool { return strings.Contains(op, "dc2") }) || len(ops) != 4 {
		t.Errorf("without dc2 a new sink got %q", ops)
	}
	w.stop(p, syscall.SIGTERM)
	w.configure("")
	p = w.serve()
	p.find(p.stderr, `msg="restored; served until the first listing is complete" .*registry=dc1`)
	readyz("that dc2 is not restored", http.StatusServiceUnavailable, func(body string) bool {
		return strings.Contains(body, "registry dc2: the first listing is not complete")
	})
	w.stop(p, syscall.SIGTERM)
}

// The second bridge on a directory names the first one and ends.
func TestLastGoodStateTwice(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "state")
	first, second := newFileWorld(t, dir), newFileWorld(t, dir)
	p := first.serve()
	other := start(t, "serve", "--config", second.config)
	if code := other.wait(); code != exitFailed {
		t.Errorf("exit code of the second = %d, want %d", code, exitFailed)
	}
	text := strings.Join(other.stderr.seen, "\n")
	for _, want := range []string{dir, "in use by another isthmus (pid " + strconv.Itoa(p.cmd.Process.Pid) + ")", "state.dir"} {
		if !strings.Contains(text, want) {
			t.Errorf("the second says %q, which lacks %q", text, want)
		}
	}
	first.stop(p, syscall.SIGTERM)
	first.stop(second.serve(), syscall.SIGTERM)
}

// Without a directory that can be used the bridge serves, and says so.
func TestLastGoodStateNowhere(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	w := newFileWorld(t, filepath.Join(file, "state"))
	p := start(t, "serve", "--config", w.config)
	p.find(p.stderr, `level=ERROR msg="the last good state cannot be written; .*not a directory; .*state.dir`)
	p.find(p.stderr, `msg=serving `)
	if n := len(w.sink().until(9)); n != 9 {
		t.Errorf("a sink got %d resources", n)
	}
	if _, body := get(t, "http://"+w.api+"/api/v1/conditions"); strings.Count(body, `"condition": "state-failing"`) != 1 {
		t.Errorf("/api/v1/conditions = %s", body)
	}
	if _, body := get(t, "http://"+w.api+"/metrics"); !strings.Contains(body, "\nisthmus_state_failing 1\n") {
		t.Errorf("/metrics = %s", body)
	}
	w.stop(p, syscall.SIGTERM)
}

// Where no directory is named there is one for the user and the configuration,
// and dir: "" turns all of it off.
func TestLastGoodStateDefault(t *testing.T) {
	home := t.TempDir()
	file := filepath.Join(t.TempDir(), "mesh.yaml")
	for _, tt := range []struct {
		state string
		want  int
	}{{`state: {dir: ""}`, 0}, {"", 1}, {"", 1}} {
		if err := os.WriteFile(file, []byte("listen: {xds: 127.0.0.1:0, admin: 127.0.0.1:0}\n"+tt.state+"\nregistries: [{name: load, type: sim, config: {services: 3}}]\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		p := startWith(t, surroundings{env: []string{"XDG_STATE_HOME=" + home}}, "serve", "--config", file)
		p.find(p.stderr, `msg="listing complete" registry=load`)
		p.signal(syscall.SIGTERM)
		p.wait()
		if found, _ := filepath.Glob(filepath.Join(home, "isthmus", "mesh-*", "state-*.isthmus")); len(found) != tt.want {
			t.Errorf("with %q there is %q, want %d", tt.state, found, tt.want)
		}
	}
}
