package deploy

import (
	"bytes"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"

	"github.com/isthmus-mesh/isthmus/internal/testenv"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testdeploy"
)

// root is the root of the repository.
const root = "../.."

// run runs a tool in a folder and returns what it writes to its output.
func run(t *testing.T, tool testenv.Tool, dir string, args ...string) string {
	t.Helper()
	path, err := tool.Fetch(t.Context(), t.Output())
	if err != nil {
		t.Fatal(err)
	}
	cmd := command(t, path, dir, args...)
	var out, problems bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &problems
	if err := cmd.Run(); err != nil {
		t.Fatalf("%s %s: %v\n%s%s", tool, strings.Join(args, " "), err, &out, &problems)
	}
	return out.String()
}

func command(t *testing.T, path, dir string, args ...string) *exec.Cmd {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), path, args...)
	cmd.Dir = dir
	return cmd
}

func read(t *testing.T, path ...string) []byte {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(append([]string{root}, path...)...))
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func decode[T any](t *testing.T, path ...string) (v T) {
	t.Helper()
	dec := yaml.NewDecoder(bytes.NewReader(read(t, path...)))
	if err := dec.Decode(&v); err != nil {
		t.Fatalf("%s: %v", filepath.Join(path...), err)
	}
	return v
}

type rule struct {
	Alert, Expr string
	Annotations map[string]string
}

type ruleFile struct {
	Groups []struct {
		Name  string
		Rules []rule
	}
}

var metric = regexp.MustCompile(`isthmus_[a-z_|()]*[a-z]`)

// checkMetrics reports the metrics of a query that docs/reference/metrics.md
// does not have, where a test of the program holds them.
func checkMetrics(t *testing.T, where, expr string, documented string) {
	t.Helper()
	for _, name := range metric.FindAllString(expr, -1) {
		names := []string{name}
		if strings.Contains(name, "(xds|mcp)") {
			names = []string{strings.Replace(name, "(xds|mcp)", "xds", 1), strings.Replace(name, "(xds|mcp)", "mcp", 1)}
		}
		for _, n := range names {
			if !strings.Contains(documented, "`"+strings.TrimSuffix(n, "_bucket")) {
				t.Errorf("%s: docs/reference/metrics.md has no metric %s", where, n)
			}
		}
	}
}

// Every alert fires in the test of the rules, asks for metrics that there are,
// and has a section that says what to do.
func TestAlerts(t *testing.T) {
	dir := filepath.Join(root, "deploy", "alerts")
	run(t, testdeploy.PromtoolTool, dir, "check", "rules", "isthmus.rules.yaml")
	run(t, testdeploy.PromtoolTool, dir, "test", "rules", "isthmus.test.yaml")

	rules := decode[ruleFile](t, "deploy", "alerts", "isthmus.rules.yaml")
	tests := decode[struct {
		Tests []struct {
			Alerts []struct {
				Name     string `yaml:"alertname"`
				Expected []any  `yaml:"exp_alerts"`
			} `yaml:"alert_rule_test"`
		}
	}](t, "deploy", "alerts", "isthmus.test.yaml")
	fires := map[string]bool{}
	for _, test := range tests.Tests {
		for _, a := range test.Alerts {
			fires[a.Name] = fires[a.Name] || len(a.Expected) > 0
		}
	}
	runbooks, documented := string(read(t, "docs", "runbooks.md")), string(read(t, "docs", "reference", "metrics.md"))
	for _, r := range rules.Groups[0].Rules {
		if !fires[r.Alert] {
			t.Errorf("no test lets %s fire", r.Alert)
		}
		if !strings.Contains(runbooks, "\n## "+r.Alert+"\n") {
			t.Errorf("docs/runbooks.md has no section %s", r.Alert)
		}
		if want := "/docs/runbooks.md#" + strings.ToLower(r.Alert); !strings.HasSuffix(r.Annotations["runbook_url"], want) {
			t.Errorf("%s: runbook %s does not end in %s", r.Alert, r.Annotations["runbook_url"], want)
		}
		checkMetrics(t, r.Alert, r.Expr, documented)
	}
	if sections := strings.Count(runbooks, "\n## "); sections != len(rules.Groups[0].Rules) {
		t.Errorf("docs/runbooks.md has %d sections for %d alerts", sections, len(rules.Groups[0].Rules))
	}
}

// Prometheus can read every query of the dashboard, and its metrics are those
// of the program.
func TestDashboard(t *testing.T) {
	var board struct {
		Panels []struct {
			ID      int
			Title   string
			Type    string
			Targets []struct{ Expr string }
		}
	}
	if err := json.Unmarshal(read(t, "deploy", "grafana", "isthmus.json"), &board); err != nil {
		t.Fatal(err)
	}
	type recording struct {
		Record string `yaml:"record"`
		Expr   string `yaml:"expr"`
	}
	var queries []recording
	ids, documented := map[int]bool{}, string(read(t, "docs", "reference", "metrics.md"))
	for _, p := range board.Panels {
		if ids[p.ID] {
			t.Errorf("two panels have the id %d", p.ID)
		}
		ids[p.ID] = true
		if p.Type != "row" && len(p.Targets) == 0 {
			t.Errorf("panel %s shows nothing", p.Title)
		}
		for _, target := range p.Targets {
			checkMetrics(t, p.Title, target.Expr, documented)
			queries = append(queries, recording{Record: "query:" + string(rune('a'+len(queries)/26)) + string(rune('a'+len(queries)%26)), Expr: strings.ReplaceAll(target.Expr, "$__rate_interval", "5m")})
		}
	}
	if len(queries) < 20 {
		t.Fatalf("the dashboard has %d queries", len(queries))
	}
	text, err := yaml.Marshal(map[string]any{"groups": []any{map[string]any{"name": "dashboard", "rules": queries}}})
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "rules.yaml")
	if err := os.WriteFile(file, text, 0o600); err != nil {
		t.Fatal(err)
	}
	run(t, testdeploy.PromtoolTool, ".", "check", "rules", file)
}
