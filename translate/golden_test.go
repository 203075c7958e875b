package translate

import (
	"bytes"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/rogpeppe/go-internal/txtar"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	mcp "istio.io/api/mcp/v1alpha1"
	"sigs.k8s.io/yaml"

	"github.com/isthmus-mesh/isthmus/plugin/registry"
)

var update = flag.Bool("update", false, "write what comes out into testdata")

// input is the in.yaml of a golden: the neutral words of package registry, with
// health by name.
type input struct {
	Registry  string           `json:"registry"`
	Adapter   string           `json:"adapter"`
	Translate Options          `json:"translate"`
	Service   registry.Service `json:"service"`
	Instances []inputInstance  `json:"instances"`
}

type inputInstance struct {
	registry.Instance
	Health string `json:"health"`
}

func (in *input) instances(t *testing.T) []registry.Instance {
	var all []registry.Instance
	for _, i := range in.Instances {
		switch i.Health {
		case "":
		case "passing":
			i.Instance.Health = registry.HealthPassing
		case "warning":
			i.Instance.Health = registry.HealthWarning
		case "critical":
			i.Instance.Health = registry.HealthCritical
		default:
			t.Fatalf("health %q is unknown", i.Health)
		}
		all = append(all, i.Instance)
	}
	return all
}

// Each archive in testdata holds a service as a registry describes it (in.yaml)
// and what it becomes (out.yaml).
func TestGolden(t *testing.T) {
	files, err := filepath.Glob("testdata/*.txtar")
	if err != nil || len(files) == 0 {
		t.Fatalf("testdata: %d files, %v", len(files), err)
	}
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".txtar"), func(t *testing.T) {
			archive, err := txtar.ParseFile(file)
			if err != nil {
				t.Fatal(err)
			}
			at := func(name string) int {
				return slices.IndexFunc(archive.Files, func(f txtar.File) bool { return f.Name == name })
			}
			if at("in.yaml") < 0 {
				t.Fatal("in.yaml is missing")
			}
			var in input
			if err := yaml.UnmarshalStrict(archive.Files[at("in.yaml")].Data, &in); err != nil {
				t.Fatal(err)
			}
			var got []byte
			in.Translate.Adapter = in.Adapter
			tr, err := New(in.Registry, in.Translate)
			if err != nil {
				got = fmt.Appendf(nil, "# New: %s\n", strings.ReplaceAll(err.Error(), "\n", "\n# New: "))
			} else {
				instances := in.instances(t)
				r := tr.Service(in.Service, instances, nil)
				decodeResult(t, r)
				slices.Reverse(instances)
				if diff := diffResults(r, tr.Service(in.Service, instances, nil)); diff != "" {
					t.Errorf("instances in reverse order (-straight +reverse):\n%s", diff)
				}
				got = render(t, r)
			}
			if *update {
				out := txtar.File{Name: "out.yaml", Data: got}
				if i := at("out.yaml"); i >= 0 {
					archive.Files[i] = out
				} else {
					archive.Files = append(archive.Files, out)
				}
				if err := os.WriteFile(file, txtar.Format(archive), 0o644); err != nil {
					t.Fatal(err)
				}
				return
			}
			if at("out.yaml") < 0 {
				t.Fatal("out.yaml is missing: run go test -update, and review it")
			}
			if diff := cmp.Diff(string(archive.Files[at("out.yaml")].Data), string(got)); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

// render writes a result for people: problems as comments, then the resources
// with their bodies. create_time is left out.
func render(t *testing.T, r *Result) []byte {
	t.Helper()
	var b bytes.Buffer
	for _, p := range r.Problems {
		fmt.Fprintf(&b, "# %s: %s\n", p.ID, p.Reason)
	}
	for _, p := range r.LeftOut {
		fmt.Fprintf(&b, "# left out: %s: %s\n", p.ID, p.Reason)
	}
	all := r.Endpoints
	if r.Entry == nil {
		fmt.Fprintf(&b, "# nothing is served\n")
	} else {
		all = append([]Encoded{*r.Entry}, all...)
		if r.Rule != nil {
			all = append(all, *r.Rule)
		}
	}
	for _, e := range all {
		res := &mcp.Resource{}
		if err := proto.Unmarshal(e.Resource, res); err != nil {
			t.Fatal(err)
		}
		res.Metadata.CreateTime = nil
		text, err := protojson.Marshal(res)
		if err != nil {
			t.Fatal(err)
		}
		if text, err = yaml.JSONToYAML(text); err != nil {
			t.Fatal(err)
		}
		b.WriteString("---\n")
		b.Write(text)
	}
	return b.Bytes()
}

// diffResults compares what callers can see of two results.
func diffResults(a, b *Result) string {
	type visible struct {
		Entry     *Encoded
		Endpoints []Encoded
		Rule      *Encoded
		Problems  []Problem
		LeftOut   []Problem
	}
	va, vb := visible{a.Entry, a.Endpoints, a.Rule, a.Problems, a.LeftOut}, visible{b.Entry, b.Endpoints, b.Rule, b.Problems, b.LeftOut}
	if reflect.DeepEqual(va, vb) {
		return ""
	}
	return cmp.Diff(va, vb)
}
