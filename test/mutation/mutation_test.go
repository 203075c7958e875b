package mutation

import (
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"
)

var (
	plant = flag.Bool("plant", false, "build and run with each defect, instead of looking only whether the patches fit")
	seeds = flag.Int("seeds", 60, "how many seeds a defect may survive")
)

const (
	root = "../.."
	doc  = root + "/docs/mutations.md"
)

// defect is one patch: a line that says what it does, then a diff.
type defect struct{ name, title, path string }

func defects(t *testing.T) (all []defect) {
	t.Helper()
	files, err := filepath.Glob("patches/*.patch")
	if err != nil || len(files) < 30 {
		t.Fatalf("%d patches, error %v", len(files), err)
	}
	for _, f := range files {
		text, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		title, _, _ := strings.Cut(string(text), "\n")
		path, err := filepath.Abs(f)
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, defect{strings.TrimSuffix(filepath.Base(f), ".patch"), title, path})
	}
	return all
}

var changed = regexp.MustCompile(`(?m)^\+\+\+ b/(.+)$`)

// overlay applies the patch to copies and returns the file for go test
// -overlay.
func (d defect) overlay(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	text, err := os.ReadFile(d.path)
	if err != nil {
		t.Fatal(err)
	}
	replace := map[string]string{}
	for _, m := range changed.FindAllSubmatch(text, -1) {
		name := string(m[1])
		source, err := os.ReadFile(filepath.Join(root, name))
		if err != nil {
			t.Fatal(err)
		}
		original, err := filepath.Abs(filepath.Join(root, name))
		if err != nil {
			t.Fatal(err)
		}
		replace[original] = filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(replace[original]), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(replace[original], source, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	cmd := exec.CommandContext(t.Context(), "git", "apply", d.path)
	cmd.Dir, cmd.Env = dir, append(os.Environ(), "GIT_CEILING_DIRECTORIES="+filepath.Dir(dir))
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%s does not fit any more; plant the same defect in the code as it is now: %v\n%s", d.name, err, out)
	}
	raw, err := json.Marshal(map[string]any{"Replace": replace})
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(dir, "overlay.json")
	if err := os.WriteFile(file, raw, 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}

// Every patch fits the source, and docs/mutations.md lists it.
func TestPatchesFit(t *testing.T) {
	text, err := os.ReadFile(doc)
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range defects(t) {
		d.overlay(t)
		if !bytes.Contains(text, []byte("| "+d.name+" | "+d.title+" |")) {
			t.Errorf("%s has no row for %s; write it by make mutation", doc, d.name)
		}
	}
}

var (
	violated = regexp.MustCompile(`guarantee (\d+), `)
	ofSeed   = regexp.MustCompile(`(?m)^ +--- FAIL: TestSeeds/(\d+) `)
	crashed  = regexp.MustCompile(`(?m)^(panic: .*|fatal error: .*)$`)
)

// The validator finds at least 28 of 30 planted defects. The table of
// docs/mutations.md is written anew.
func TestMutations(t *testing.T) {
	if !*plant {
		t.Skip("make mutation runs it")
	}
	var table strings.Builder
	found, all := 0, defects(t)
	for _, d := range all {
		t.Run(d.name, func(t *testing.T) {
			verdict := d.run(t)
			t.Log(verdict)
			if !strings.HasPrefix(verdict, "not found") {
				found++
			}
			fmt.Fprintf(&table, "| %s | %s | %s |\n", d.name, d.title, verdict)
		})
	}
	if float64(found) < float64(len(all))*28/30 {
		t.Errorf("%d of %d defects are found", found, len(all))
	}
	if t.Failed() || flag.Lookup("test.run").Value.String() != "^TestMutations$" {
		return // a part of them
	}
	head := fmt.Sprintf(`# Planted defects

Written by `+"`make mutation`"+`: each patch of [test/mutation](../test/mutation/patches)
is applied to a copy of the source, and seeds of the simulation run until the
validator reports a violation of a [guarantee](guarantees.md), at most %d.
%d of %d are found (%s).

| defect | what it does | found by |
|---|---|---|
`, *seeds, found, len(all), time.Now().Format(time.DateOnly))
	if err := os.WriteFile(doc, []byte(head+table.String()), 0o644); err != nil { //nolint:gosec // a page of the docs
		t.Error(err)
	}
}

// run returns what finds the defect.
func (d defect) run(t *testing.T) string {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "go", "test", "-overlay", d.overlay(t), "-count=1", "-failfast", "-timeout=3m",
		"-run=^TestSeeds$", "./test/simulation", "-seeds="+strconv.Itoa(*seeds))
	cmd.Dir = root
	out, err := cmd.CombinedOutput()
	seed := "1"
	if m := ofSeed.FindSubmatch(out); m != nil {
		seed = string(m[1])
	}
	var numbers []string
	for _, m := range violated.FindAllSubmatch(out, -1) {
		if n := string(m[1]); !slices.Contains(numbers, n) {
			numbers = append(numbers, n)
		}
	}
	switch {
	case err == nil:
		return "not found"
	case len(numbers) > 0:
		slices.SortFunc(numbers, func(a, b string) int { return len(a) - len(b) })
		return "guarantee " + strings.Join(numbers, ", ") + "; seed " + seed
	case crashed.Match(out):
		return fmt.Sprintf("not found by the validator: the bridge ends with %q", crashed.Find(out))
	}
	t.Fatalf("neither found nor survived: %v\n%s", err, out)
	return ""
}
