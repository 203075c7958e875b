package python

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/isthmus-mesh/isthmus/internal/testenv"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testisthmus"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testpython"
	"github.com/isthmus-mesh/isthmus/internal/testwait"
	"github.com/isthmus-mesh/isthmus/internal/watch"
	"github.com/isthmus-mesh/isthmus/plugin/collection"
	"github.com/isthmus-mesh/isthmus/plugin/plugintest"
)

// inventory is the HTTP server whose document the adapter reads.
type inventory struct {
	url string

	mu   sync.Mutex
	text string // empty: the server answers 503; guarded by mu
}

func startInventory(t *testing.T) *inventory {
	t.Helper()
	i := &inventory{}
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		i.mu.Lock()
		defer i.mu.Unlock()
		if i.text == "" {
			http.Error(w, "out of order", http.StatusServiceUnavailable)
			return
		}
		_, _ = io.WriteString(w, i.text)
	}))
	t.Cleanup(s.Close)
	i.url = s.URL
	return i
}

func (i *inventory) set(text string) {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.text = text
}

// document has web with the instances that are given as "ID ADDRESS", and as
// many services more.
func document(more int, instances ...string) string {
	var list []string
	for _, in := range instances {
		id, address, _ := strings.Cut(in, " ")
		list = append(list, fmt.Sprintf(`{"id": %q, "address": %q, "port": 8080, "labels": {"version": "v1"}}`, id, address))
	}
	services := []string{fmt.Sprintf(`{"name": "web", "port": 80, "protocol": "HTTP", "instances": [%s]}`, strings.Join(list, ","))}
	for n := range more {
		services = append(services, fmt.Sprintf(`{"name": "more-%d", "port": 9000, "instances": [{"id": "a", "address": "10.1.%d.%d"}]}`, n, n/200, n%200+1))
	}
	return `{"services": [` + strings.Join(services, ",") + `]}`
}

// addresses returns where a world has the instances of web.
func addresses(w *plugintest.World) string {
	var out []string
	for name, we := range w.WorkloadEntries("conformance/web") {
		out = append(out, strings.TrimPrefix(name, "conformance/web.")+" "+we.GetAddress())
	}
	if len(out) == 2 && out[0] > out[1] {
		out[0], out[1] = out[1], out[0]
	}
	return strings.Join(out, ", ")
}

// The adapter keeps every part of the contract.
func TestConformance(t *testing.T) {
	testenv.SkipIfShort(t)
	t.Parallel()
	dir := testpython.PythonAdapter(t)
	from := startInventory(t)
	from.set(document(1500, "web-1 10.0.0.1"))
	config, err := json.Marshal(map[string]any{"url": from.url, "interval": 0.05})
	if err != nil {
		t.Fatal(err)
	}
	change := func(name, text, want string, upserts int, check func(w *plugintest.World) error) plugintest.Change {
		return plugintest.Change{
			Name: name,
			Do:   func(context.Context) error { from.set(text); return nil },
			Want: func(w *plugintest.World) error {
				if got := addresses(w); got != want {
					return fmt.Errorf("web is at %q, not %q", got, want)
				}
				return check(w)
			},
			MaxUpserts: upserts,
		}
	}
	fine := func(w *plugintest.World) error {
		if w.Degraded != "" || len(w.Problems) > 0 {
			return fmt.Errorf("degraded %q, problems %v", w.Degraded, w.Problems)
		}
		return nil
	}
	degraded := func(text string) func(w *plugintest.World) error {
		return func(w *plugintest.World) error {
			if !strings.Contains(w.Degraded, text) {
				return fmt.Errorf("degraded %q, want %q in it", w.Degraded, text)
			}
			return nil
		}
	}
	plugintest.Conformance(t, plugintest.Config{
		Command: []string{filepath.Join(dir, "isthmus-adapter-json")},
		Config:  config,
		Adapter: "json",
		Within:  testenv.Patience,
		Changes: []plugintest.Change{
			change("another address", document(1500, "web-1 10.0.0.2"), "web-1 10.0.0.2", 1, fine),
			change("another instance", document(1500, "web-1 10.0.0.2", "web-2 10.0.0.3"), "web-1 10.0.0.2, web-2 10.0.0.3", 1, fine),
			change("an instance goes", document(1500, "web-2 10.0.0.3"), "web-2 10.0.0.3", 0, fine),
			change("services go", document(3, "web-2 10.0.0.3"), "web-2 10.0.0.3", 0, func(w *plugintest.World) error {
				if n := len(w.Names(collection.ServiceEntry)); n != 4 {
					return fmt.Errorf("%d ServiceEntries, want 4", n)
				}
				return nil
			}),
			change("an address that is none", document(3, "web-2 nowhere", "web-3 10.0.0.4"), "web-2 10.0.0.3, web-3 10.0.0.4", 1, func(w *plugintest.World) error {
				if w.Problems["instance web/web-2"] == "" {
					return fmt.Errorf("problems %v", w.Problems)
				}
				return nil
			}),
			change("an instance that never had one", document(3, "web-2 10.0.0.3", "web-3 10.0.0.4", "web-4 nowhere"), "web-2 10.0.0.3, web-3 10.0.0.4", 0, func(w *plugintest.World) error {
				if !w.Keeps(collection.WorkloadEntry, "conformance/web.web-4") {
					return errors.New("a bridge that has it is not told to keep it")
				}
				return nil
			}),
			change("the address mended", document(3, "web-2 10.0.0.3", "web-3 10.0.0.4"), "web-2 10.0.0.3, web-3 10.0.0.4", 0, fine),
			change("a service without a name", `{"services": [{"port": 80}]}`, "web-2 10.0.0.3, web-3 10.0.0.4", 0, degraded("name None")),
			change("no JSON", `{"services": [`, "web-2 10.0.0.3, web-3 10.0.0.4", 0, degraded("Expecting value")),
			change("no answer", "", "web-2 10.0.0.3, web-3 10.0.0.4", 0, degraded("503")),
			change("an empty registry", `{"services": []}`, "", 0, fine),
		},
	})
}

