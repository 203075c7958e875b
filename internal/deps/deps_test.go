package deps

import (
	"encoding/json"
	"errors"
	"io"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"testing"
)

const module = "github.com/isthmus-mesh/isthmus"

// rule says what the packages of a folder may import. A name ending in "/..."
// stands for all below it and itself.
type rule struct {
	folder string
	// own are the packages of this module that may be imported, without the
	// module's path.
	own []string
	// others are the modules or packages outside the standard library that may
	// be imported; nil is none.
	others []string
	// tests are the packages of this module that the tests of the folder may
	// import besides own and the package itself. Other modules are open to
	// tests.
	tests []string
}

// anyone lets every module in.
var anyone = []string{"..."}

// rules are the table of docs/architecture.md, from the leaves up. The first
// that fits holds; every package needs one.
var rules = []rule{
	{folder: "plugin/registry"},
	{folder: "plugin/collection"},
	{folder: "plugin/shard"},
	{folder: "plugin/proto/...", others: []string{"google.golang.org/protobuf/...", "google.golang.org/grpc/..."}},
	{folder: "plugin/wire", own: []string{"plugin/proto/..."}, others: anyone},
	{
		folder: "translate/...", own: []string{"plugin/registry", "plugin/collection"},
		others: []string{"istio.io/api/...", "google.golang.org/protobuf/...", "github.com/klauspost/compress/s2"},
	},
	{
		folder: "plugin", own: []string{"plugin/registry", "plugin/collection", "plugin/shard", "plugin/proto/...", "plugin/wire", "translate", "internal/clip", "internal/conf", "internal/wait"}, others: anyone,
		tests: []string{"plugin/plugintest", "internal/testcert"},
	},
	{
		folder: "adapters/file", own: []string{"plugin", "plugin/registry", "plugin/collection", "internal/conf"}, others: anyone,
		tests: []string{"plugin/plugintest"},
	},
	{folder: "adapters/consul/plan"},
	{folder: "adapters/consul/proto/...", others: []string{"google.golang.org/protobuf/..."}},
	{
		folder: "adapters/consul", own: []string{"plugin", "plugin/registry", "adapters/consul/plan", "adapters/consul/proto/..."}, others: anyone,
		tests: []string{"plugin/collection", "plugin/plugintest", "translate", "internal/testcert", "internal/testenv/...", "internal/testwait"},
	},
	{
		folder: "adapters/kubernetes", own: []string{"plugin", "plugin/registry", "plugin/collection"}, others: anyone,
		tests: []string{"plugin/plugintest", "plugin/proto/...", "server/supervisor", "internal/testenv/..."},
	},
	{
		folder: "adapters/zookeeper", own: []string{"plugin", "plugin/registry", "internal/dubbo"}, others: anyone,
		tests: []string{"plugin/plugintest", "internal/testcert", "internal/testenv/..."},
	},
	{
		folder: "adapters/nacos", own: []string{"plugin", "plugin/registry", "internal/dubbo"}, others: anyone,
		tests: []string{"plugin/collection", "plugin/plugintest", "translate", "internal/testcert", "internal/testenv/...", "internal/testwait"},
	},
	{
		folder: "adapters/...", own: []string{"plugin", "plugin/registry"}, others: anyone,
		tests: []string{"plugin/collection", "plugin/plugintest", "translate", "internal/testcert", "internal/testenv/...", "internal/testwait"},
	},
	{
		folder: "server/encode", own: []string{"plugin/collection"}, others: []string{"istio.io/api/...", "google.golang.org/protobuf/..."},
		tests: []string{"internal/testresource"},
	},
	{folder: "server/changelog"},
	{
		folder: "server/state", own: []string{"plugin/collection", "plugin/proto/...", "server/changelog", "server/encode", "server/state/...", "internal/clip"},
		others: []string{"google.golang.org/protobuf/...", "github.com/prometheus/client_golang/..."},
		tests:  []string{"internal/testresource", "internal/testwait"},
	},
	{
		folder: "server/state/message", own: []string{"plugin/collection", "plugin/proto/...", "server/encode", "internal/clip"},
		others: []string{"google.golang.org/protobuf/..."},
		tests:  []string{"internal/testresource"},
	},
	{
		folder: "server/state/status", own: []string{"plugin/collection", "server/changelog", "server/state/conflict", "server/state/problems", "server/state/protect"},
		others: []string{"github.com/prometheus/client_golang/..."},
	},
	{folder: "server/state/...", own: []string{"plugin/collection", "server/changelog", "server/encode", "server/state/book", "server/state/record", "server/state/saved", "internal/clip"}},
	{
		folder: "server/view", own: []string{"plugin/collection", "plugin/shard", "server/changelog", "server/encode", "server/state"}, others: []string{"google.golang.org/protobuf/..."},
		tests: []string{"plugin/proto/...", "internal/testresource"},
	},
	{
		folder: "server/lastgood", own: []string{"plugin/collection", "server/encode", "server/state", "server/state/saved"},
		others: []string{"github.com/klauspost/compress/zstd", "github.com/prometheus/client_golang/..."},
		tests:  []string{"server/state/status", "plugin/proto/...", "internal/testenv/...", "internal/testresource"},
	},
	{
		folder: "server/stream", own: []string{"server/encode", "server/view", "server/wire", "internal/clip"}, others: []string{"google.golang.org/grpc/...", "github.com/prometheus/client_golang/...", "golang.org/x/time/rate"},
		tests: []string{"plugin/collection", "server/servertest", "server/state"},
	},
	{folder: "server/conditions", others: []string{"github.com/prometheus/client_golang/..."}},
	{folder: "server/latency", others: []string{"github.com/prometheus/client_golang/...", "go.opentelemetry.io/otel/..."}},
	{folder: "server/otlp", others: []string{"github.com/prometheus/client_golang/...", "go.opentelemetry.io/...", "google.golang.org/grpc/..."}},
	{folder: "server/servertest", own: []string{"plugin/collection", "plugin/proto/...", "server/encode", "server/state", "server/view", "server/stream", "internal/testresource"}, others: anyone},
	{folder: "server/wire", others: []string{"google.golang.org/grpc/...", "google.golang.org/protobuf/..."}},
	{
		folder: "server/xds", own: []string{"plugin/collection", "server/encode", "server/stream", "server/view", "server/wire"}, others: anyone,
		tests: []string{"plugin/proto/...", "server/servertest", "server/state"},
	},
	{folder: "server/mcp/proto/...", others: []string{"google.golang.org/protobuf/..."}},
	{
		folder: "server/mcp", own: []string{"plugin/collection", "server/encode", "server/mcp/proto/...", "server/stream", "server/view", "server/wire", "internal/wait", "internal/clip"}, others: anyone,
		tests: []string{"server/servertest", "server/state", "internal/testcert"},
	},
	{
		folder: "server/kubernetes", own: []string{"plugin/collection", "server/encode", "server/state", "server/view", "internal/clip", "internal/wait"}, others: anyone,
		tests: []string{"internal/testenv/...", "internal/testwait", "server/servertest"},
	},
	{
		folder: "server/supervisor", own: []string{"plugin/collection", "plugin/shard", "plugin/proto/...", "plugin/wire", "internal/clip"}, others: anyone,
		tests: []string{"plugin", "plugin/registry", "internal/testwait"},
	},
	{folder: "server/config", own: []string{"plugin/collection", "plugin/shard", "internal/conf"}, others: []string{"github.com/invopop/jsonschema", "k8s.io/apimachinery/pkg/util/validation"}, tests: []string{"internal/testwait"}},
	{
		folder: "server/access", own: []string{"internal/clip", "internal/conf", "internal/wait", "server/config", "server/stream", "server/view"}, others: anyone,
		tests: []string{"internal/testcert", "internal/testenv/...", "internal/testwait"},
	},
	{
		folder: "server/owns", own: []string{"plugin/collection", "server/config", "server/encode", "translate"}, others: []string{"google.golang.org/protobuf/...", "istio.io/api/..."},
	},
	{
		folder: "server/admin", own: []string{"plugin/collection", "server/access", "server/conditions", "server/kubernetes", "server/state", "server/state/...", "server/stream", "server/supervisor"}, others: []string{"github.com/prometheus/client_golang/..."},
		tests: []string{"server/view"},
	},
	{
		folder: "server", own: []string{"plugin/collection", "plugin/shard", "plugin/proto/...", "translate", "server/...", "internal/conf"}, others: anyone,
		tests: []string{"adapters/sim", "plugin/registry", "internal/testcert", "internal/testwait"},
	},
	{
		folder: "plugin/plugintest/suite", own: []string{"plugin/collection", "plugin/proto/...", "plugin/wire", "server/encode", "server/supervisor"}, others: anyone,
	},
	{
		folder: "plugin/plugintest", own: []string{"plugin", "plugin/registry", "plugin/collection", "plugin/plugintest/suite"}, others: anyone,
		tests: []string{"plugin/proto/...", "plugin/wire", "server/encode"},
	},
	{folder: "verify", own: []string{"plugin/collection"}, others: anyone},
	{
		folder: "internal/watch", own: []string{"plugin/collection", "server/mcp/proto/...", "verify"}, others: anyone,
		tests: []string{"server/...", "internal/testwait"},
	},
	{folder: "internal/bench", own: []string{"adapters/sim", "server/mcp/proto/...", "internal/nacosapp"}, others: anyone},
	{folder: "internal/migrate", own: []string{"internal/watch"}, others: anyone, tests: []string{"server/...", "plugin/..."}},
	{
		folder: "cmd/isthmus", own: []string{"adapters/...", "plugin", "plugin/shard", "server/...", "plugin/plugintest/suite", "internal/bench", "internal/conf", "internal/doctor", "internal/hangup", "internal/migrate", "internal/watch", "verify"}, others: anyone,
		tests: []string{"internal/testcert", "internal/testenv/...", "internal/testresource", "internal/testwait", "plugin/..."}, // of which the plugins are made that flood
	},

	{folder: "internal/doctor", others: []string{"go.yaml.in/yaml/v3"}, tests: []string{"internal/testcert"}},
	{folder: "internal/conf", own: []string{"translate", "internal/clip"}, others: anyone, tests: []string{"plugin"}},
	{folder: "internal/clip"},
	{folder: "internal/deps"},
	{folder: "internal/dubbo", own: []string{"plugin/registry"}},
	{folder: "internal/pages"},
	{folder: "internal/nacosapp", others: anyone},
	{folder: "internal/hangup"},
	{folder: "internal/wait"},
	{folder: "internal/testcert"},
	{folder: "internal/testresource", others: []string{"istio.io/api/...", "google.golang.org/protobuf/..."}},
	{folder: "internal/testwait"},
	{folder: "internal/testenv/...", own: []string{"internal/nacosapp", "internal/testcert", "internal/testenv/...", "internal/testwait"}, others: anyone},
	{folder: "test/...", own: []string{"..."}, others: anyone},
	{folder: "examples/adapter-template", own: []string{"plugin", "plugin/registry"}, tests: []string{"plugin/plugintest"}},
	{folder: "examples/...", tests: []string{"server/config"}},
}

