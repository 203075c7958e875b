package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/isthmus-mesh/isthmus/internal/testwait"
)

// What an adapter counts itself is on the bridge's page of metrics.
func TestAdapterMetrics(t *testing.T) {
	file := filepath.Join(t.TempDir(), "isthmus.yaml")
	text := `listen: {xds: "127.0.0.1:0", admin: "127.0.0.1:0"}
registries:
- name: inventory
  type: exec
  config: {command: [sh, -c, 'echo what; echo "{\"services\": []}"; exec sleep 1000']}
`
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	p := start(t, "serve", "--config", file)
	admin := "http://" + p.find(p.stderr, `msg=serving xds=\S+ admin=(\S+)`)[1]
	page := ""
	testwait.Eventually(t, patience, "the adapter's metrics", func() (string, bool) {
		_, page = get(t, admin+"/metrics")
		return page, strings.Contains(page, `isthmus_adapter_program_lines_total{registry="inventory"} 2`)
	})
	for name, value := range map[string]int{"starts": 1, "bad_lines": 1} {
		want := fmt.Sprintf("isthmus_adapter_program_%s_total{registry=\"inventory\"} %d\n", name, value)
		if !strings.Contains(page, want) {
			t.Errorf("the page lacks %q", want)
		}
	}
	// Each is explained where the page on operations says.
	readme, err := os.ReadFile("../../docs/registries/exec.md")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(page) {
		name, ok := strings.CutPrefix(line, "# TYPE isthmus_adapter_")
		if name, _, _ = strings.Cut(name, " "); ok && !strings.Contains(string(readme), "| `isthmus_adapter_"+name+"` |") {
			t.Errorf("docs/registries/exec.md lacks the metric %s", name)
		}
	}
	p.signal(syscall.SIGTERM)
	if code := p.wait(); code != exitOK {
		t.Errorf("exit code %d", code)
	}
}