// sink is what a sink has, by name.
type sink struct {
	rest []byte

	mu        sync.Mutex
	resources map[string]string // bodies; guarded by mu
}

// Write takes the lines of a watch.
func (s *sink) Write(b []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.rest = append(s.rest, b...)
	for {
		line, rest, ok := strings.Cut(string(s.rest), "\n")
		if !ok {
			return len(b), nil
		}
		s.rest = []byte(rest)
		var l watch.Line
		if err := json.Unmarshal([]byte(line), &l); err != nil {
			return 0, err
		}
		if l.Op == "remove" {
			delete(s.resources, l.Name)
		} else {
			s.resources[l.Name] = string(l.Resource)
		}
	}
}

func startSink(t *testing.T, address, protocol string) *sink {
	t.Helper()
	s := &sink{resources: map[string]string{}}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	// Ends with the test.
	go func() {
		done <- watch.Run(ctx, watch.Options{Address: address, Protocol: protocol, Output: "json", Body: true}, s)
	}()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil && !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
	})
	return s
}

// has waits until the resource called name has all of the texts in it, and none
// of those that begin with "!".
func (s *sink) has(t *testing.T, name string, texts ...string) {
	t.Helper()
	testenv.Eventually(t, testenv.Patience, fmt.Sprintf("%s with %q", name, texts), func() (string, bool) {
		s.mu.Lock()
		defer s.mu.Unlock()
		body, ok := s.resources[name]
		for _, text := range texts {
			without, no := strings.CutPrefix(text, "!")
			ok = ok && strings.Contains(body, without) != no
		}
		return fmt.Sprintf("%d resources, this one: %s", len(s.resources), body), ok
	})
}

// gone waits until there is no resource called name.
func (s *sink) gone(t *testing.T, name string) {
	t.Helper()
	testenv.Eventually(t, testenv.Patience, "no "+name, func() (string, bool) {
		s.mu.Lock()
		defer s.mu.Unlock()
		return s.resources[name], s.resources[name] == ""
	})
}