func covers(pattern, path string) bool {
	if pattern == "..." {
		return true
	}
	if dir, all := strings.CutSuffix(pattern, "/..."); all {
		return path == dir || strings.HasPrefix(path, dir+"/")
	}
	return path == pattern
}

func anyCovers(patterns []string, path string) bool {
	return slices.ContainsFunc(patterns, func(p string) bool { return covers(p, path) })
}

// imports are the imports of one package.
type imports struct {
	ImportPath                         string
	Imports, TestImports, XTestImports []string
	Error                              *struct{ Err string }
}

// forTests matches the packages that may import package testing. The program is
// made of none of them.
var forTests = regexp.MustCompile(`^(internal/test.*|server/servertest|plugin/plugintest|test/.*)$`)

// violations returns what a package imports against its rule.
func violations(p imports) (wrong []string) {
	path := strings.TrimPrefix(p.ImportPath, module+"/")
	i := slices.IndexFunc(rules, func(r rule) bool { return covers(r.folder, path) })
	if i < 0 {
		return []string{path + " has no rule: say in rules what it may import"}
	}
	r := rules[i]
	check := func(who string, imported, own, others []string) {
		for _, imp := range imported {
			first, _, _ := strings.Cut(imp, "/")
			of, isOwn := strings.CutPrefix(imp, module+"/")
			standard := !strings.Contains(first, ".")
			if !standard && !(isOwn && anyCovers(own, of)) && !(!isOwn && anyCovers(others, imp)) {
				wrong = append(wrong, who+" imports "+of)
			}
		}
	}
	check(path, p.Imports, r.own, r.others)
	if slices.Contains(p.Imports, "testing") && !forTests.MatchString(path) {
		wrong = append(wrong, path+" imports testing")
	}
	tests := slices.Concat(r.own, r.tests, []string{path})
	check("the test of "+path, p.TestImports, tests, anyone)
	check("the test of "+path, p.XTestImports, tests, anyone)
	return wrong
}

