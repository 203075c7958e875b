package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// The pages of this repository are current.
func TestPages(t *testing.T) {
	if err := run("../..", true); err != nil {
		t.Error(err)
	}
}

// A page is made of a README and found to be stale; one by hand is left alone.
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
	write("adapters/made/README.md", "# made\n\n[a](../../docs/operations.md) [b](../../docs/registries/hand.md) [c](../../examples/x) [d](#e)\n")
	write("adapters/hand/README.md", "# hand\n")
	write("docs/registries/hand.md", "# By hand\n")
	if err := run(root, true); err == nil || !strings.Contains(err.Error(), "made.md is not current") || strings.Contains(err.Error(), "hand.md") {
		t.Errorf("a page that is missing: %v", err)
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
	if want := mark + "made/README.md. Do not edit. -->\n\n# made\n\n[a](../operations.md) [b](hand.md) [c](../../examples/x) [d](#e)\n"; string(got) != want || err != nil {
		t.Errorf("%q, %v, want %q", got, err, want)
	}
	hand, err := os.ReadFile(filepath.Join(root, "docs/registries/hand.md"))
	if string(hand) != "# By hand\n" || err != nil {
		t.Errorf("by hand: %q, %v", hand, err)
	}
}
