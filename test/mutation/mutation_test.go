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

// Defects that the simulation finds, and those that the tests of their own
// package find.
const (
	simulated = "patches"
	own       = "patches/own"
)

func defects(t *testing.T, folder string) (all []defect) {
	t.Helper()
	files, err := filepath.Glob(folder + "/*.patch")
	if err != nil || len(files) < 20 {
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
	for _, d := range append(defects(t, simulated), defects(t, own)...) {
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

// The validator finds at least 28 of 30 planted defects.
func TestMutations(t *testing.T) {
	judge(t, simulated, defect.simulate, 28./30, fmt.Sprintf(`# Planted defects

Written by `+"`make mutation`"+`: each patch of [test/mutation](../test/mutation/patches)
is applied to a copy of the source, and seeds of the simulation run until the
validator reports a violation of a [guarantee](guarantees.md), at most %d.
`, *seeds))
}

// The tests of a package find at least 19 of 20 defects that are planted in it,
// within 30 seconds each.
func TestOwn(t *testing.T) {
	judge(t, own, defect.test, 19./20, ownTitle+`

The tests of the package alone have to find these, within 30 seconds each.
`)
}

const ownTitle = "## Found by the tests of their package"

// judge plants the defects of a folder and writes their part of the document,
// which begins with head, anew.
func judge(t *testing.T, folder string, find func(defect, *testing.T) (verdict string), least float64, head string) {
	t.Helper()
	if !*plant {
		t.Skip("make mutation runs it")
	}
	all := defects(t, folder)
	verdicts := make([]string, len(all))
	t.Run("plant", func(t *testing.T) {
		for i, d := range all {
			t.Run(d.name, func(t *testing.T) {
				t.Parallel()
				verdicts[i] = find(d, t)
				t.Log(verdicts[i])
			})
		}
	})
	if t.Failed() || slices.Contains(verdicts, "") {
		return // a part of them
	}
	var table strings.Builder
	found := 0
	for i, d := range all {
		if !strings.HasPrefix(verdicts[i], "not found") {
			found++
		}
		fmt.Fprintf(&table, "| %s | %s | %s |\n", d.name, d.title, verdicts[i])
	}
	if float64(found) < float64(len(all))*least {
		t.Errorf("%d of %d defects are found", found, len(all))
	}
	text, err := os.ReadFile(doc)
	if err != nil {
		t.Fatal(err)
	}
	part := fmt.Sprintf("%s%d of %d are found (%s).\n\n| defect | what it does | found by |\n|---|---|---|\n%s",
		head, found, len(all), time.Now().Format(time.DateOnly), table.String())
	first, second, _ := strings.Cut(string(text), "\n"+ownTitle)
	if folder == own {
		second = strings.TrimPrefix(part, ownTitle)
	} else {
		first = part
	}
	if err := os.WriteFile(doc, []byte(first+"\n"+ownTitle+second), 0o644); err != nil { //nolint:gosec // a page of the docs
		t.Error(err)
	}
}

var failed = regexp.MustCompile(`(?m)^--- FAIL: (\w+) `)

// test returns which tests of its package find the defect.
func (d defect) test(t *testing.T) string {
	t.Helper()
	text, err := os.ReadFile(d.path)
	if err != nil {
		t.Fatal(err)
	}
	folder := filepath.Dir(string(changed.FindSubmatch(text)[1]))
	cmd := exec.CommandContext(t.Context(), "go", "test", "-overlay", d.overlay(t), "-count=1", "-vet=off", "-timeout=30s", "./"+folder)
	cmd.Dir = root
	out, err := cmd.CombinedOutput()
	var tests []string
	for _, m := range failed.FindAllSubmatch(out, -1) {
		tests = append(tests, string(m[1]))
	}
	slices.Sort(tests)
	switch {
	case err == nil:
		return "not found"
	case bytes.Contains(out, []byte("test timed out")):
		return "not found in time"
	case len(tests) > 0:
		return strings.Join(slices.Compact(tests), ", ")
	}
	t.Fatalf("neither found nor survived: %v\n%s", err, out)
	return ""
}

// simulate returns which guarantees the defect violates.
func (d defect) simulate(t *testing.T) string {
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