// Imports form the DAG of docs/architecture.md, those of tests included.
func TestImports(t *testing.T) {
	cmd := exec.CommandContext(t.Context(), "go", "list", "-e", "-json=ImportPath,Imports,TestImports,XTestImports,Error", module+"/...")
	var stderr strings.Builder
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("go list: %v\n%s", err, stderr.String())
	}
	covered := make(map[string]bool)
	for dec := json.NewDecoder(strings.NewReader(string(out))); ; {
		var p imports
		if err := dec.Decode(&p); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
		if p.Error != nil {
			t.Errorf("%s: %s", p.ImportPath, p.Error.Err)
		}
		for _, wrong := range violations(p) {
			t.Error(wrong)
		}
		path := strings.TrimPrefix(p.ImportPath, module+"/")
		if i := slices.IndexFunc(rules, func(r rule) bool { return covers(r.folder, path) }); i >= 0 {
			covered[rules[i].folder] = true
		}
	}
	for _, r := range rules {
		if !covered[r.folder] {
			t.Errorf("there is a rule for %s, and no such package", r.folder)
		}
	}
}

// The table of docs/architecture.md says of each folder what rules say.
func TestTable(t *testing.T) {
	text, err := os.ReadFile("../../docs/architecture.md")
	if err != nil {
		t.Fatal(err)
	}
	row := regexp.MustCompile("(?m)^\\| `([^`]+)` \\| [^|]+ \\| ([^|]+) \\|$")
	var got, want []string
	for _, m := range row.FindAllStringSubmatch(string(text), -1) {
		got = append(got, m[1]+": "+m[2])
	}
	for _, r := range rules {
		cell := "nothing"
		switch {
		case slices.Equal(r.own, anyone):
			cell = "everything"
		case len(r.own) > 0:
			cell = "`" + strings.Join(r.own, "`, `") + "`"
		}
		want = append(want, r.folder+": "+cell)
	}
	if !slices.Equal(got, want) {
		t.Errorf("the table has\n%s\nthe rules have\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}

// The test itself notices what it is for.
func TestViolationsAreFound(t *testing.T) {
	for _, tt := range []struct {
		path, imp string
		ok, test  bool // whether it may be imported by the package, by its test
	}{
		{"plugin/registry", "strings", true, true},
		{"plugin/registry", "google.golang.org/protobuf/proto", false, true},
		{"adapters/consul", module + "/plugin", true, true},
		{"adapters/consul", module + "/adapters/consul", false, true},
		{"adapters/consul", module + "/plugin/collection", false, true},
		{"adapters/file", module + "/plugin/collection", true, true},
		{"adapters/consul", module + "/translate", false, true},
		{"adapters/consul", module + "/server/state", false, false},
		{"adapters/consul", "github.com/hashicorp/consul/api", true, true},
		{"server/encode", module + "/server/state", false, false},
		{"server/encode", "golang.org/x/sync/errgroup", false, true},
		{"server/xds", module + "/server/state", false, true},
		{"server/xds", module + "/server/view", true, true},
		{"translate", "istio.io/api/networking/v1alpha3", true, true},
		{"translate", module + "/plugin", false, false},
		{"server/xds", "testing", false, true},
		{"plugin/plugintest", "testing", true, true},
		{"unheard/of", "strings", false, false},
	} {
		path := module + "/" + tt.path
		for _, c := range []struct {
			p  imports
			ok bool
		}{
			{imports{ImportPath: path, Imports: []string{tt.imp}}, tt.ok},
			{imports{ImportPath: path, TestImports: []string{tt.imp}}, tt.test},
			{imports{ImportPath: path, XTestImports: []string{tt.imp}}, tt.test},
		} {
			if got := violations(c.p); (len(got) == 0) != c.ok {
				t.Errorf("violations(%+v) = %q, want none: %v", c.p, got, c.ok)
			}
		}
	}
}
