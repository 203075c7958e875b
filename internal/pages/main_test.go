package main

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// The pages of this repository are current.
func TestPages(t *testing.T) {
	if err := run("../..", true); err != nil {
		t.Error(err)
	}
}

// A page is made of a README, and found to be missing or stale.
func TestRun(t *testing.T) {
	root := t.TempDir()
	write := func(name, text string) {
		t.Helper()
		file := filepath.Join(root, name)
		if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if err := run(root, false); err == nil {
		t.Error("a folder without adapters counts as the repository")
	}
	write("adapters/made/README.md", "# made\n\n[a](../../docs/operations.md) [b](../../docs/registries/other.md) [c](../../examples/x) [d](#e)\n")
	write("adapters/other/README.md", "# other\n")
	write("docs/registries/other.md", "# By hand\n")
	if err := run(root, true); err == nil || !strings.Contains(err.Error(), "made.md is not current") || !strings.Contains(err.Error(), "other.md is not current") {
		t.Errorf("a page that is missing, and another text: %v", err)
	}
	for range 2 {
		if err := run(root, false); err != nil {
			t.Fatal(err)
		}
	}
	if err := run(root, true); err != nil {
		t.Error(err)
	}
	got, err := os.ReadFile(filepath.Join(root, "docs/registries/made.md"))
	if want := "<!-- Made by \"make generate\" from adapters/made/README.md. Do not edit. -->\n\n# made\n\n[a](../operations.md) [b](other.md) [c](../../examples/x) [d](#e)\n"; string(got) != want || err != nil {
		t.Errorf("%q, %v, want %q", got, err, want)
	}
}

var (
	fences   = regexp.MustCompile("(?ms)^ *```.*?^ *```$")
	links    = regexp.MustCompile(`\]\(([^()\s]+)\)`)
	headings = regexp.MustCompile(`(?m)^#+ (.*)$`)
	unslug   = regexp.MustCompile(`[^a-z0-9 _-]`)
)

// Every link from a document to a file of this repository leads to one, and to
// one of its headings.
func TestLinks(t *testing.T) {
	read := func(file string) string {
		b, err := os.ReadFile(file)
		if err != nil {
			t.Error(err)
		}
		return fences.ReplaceAllString(string(b), "")
	}
	checked := 0
	check := func(file string) {
		for _, m := range links.FindAllStringSubmatch(read(file), -1) {
			path, anchor, _ := strings.Cut(m[1], "#")
			if strings.Contains(path, "://") {
				continue
			}
			checked++
			target := file
			if path != "" {
				target = filepath.Join(filepath.Dir(file), path)
			}
			if _, err := os.Stat(target); err != nil {
				t.Errorf("%s: link to %s: %v", file, m[1], err)
				continue
			}
			if anchor == "" {
				continue
			}
			found := false
			for _, h := range headings.FindAllStringSubmatch(read(target), -1) {
				found = found || anchor == strings.ReplaceAll(unslug.ReplaceAllString(strings.ToLower(h[1]), ""), " ", "-")
			}
			if !found {
				t.Errorf("%s: link to %s: there is no such heading", file, m[1])
			}
		}
	}
	for _, file := range []string{"README.md", "CONTRIBUTING.md", "adapters", "docs", "examples", "plugin", "server", "test", "translate"} {
		err := filepath.WalkDir(filepath.Join("../..", file), func(path string, _ fs.DirEntry, err error) error {
			if err == nil && filepath.Ext(path) == ".md" {
				check(path)
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	if checked < 50 {
		t.Errorf("%d links were found: the pattern is wrong", checked)
	}
}