// Through `isthmus serve` the services reach sinks of both protocols, and so
// does a change of one endpoint; when the bridge is killed, the adapter goes by
// itself.
func TestServe(t *testing.T) {
	testenv.SkipIfShort(t)
	t.Parallel()
	dir := testpython.PythonAdapter(t)
	from := startInventory(t)
	from.set(document(2500, "web-1 10.0.0.1", "web-2 10.0.0.2"))
	i := testisthmus.Start(t, fmt.Sprintf("- {name: shop, type: json, config: {url: %q, interval: 0.05}, protect: {min_share: 0}}\nplugin_dir: %s", from.url, dir))
	i.WaitReady(t)
	i.WaitPhase(t, "shop", "live")
	if r := i.Registry(t, "shop"); r.Services != 2501 || r.Instances != 2502 {
		t.Errorf("registry %+v", r)
	}
	delta, sotw := startSink(t, i.XDS, "delta"), startSink(t, i.XDS, "sotw")
	delta.has(t, "shop/web", "web.shop")
	delta.has(t, "shop/web.web-1", "10.0.0.1")
	delta.has(t, "shop/more-2499.a", "10.1.12.100")
	sotw.has(t, "shop/web", "web.shop", "10.0.0.1", "10.0.0.2")

	from.set(document(2500, "web-1 10.0.0.9", "web-2 10.0.0.2"))
	delta.has(t, "shop/web.web-1", "10.0.0.9")
	sotw.has(t, "shop/web", "10.0.0.9", "10.0.0.2", "!10.0.0.1\"")

	from.set("")
	i.WaitPhase(t, "shop", "degraded")
	delta.has(t, "shop/web.web-1", "10.0.0.9")
	from.set(document(2500, "web-2 10.0.0.2"))
	i.WaitPhase(t, "shop", "live")
	sotw.has(t, "shop/web", "10.0.0.2", "!10.0.0.9")

	// What is malformed when the adapter starts again is served as it was, an
	// instance and a service with all that it has.
	again := func(text string) {
		t.Helper()
		r := i.Registry(t, "shop")
		from.set(text)
		if err := syscall.Kill(r.PID, syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
		testenv.Eventually(t, testenv.Patience, "another process that has listed everything", func() (string, bool) {
			now := i.Registry(t, "shop")
			return fmt.Sprintf("%+v", now), now.PID != r.PID && now.Phase == "live"
		})
	}
	again(document(2, "web-1 10.0.0.5", "web-2 nowhere"))
	sotw.has(t, "shop/web", "10.0.0.2", "10.0.0.5")
	again(strings.Replace(document(1, "web-7 10.0.0.7"), `"port": 80`, `"port": 0`, 1))
	delta.gone(t, "shop/more-1")
	sotw.has(t, "shop/web", "10.0.0.2", "10.0.0.5", "!10.0.0.7")
	from.set(document(1, "web-1 10.0.0.5", "web-7 10.0.0.7"))
	sotw.has(t, "shop/web", "10.0.0.5", "10.0.0.7", "!10.0.0.2\"")

	pid := i.Registry(t, "shop").PID
	i.Kill9()
	testwait.Gone(t, testenv.Patience, pid)
}

// The program checks the adapter without any Go, and says what is wrong with
// one that is broken.
func TestPluginCheck(t *testing.T) {
	testenv.SkipIfShort(t)
	t.Parallel()
	dir := testpython.PythonAdapter(t)
	adapter := filepath.Join(dir, "isthmus-adapter-json")
	from := startInventory(t)
	from.set(document(3, "web-1 10.0.0.1"))
	config := fmt.Sprintf(`{"url": %q, "interval": 0.05}`, from.url)
	check := func(t *testing.T, path string) (string, error) {
		out, err := exec.CommandContext(t.Context(), testisthmus.Binary(t), "plugin", "check", path, "--config", config).CombinedOutput()
		return string(out), err
	}
	t.Run("good", func(t *testing.T) {
		t.Parallel()
		if out, err := check(t, adapter); err != nil || !regexp.MustCompile(`[1-9]\d passed, 0 failed, \d skipped`).MatchString(out) {
			t.Errorf("%v\n%s", err, out)
		}
	})
	t.Run("broken", func(t *testing.T) {
		t.Parallel()
		broken := filepath.Join(t.TempDir(), "broken")
		script := fmt.Sprintf("#!/bin/sh\nexec 3>&1\n%s | while read -r line; do echo \"$line\" >&3; echo stray >&3; done\nexit 2\n", adapter)
		if err := os.WriteFile(broken, []byte(script), 0o755); err != nil { //nolint:gosec // it is a program
			t.Fatal(err)
		}
		out, err := check(t, broken)
		if exit, ok := errors.AsType[*exec.ExitError](err); !ok || exit.ExitCode() != 1 ||
			!strings.Contains(out, `after it came "stray\n"`) || !strings.Contains(out, "Cure: Write logs to standard error.") {
			t.Errorf("%v\n%s", err, out)
		}
	})
}

// An executable that is pinned by its checksum runs, as a copy in memory: the
// script that starts the adapter, and the adapter itself with an interpreter in
// its first line. One byte more and it does not.
func TestPinned(t *testing.T) {
	testenv.SkipIfShort(t)
	t.Parallel()
	dir := testpython.PythonAdapter(t)
	script, err := os.ReadFile(filepath.Join(dir, "isthmus-adapter-json"))
	if err != nil {
		t.Fatal(err)
	}
	paths := regexp.MustCompile(`'([^']+)'`).FindAllSubmatch(script, -1)
	if len(paths) != 2 {
		t.Fatalf("the script is %s", script)
	}
	adapter, err := os.ReadFile(string(paths[1][1]))
	if err != nil {
		t.Fatal(err)
	}
	from := startInventory(t)
	from.set(document(1, "web-1 10.0.0.1"))
	for name, text := range map[string]string{"script": string(script), "adapter": "#!" + string(paths[0][1]) + "\n" + string(adapter)} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			path := filepath.Join(dir, "isthmus-adapter-json")
			if err := os.WriteFile(path, []byte(text), 0o755); err != nil { //nolint:gosec // it is a program
				t.Fatal(err)
			}
			i := testisthmus.Start(t, fmt.Sprintf("- {name: shop, type: json, config: {url: %q, interval: 0.05}, plugin: {sha256: %x}}\nplugin_dir: %s", from.url, sha256.Sum256([]byte(text)), dir))
			i.WaitPhase(t, "shop", "live")
			if r := i.Registry(t, "shop"); r.Services != 2 {
				t.Errorf("registry %+v", r)
			}
			if err := os.WriteFile(path, []byte(text+"\n"), 0o755); err != nil { //nolint:gosec // likewise
				t.Fatal(err)
			}
			if err := syscall.Kill(i.Registry(t, "shop").PID, syscall.SIGKILL); err != nil {
				t.Fatal(err)
			}
			testenv.Eventually(t, testenv.Patience, "the other file to be refused", func() (string, bool) {
				r := i.Registry(t, "shop")
				return fmt.Sprintf("%+v", r), strings.Contains(fmt.Sprintf("%+v", r), "checksum") || strings.Contains(fmt.Sprintf("%+v", r), "sha256")
			})
		})
	}
}
