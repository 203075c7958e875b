package deps

import (
	"encoding/json"
	"errors"
	"io"
	"os/exec"
	"slices"
	"strings"
	"testing"
)

const module = "github.com/isthmus-mesh/isthmus"

// rule says what the packages of a folder may import. A name ending in "/..." stands for all below it and itself.
type rule struct {
	folder string
	// own are the packages of this module that may be imported, without the module's path.
	own []string
	// others are the modules or packages outside the standard library that may be imported; nil is none.
	others []string
	// std says whether the standard library may be imported.
	std bool
}

// anyone lets every module in.
var anyone = []string{"..."}

// rules are the DAG of docs/architecture.md, from the leaves up. The first that fits holds; every package needs one.
var rules = []rule{
	{folder: "plugin/registry", std: true},
	{folder: "plugin/collection", std: true},
	{folder: "plugin/wire", own: []string{"plugin/proto/..."}, others: anyone, std: true},
	{folder: "plugin/proto/...", others: []string{"google.golang.org/protobuf/...", "google.golang.org/grpc/..."}, std: true},
	{folder: "translate/...", own: []string{"plugin/registry", "plugin/collection", "translate/..."}, others: []string{"istio.io/api/...", "google.golang.org/protobuf/..."}, std: true},
	{folder: "plugin/plugintest/...", own: []string{"plugin/...", "translate", "server/supervisor", "server/resource"}, others: anyone, std: true},
	{folder: "plugin/...", own: []string{"plugin/...", "translate"}, others: anyone, std: true},

	{folder: "adapters/...", own: []string{"plugin", "plugin/registry", "plugin/collection"}, others: anyone, std: true},

	{folder: "server/store", std: true},
	{folder: "server/resource", own: []string{"plugin/collection"}, others: []string{"istio.io/api/...", "google.golang.org/protobuf/..."}, std: true},
	{folder: "server/push", own: []string{"plugin/collection", "server/store", "server/resource"}, others: []string{"google.golang.org/protobuf/..."}, std: true},
	{folder: "server/wire", others: []string{"google.golang.org/grpc/...", "google.golang.org/protobuf/..."}, std: true},
	{folder: "server/xds/...", own: []string{"plugin/collection", "server/push", "server/resource", "server/wire"}, others: anyone, std: true},
	{folder: "server/mcp/...", own: []string{"plugin/collection", "server/mcp/...", "server/push", "server/resource", "server/wire"}, others: anyone, std: true},
	{folder: "server/config", others: []string{"go.yaml.in/yaml/v3"}, std: true},
	{folder: "server/admin", others: []string{"github.com/prometheus/client_golang/..."}, std: true},
	{folder: "server/supervisor/...", own: []string{"plugin/wire", "plugin/proto/...", "plugin/collection"}, others: anyone, std: true},
	{folder: "server/ingest", own: []string{"plugin/collection", "plugin/proto/...", "server/store", "server/resource", "server/push", "server/supervisor"}, others: anyone, std: true},
	{folder: "server", own: []string{"plugin/collection", "plugin/proto/...", "translate", "server/..."}, others: anyone, std: true},

	{folder: "internal/watch", own: []string{"plugin/collection", "server/mcp/proto/..."}, others: anyone, std: true},
	{folder: "internal/deps", std: true},
	{folder: "internal/testenv/...", own: []string{"internal/testenv/..."}, others: anyone, std: true},
	{folder: "cmd/...", own: []string{"adapters/...", "plugin/...", "translate", "server/...", "internal/watch"}, others: anyone, std: true},
	{folder: "test/...", own: []string{"..."}, others: anyone, std: true},
	{folder: "examples/...", own: []string{"plugin/...", "translate"}, others: anyone, std: true},
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

// violations returns what a package imports against its rule.
func violations(path string, imports []string) (wrong []string) {
	i := slices.IndexFunc(rules, func(r rule) bool { return covers(r.folder, path) })
	if i < 0 {
		return []string{path + " has no rule: say in rules what it may import"}
	}
	r := rules[i]
	for _, imp := range imports {
		first, _, _ := strings.Cut(imp, "/")
		switch own, isOwn := strings.CutPrefix(imp, module+"/"); {
		case isOwn && anyCovers(r.own, own), !isOwn && strings.Contains(first, ".") && anyCovers(r.others, imp):
		case !strings.Contains(first, ".") && r.std:
		default:
			wrong = append(wrong, path+" imports "+imp)
		}
	}
	return wrong
}

type listed struct {
	ImportPath string
	Imports    []string
	Error      *struct{ Err string }
}

// Imports form the DAG of docs/architecture.md.
func TestImports(t *testing.T) {
	cmd := exec.CommandContext(t.Context(), "go", "list", "-e", "-json=ImportPath,Imports,Error", module+"/...")
	var stderr strings.Builder
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("go list: %v\n%s", err, stderr.String())
	}
	seen := 0
	for dec := json.NewDecoder(strings.NewReader(string(out))); ; seen++ {
		var p listed
		if err := dec.Decode(&p); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
		if p.Error != nil {
			t.Errorf("%s: %s", p.ImportPath, p.Error.Err)
		}
		for _, wrong := range violations(strings.TrimPrefix(p.ImportPath, module+"/"), p.Imports) {
			t.Error(wrong)
		}
	}
	if seen < 10 {
		t.Errorf("go list named %d packages only", seen)
	}
}

// The test itself notices what it is for.
func TestViolationsAreFound(t *testing.T) {
	for _, tt := range []struct {
		path, imp string
		ok        bool
	}{
		{"plugin/registry", "strings", true},
		{"plugin/registry", "google.golang.org/protobuf/proto", false},
		{"adapters/consul", module + "/plugin", true},
		{"adapters/consul", module + "/translate", false},
		{"adapters/consul", module + "/server/store", false},
		{"adapters/consul", "github.com/hashicorp/consul/api", true},
		{"server/store", module + "/plugin/collection", false},
		{"server/store", "golang.org/x/sync/errgroup", false},
		{"server/xds", module + "/server/store", false},
		{"server/xds", module + "/server/push", true},
		{"translate", "istio.io/api/networking/v1alpha3", true},
		{"translate", module + "/plugin", false},
		{"unheard/of", "strings", false},
	} {
		if got := violations(tt.path, []string{tt.imp}); (len(got) == 0) != tt.ok {
			t.Errorf("violations(%s imports %s) = %q, want none: %v", tt.path, tt.imp, got, tt.ok)
		}
	}
}
