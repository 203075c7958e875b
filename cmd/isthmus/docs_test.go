package main

import (
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/isthmus-mesh/isthmus/server/supervisor"
)

// logged finds messages at Warn and above in the source.
var logged = regexp.MustCompile(`\.(?:(?:Warn|Error)\(|(?:Warn|Error)Context\([^,]+, |LogAttrs\([^,]+, slog\.Level(?:Warn|Error), )"([^"]+)"`)

// firstCell finds the first cell of a table's row.
var firstCell = regexp.MustCompile("(?m)^\\| (`[^|]+`) \\|")

// Every message of the bridge and of its adapters that needs somebody is
// explained in docs/operations.md, and so is every phase; a message that is
// explained there is one that can come.
func TestOperations(t *testing.T) {
	b, err := os.ReadFile("../../docs/operations.md")
	if err != nil {
		t.Fatal(err)
	}
	operations := string(b)
	var sources strings.Builder
	found := 0
	for _, dir := range []string{"../../server", "../../adapters", "../../plugin", "."} {
		err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
			if err != nil || d.IsDir() || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
				return err
			}
			source, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			sources.Write(source)
			for _, m := range logged.FindAllStringSubmatch(string(source), -1) {
				found++
				message, _, _ := strings.Cut(m[1], ":") // what follows is a cure
				if !strings.Contains(operations, "`"+message+"`") {
					t.Errorf("%s logs %q, which docs/operations.md does not explain", path, m[1])
				}
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	if found < 5 {
		t.Errorf("%d messages were found in the source: the pattern is wrong", found)
	}
	_, lines, _ := strings.Cut(operations, "\n## Log\n")
	lines, _, _ = strings.Cut(lines, "\n## ")
	rows := firstCell.FindAllStringSubmatch(lines, -1)
	if len(rows) < 50 {
		t.Errorf("%d rows were found: the pattern is wrong", len(rows))
	}
	for _, r := range rows {
		for message := range strings.SplitSeq(strings.Trim(r[1], "`"), "`, `") {
			if !strings.Contains(sources.String(), message) {
				t.Errorf("docs/operations.md explains %q, which nothing logs", message)
			}
		}
	}
	for _, phase := range append(supervisor.Phases(), supervisor.PhaseRestored, supervisor.PhaseProtected) {
		if !strings.Contains(operations, "| `"+phase.String()+"` |") {
			t.Errorf("docs/operations.md lacks the phase %s", phase)
		}
	}
}

// Every built-in adapter says of itself what it follows.
func TestSummaries(t *testing.T) {
	out, err := exec.CommandContext(t.Context(), "isthmus", "docs").Output()
	if err != nil {
		t.Fatal(err)
	}
	for name := range adapters {
		text := regexp.MustCompile(`(?m)^## config of ` + name + `\n\n[A-Z][a-z]+ [^\n]+\. See\s\[registries/` + name + `\.md\]`)
		if !text.Match(out) {
			t.Errorf("the reference does not say what %s follows", name)
		}
	}
}

// link finds links of Markdown.
var link = regexp.MustCompile(`\]\(([^)#\s]+)`)

// Every test that SECURITY.md names exists.
func TestThreatModel(t *testing.T) {
	const root = "../.."
	text, err := os.ReadFile(filepath.Join(root, "SECURITY.md"))
	if err != nil {
		t.Fatal(err)
	}
	missing := make(map[string]bool)
	for _, name := range regexp.MustCompile(`\b(Test|Fuzz)[A-Z]\w+`).FindAllString(string(text), -1) {
		missing[name] = true
	}
	if len(missing) < 20 {
		t.Errorf("it names %d tests", len(missing))
	}
	declared := regexp.MustCompile(`(?m)^func ((?:Test|Fuzz)\w+)\(`)
	if err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || !strings.HasSuffix(path, "_test.go") {
			return err
		}
		source, err := os.ReadFile(path)
		for _, m := range declared.FindAllStringSubmatch(string(source), -1) {
			delete(missing, m[1])
		}
		return err
	}); err != nil {
		t.Fatal(err)
	}
	for name := range missing {
		t.Errorf("it names %s, and there is no such test", name)
	}
}

// Every link to a file of the repository leads somewhere.
func TestLinks(t *testing.T) {
	const root = "../.."
	found := 0
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && (d.Name() == ".git" || d.Name() == "testdata"):
			return filepath.SkipDir
		case d.IsDir() || filepath.Ext(path) != ".md":
			return nil
		}
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		for _, m := range link.FindAllStringSubmatch(string(text), -1) {
			if strings.Contains(m[1], "://") || strings.HasPrefix(m[1], "mailto:") {
				continue
			}
			found++
			if _, err := os.Stat(filepath.Join(filepath.Dir(path), m[1])); err != nil {
				t.Errorf("%s links to %s: %v", path, m[1], err)
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if found < 10 {
		t.Errorf("%d links were found: the pattern is wrong", found)
	}
}
