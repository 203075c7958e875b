package kubernetes

import (
	"flag"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/rogpeppe/go-internal/txtar"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
	mcp "istio.io/api/mcp/v1alpha1"
	networking "istio.io/api/networking/v1alpha3"
	"sigs.k8s.io/yaml"
)

// update reports whether what comes out is written into testdata: the flag
// -update of package servertest.
func update() bool { return flag.Lookup("update").Value.String() == "true" }

// golden compares the files of a golden with what was made, or updates them.
func golden(t *testing.T, file string, archive *txtar.Archive, made []txtar.File) {
	t.Helper()
	now := txtar.Format(&txtar.Archive{Comment: archive.Comment, Files: made})
	if update() {
		if err := os.WriteFile(file, now, 0o600); err != nil {
			t.Fatal(err)
		}
		return
	}
	if diff := cmp.Diff(string(txtar.Format(archive)), string(now)); diff != "" {
		t.Error(diff)
	}
}

// input is the in.yaml of a golden.
type input struct {
	Stub Stub           `json:"stub"`
	Name string         `json:"name"`
	Spec map[string]any `json:"spec"`
}

// servedAs returns a ServiceEntry as it is served.
func servedAs(t *testing.T, name string, spec map[string]any) *mcp.Resource {
	t.Helper()
	return parsed(t, name, spec, new(networking.ServiceEntry))
}

// parsed returns a resource, whose body is a message of the type of body.
func parsed(t *testing.T, name string, spec map[string]any, body proto.Message) *mcp.Resource {
	t.Helper()
	text, err := yaml.Marshal(spec)
	if err == nil {
		text, err = yaml.YAMLToJSON(text)
	}
	e := new(anypb.Any)
	if err == nil {
		err = protojson.Unmarshal(text, body)
	}
	if err == nil {
		err = e.MarshalFrom(body)
	}
	if err != nil {
		t.Fatal(err)
	}
	return &mcp.Resource{Metadata: &mcp.Metadata{Name: name}, Body: e}
}

// Each archive in testdata holds a ServiceEntry as istiod has it (in.yaml), and
// its stub (out.yaml) or the reason why it has none (error).
func TestGolden(t *testing.T) {
	files, err := filepath.Glob("testdata/*.txtar")
	if err != nil || len(files) == 0 {
		t.Fatalf("testdata: %d files, %v", len(files), err)
	}
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".txtar"), func(t *testing.T) {
			archive, err := txtar.ParseFile(file)
			if err != nil || len(archive.Files) == 0 || archive.Files[0].Name != "in.yaml" {
				t.Fatalf("in.yaml is missing: %v", err)
			}
			var in input
			if err := yaml.UnmarshalStrict(archive.Files[0].Data, &in); err != nil {
				t.Fatal(err)
			}
			resource := servedAs(t, in.Name, in.Spec)
			before := resource.String()
			object, err := in.Stub.Object(resource)
			out := txtar.File{Name: "error"}
			if err != nil {
				out.Data = []byte(err.Error() + "\n")
			} else {
				out.Name = "out.yaml"
				if out.Data, err = yaml.Marshal(object.Object); err != nil {
					t.Fatal(err)
				}
				again, err := in.Stub.Object(servedAs(t, in.Name, in.Spec))
				if err != nil || !cmp.Equal(object.Object, again.Object) {
					t.Errorf("the same again is another object: %v", err)
				}
			}
			if resource.String() != before {
				t.Error("what was read was changed")
			}
			want := slices.Clone(archive.Files[:1])
			want = append(want, out)
			golden(t, file, archive, want)
		})
	}
}

