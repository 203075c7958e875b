package release

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/isthmus-mesh/isthmus/internal/testenv"
)

// The program as it is released is the same file wherever and whenever it is
// built from the same sources.
func TestReproducibleBuild(t *testing.T) {
	testenv.SkipIfShort(t)
	root, err := testenv.Root()
	if err != nil {
		t.Fatal(err)
	}
	list := exec.CommandContext(t.Context(), "git", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
	list.Dir = root
	files, err := list.Output()
	if err != nil {
		t.Fatalf("list the sources: %v", err)
	}
	elsewhere := filepath.Join(t.TempDir(), "another", "place")
	old := time.Date(2001, 1, 1, 0, 0, 0, 0, time.UTC)
	for _, name := range strings.Split(strings.TrimSuffix(string(files), "\x00"), "\x00") {
		text, err := os.ReadFile(filepath.Join(root, name))
		if os.IsNotExist(err) {
			continue // deleted, and not committed yet
		}
		if err != nil {
			t.Fatal(err)
		}
		to := filepath.Join(elsewhere, name)
		if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(to, text, 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Chtimes(to, old, old); err != nil {
			t.Fatal(err)
		}
	}
	build := func(dir string) []byte {
		out := filepath.Join(t.TempDir(), "isthmus")
		// As in the Dockerfile. The copy has no repository to take a version
		// from.
		cmd := exec.CommandContext(t.Context(), "go", "build", "-trimpath", "-buildvcs=false", "-ldflags", "-s -w -X main.version=v1", "-o", out, "./cmd/isthmus")
		cmd.Dir = dir
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOFLAGS=")
		if text, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("build in %s: %v\n%s", dir, err, text)
		}
		program, err := os.ReadFile(out)
		if err != nil {
			t.Fatal(err)
		}
		return program
	}
	here, there := build(root), build(elsewhere)
	if !bytes.Equal(here, there) {
		t.Errorf("two builds differ: %d and %d bytes", len(here), len(there))
	}
	if bytes.Contains(here, []byte(root)) {
		t.Errorf("the program has the path of its sources")
	}
}
