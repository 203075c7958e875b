package release

import (
	"debug/buildinfo"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"go.yaml.in/yaml/v3"

	"github.com/isthmus-mesh/isthmus/internal/testenv"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testdeploy"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testisthmus"
)

// The bill of materials that the release makes of the program names each module
// that is linked into it, Go itself, and the version of the release.
func TestSBOM(t *testing.T) {
	testenv.SkipIfShort(t)
	root, err := testenv.Root()
	if err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(filepath.Join(root, ".goreleaser.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	var release struct {
		SBOMs []struct {
			Cmd  string
			Args []string
		} `yaml:"sboms"`
	}
	if err := yaml.Unmarshal(text, &release); err != nil {
		t.Fatal(err)
	}
	made := release.SBOMs[0]
	if made.Cmd != testdeploy.CycloneDXTool.String() {
		t.Fatalf("the release uses %s", made.Cmd)
	}
	tool, err := testdeploy.CycloneDXTool.Fetch(t.Context(), t.Output())
	if err != nil {
		t.Fatal(err)
	}
	program, document := testisthmus.Binary(t), filepath.Join(t.TempDir(), "isthmus.cdx.json")
	var args []string
	for _, a := range made.Args {
		args = append(args, strings.NewReplacer("$document", document, "$artifact", program, "{{ .Version }}", "1.2.3").Replace(a))
	}
	if out, err := exec.CommandContext(t.Context(), tool, args...).CombinedOutput(); err != nil {
		t.Fatalf("%s %q: %v: %s", tool, args, err, out)
	}
	text, err = os.ReadFile(document)
	if err != nil {
		t.Fatal(err)
	}
	type component struct {
		Name, Version, PURL string
		Hashes              []struct{ Alg, Content string }
	}
	var sbom struct {
		BOMFormat, SpecVersion string
		Metadata               struct{ Component component }
		Components             []component
	}
	if err := json.Unmarshal(text, &sbom); err != nil {
		t.Fatal(err)
	}
	if sbom.BOMFormat != "CycloneDX" || sbom.Metadata.Component.Version != "v1.2.3" {
		t.Errorf("%s %s of version %q, want CycloneDX of version v1.2.3", sbom.BOMFormat, sbom.SpecVersion, sbom.Metadata.Component.Version)
	}
	info, err := buildinfo.ReadFile(program)
	if err != nil {
		t.Fatal(err)
	}
	want := []string{"std " + info.GoVersion}
	for _, m := range info.Deps {
		if m.Replace != nil {
			m = m.Replace
		}
		want = append(want, m.Path+" "+m.Version)
	}
	var got []string
	for _, c := range sbom.Components {
		got = append(got, c.Name+" "+c.Version)
		if c.Name != "std" && len(c.Hashes) == 0 {
			t.Errorf("%s has no checksum", c.Name)
		}
	}
	slices.Sort(want)
	slices.Sort(got)
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("what the program has and what is named differ:\n%s", diff)
	}
}
