package deploy

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"
)

// A workflow runs the code of others by its digest, with the release that it
// was, and has no right that its jobs do not name.
func TestWorkflows(t *testing.T) {
	files, err := filepath.Glob(filepath.Join(root, ".github", "workflows", "*"))
	if err != nil || len(files) < 4 {
		t.Fatalf("workflows: %q, %v", files, err)
	}
	uses := regexp.MustCompile(`(?m)^\s*(?:- )?uses: (.*)$`)
	pinned := regexp.MustCompile(`^[\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+$`)
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		var workflow struct {
			Permissions map[string]string
			Jobs        map[string]struct{ Permissions map[string]string }
		}
		if err := yaml.Unmarshal(text, &workflow); err != nil {
			t.Fatalf("%s: %v", file, err)
		}
		if workflow.Permissions == nil || len(workflow.Permissions) > 0 || len(workflow.Jobs) == 0 {
			t.Errorf("%s: permissions %v, jobs %d", file, workflow.Permissions, len(workflow.Jobs))
		}
		for _, use := range uses.FindAllStringSubmatch(string(text), -1) {
			if !pinned.MatchString(use[1]) {
				t.Errorf("%s: %s is not pinned by its digest", filepath.Base(file), use[1])
			}
		}
	}
}

// OSS-Fuzz gets every fuzz target, each under a name of its own.
func TestOSSFuzz(t *testing.T) {
	bin, list := t.TempDir(), filepath.Join(t.TempDir(), "list")
	stub := "#!/bin/sh\necho \"$@\" >> " + list + "\n"
	if err := os.WriteFile(filepath.Join(bin, "compile_native_go_fuzzer"), []byte(stub), 0o755); err != nil { //nolint:gosec // a program
		t.Fatal(err)
	}
	cmd := command(t, "bash", root, "tools/oss-fuzz/build.sh")
	cmd.Env = append(os.Environ(), "PATH="+bin+":"+os.Getenv("PATH"))
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	got, err := os.ReadFile(list)
	if err != nil {
		t.Fatal(err)
	}
	names := map[string]bool{}
	for line := range strings.Lines(string(got)) {
		names[strings.Fields(line)[2]] = true
	}
	want := 0
	target := regexp.MustCompile(`(?m)^func Fuzz\w+\(`)
	err = filepath.WalkDir(root, func(path string, d os.DirEntry, err error) error {
		if err == nil && strings.HasSuffix(path, "_test.go") {
			var text []byte
			text, err = os.ReadFile(path)
			want += len(target.FindAll(text, -1))
		}
		return err
	})
	if err != nil || want == 0 || len(names) != want {
		t.Errorf("%d targets are built, and there are %d: %v", len(names), want, err)
	}
}