// Whatever differs between two stubs, but for their instances, differs in the
// hash, and what has a long name has a name of its own.
func TestStubHash(t *testing.T) {
	base := func() (Stub, string, map[string]any) {
		return Stub{Meta: Meta{Consumer: "ambient"}, Waypoint: "waypoint"}, "shop/web", map[string]any{
			"hosts": []any{"web.shop"}, "addresses": []any{"241.0.0.1"}, "resolution": "STATIC",
			"ports": []any{map[string]any{"number": 80, "name": "http", "protocol": "HTTP"}},
		}
	}
	made := func(change func(s *Stub, name *string, spec map[string]any)) (name, hash string) {
		t.Helper()
		s, n, spec := base()
		change(&s, &n, spec)
		o, err := s.Object(servedAs(t, n, spec))
		if err != nil {
			t.Fatal(err)
		}
		return o.GetName(), o.GetAnnotations()[HashAnnotation]
	}
	seen := make(map[string]int)
	changes := []func(s *Stub, name *string, spec map[string]any){
		func(*Stub, *string, map[string]any) {},
		func(s *Stub, _ *string, _ map[string]any) { s.Consumer = "other" },
		func(s *Stub, _ *string, _ map[string]any) { s.Waypoint = "other" },
		func(s *Stub, _ *string, _ map[string]any) { s.WaypointNamespace = "other" },
		func(s *Stub, _ *string, _ map[string]any) { s.Labels = map[string]string{"a": "b"} },
		func(s *Stub, _ *string, _ map[string]any) { s.Annotations = map[string]string{"a": "b"} },
		func(_ *Stub, name *string, _ map[string]any) { *name = "shop/other" },
		func(_ *Stub, name *string, _ map[string]any) { *name = "other/web" },
		func(_ *Stub, _ *string, spec map[string]any) { spec["hosts"] = []any{"other.shop"} },
		func(_ *Stub, _ *string, spec map[string]any) { spec["addresses"] = []any{"241.0.0.2"} },
		func(_ *Stub, _ *string, spec map[string]any) { spec["location"] = "MESH_INTERNAL" },
		func(_ *Stub, _ *string, spec map[string]any) { spec["exportTo"] = []any{"."} },
		func(_ *Stub, _ *string, spec map[string]any) {
			spec["ports"].([]any)[0].(map[string]any)["number"] = 81
		},
		func(_ *Stub, _ *string, spec map[string]any) {
			spec["ports"].([]any)[0].(map[string]any)["protocol"] = "TCP"
		},
	}
	for i, change := range changes {
		_, hash := made(change)
		if j, had := seen[hash]; had {
			t.Errorf("changes %d and %d have the hash %s", i, j, hash)
		}
		seen[hash] = i
	}
	_, plain := made(changes[0])
	if _, hash := made(func(_ *Stub, _ *string, spec map[string]any) {
		spec["endpoints"] = []any{map[string]any{"address": "10.0.0.1"}}
		spec["workloadSelector"] = map[string]any{"labels": map[string]any{"app": "web"}}
	}); hash != plain {
		t.Error("instances change the stub")
	}

	long := "shop/" + strings.Repeat("a", 252)
	one, _ := made(func(_ *Stub, name *string, _ map[string]any) { *name = long + "b" })
	two, _ := made(func(_ *Stub, name *string, _ map[string]any) { *name = long + "c" })
	if one == two || len(one) > maxObjectName {
		t.Errorf("long names become %s (%d) and %s", one, len(one), two)
	}
}

// A real API server with Istio's kinds takes the stubs as they are, and has
// them with all their fields.
func testAccepted(t *testing.T, c *cluster) {
	c.Apply(t, "{apiVersion: v1, kind: Namespace, metadata: {name: shop}}")
	files, err := filepath.Glob("testdata/*.txtar")
	if err != nil {
		t.Fatal(err)
	}
	applied := 0
	for _, file := range files {
		archive, err := txtar.ParseFile(file)
		if err != nil {
			t.Fatal(err)
		}
		out := archive.Files[len(archive.Files)-1]
		if out.Name != "out.yaml" {
			continue
		}
		c.Apply(t, string(out.Data))
		applied++
		var sent, has map[string]any
		if err := yaml.Unmarshal(out.Data, &sent); err != nil {
			t.Fatal(err)
		}
		name := sent["metadata"].(map[string]any)["name"].(string)
		body, code, err := c.Do(t.Context(), http.MethodGet, "/apis/networking.istio.io/v1/namespaces/shop/serviceentries/"+name, "", "", nil)
		if err != nil || code != http.StatusOK {
			t.Fatalf("%s: status %d, %v: %s", name, code, err, body)
		}
		if err := yaml.Unmarshal(body, &has); err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(sent["spec"], has["spec"]); diff != "" {
			t.Errorf("%s: the API server has another spec: %s", file, diff)
		}
	}
	if applied < 2 {
		t.Errorf("%d stubs were applied", applied)
	}
}
