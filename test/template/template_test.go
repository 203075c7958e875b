package template

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/isthmus-mesh/isthmus/internal/testenv"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testisthmus"
)

// From an empty module: the steps of docs/writing-an-adapter.md, with the
// working copy in place of a release. The adapter builds there, is checked,
// validated, and followed.
func TestFromAnEmptyModule(t *testing.T) {
	testenv.SkipIfShort(t)
	root, err := testenv.Root()
	if err != nil {
		t.Fatal(err)
	}
	module, plugins := t.TempDir(), t.TempDir()
	program := filepath.Join(plugins, "isthmus-adapter-inventory")
	run := func(name string, args ...string) string {
		t.Helper()
		cmd := exec.CommandContext(t.Context(), name, args...)
		cmd.Dir = module
		// No workspace, and nothing but what this module has fetched already.
		cmd.Env = append(os.Environ(), "GOWORK=off", "GOFLAGS=-mod=mod", "GOPROXY=off")
		out, err := cmd.CombinedOutput()
		if err != nil {
			t.Fatalf("%s %s: %v\n%s", name, strings.Join(args, " "), err, out)
		}
		return string(out)
	}
	run("go", "mod", "init", "example.org/isthmus-adapter-inventory")
	run("go", "mod", "edit", "-require=github.com/isthmus-mesh/isthmus@v0.0.0", "-replace=github.com/isthmus-mesh/isthmus="+root)
	copyFiles(t, filepath.Join(root, "examples", "adapter-template"), module, "main.go", "config.go", "adapter.go", "adapter_test.go")
	copyFiles(t, root, module, "go.sum")
	run("go", "build", "-o", program, ".")
	run("go", "vet", ".")

	var answer atomic.Value
	registry := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, answer.Load()) }))
	defer registry.Close()
	answer.Store(`{"services": [{"name": "web", "hosts": [{"id": "a", "address": "192.0.2.1", "port": 8080}, {"id": "b", "address": "192.0.2.2", "port": 8080}]}]}`)
	isthmus := testisthmus.Binary(t)
	if out := run(isthmus, "plugin", "check", program, "--config", fmt.Sprintf(`{"servers": [%q]}`, registry.URL)); !strings.Contains(out, " 0 failed") {
		t.Error(out)
	}
	i := testisthmus.Start(t, fmt.Sprintf("- {name: shop, type: inventory, config: {servers: [%q], interval: 100ms}}\nplugin_dir: %s", registry.URL, plugins))
	i.WaitReady(t)
	i.WaitPhase(t, "shop", "live")
	if got := i.Endpoints(t); got["shop/web"] != 2 {
		t.Errorf("endpoints %v", got)
	}
	answer.Store(`{"services": [{"name": "web", "hosts": [{"id": "a", "address": "192.0.2.1", "port": 8080}]}]}`)
	testenv.Eventually(t, testenv.Patience, "one endpoint", func() (string, bool) {
		got := i.Endpoints(t)
		return fmt.Sprint(got), got["shop/web"] == 1
	})
}

func copyFiles(t *testing.T, from, to string, names ...string) {
	t.Helper()
	for _, name := range names {
		b, err := os.ReadFile(filepath.Join(from, name))
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(to, name), b, 0o600); err != nil {
			t.Fatal(err)
		}
	}
}

// The code on the page is that of the template, or of the SDK's own test.
func TestPage(t *testing.T) {
	root, err := testenv.Root()
	if err != nil {
		t.Fatal(err)
	}
	page, err := os.ReadFile(filepath.Join(root, "docs", "writing-an-adapter.md"))
	if err != nil {
		t.Fatal(err)
	}
	var code strings.Builder
	for _, name := range []string{
		"examples/adapter-template/main.go", "examples/adapter-template/config.go", "examples/adapter-template/adapter.go",
		"plugin/watch_example_test.go",
	} {
		b, err := os.ReadFile(filepath.Join(root, name))
		if err != nil {
			t.Fatal(err)
		}
		code.Write(b)
	}
	blocks := regexp.MustCompile("(?ms)^```go\n(.*?)^```").FindAllStringSubmatch(string(page), -1)
	if len(blocks) < 5 {
		t.Errorf("%d blocks were found: the pattern is wrong", len(blocks))
	}
	for _, b := range blocks {
		if !strings.Contains(code.String(), b[1]) {
			t.Errorf("the template has no\n%s", b[1])
		}
	}
}
