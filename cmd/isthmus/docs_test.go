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
// explained in docs/reference/log.md, and every phase in phases.md; a message
// that is explained there is one that can come.
func TestOperations(t *testing.T) {
	read := func(page string) string {
		text, err := os.ReadFile("../../docs/reference/" + page)
		if err != nil {
			t.Fatal(err)
		}
		return string(text)
	}
	lines, phases := read("log.md"), read("phases.md")
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
				if !strings.Contains(lines, "`"+message+"`") {
					t.Errorf("%s logs %q, which docs/reference/log.md does not explain", path, m[1])
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
	rows := firstCell.FindAllStringSubmatch(lines, -1)
	if len(rows) < 50 {
		t.Errorf("%d rows were found: the pattern is wrong", len(rows))
	}
	for _, r := range rows {
		for message := range strings.SplitSeq(strings.Trim(r[1], "`"), "`, `") {
			if !strings.Contains(sources.String(), message) {
				t.Errorf("docs/reference/log.md explains %q, which nothing logs", message)
			}
		}
	}
	for _, phase := range append(supervisor.Phases(), supervisor.PhaseRestored, supervisor.PhaseRemovalPaused) {
		if !strings.Contains(phases, "| `"+phase.String()+"` |") {
			t.Errorf("docs/reference/phases.md lacks the phase %s", phase)
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
