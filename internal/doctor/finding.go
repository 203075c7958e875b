package doctor

import (
	"fmt"
	"io"
	"strings"
)

// Severity says what a finding means.
type Severity string

const (
	// Failure is something that does not work.
	Failure Severity = "error"
	// Warning is something that works until a condition changes, or only for
	// some clients.
	Warning Severity = "warning"
	// Note is something that works and could be better. It does not count as a
	// finding for the exit code.
	Note Severity = "note"
)

// Finding is one result of a check.
type Finding struct {
	// Check identifies the check, for programs: "mesh-k8s".
	Check    string   `json:"check"`
	Severity Severity `json:"severity"`
	// Subject is what was looked at: "registry dc1", "mesh.yaml:3:5".
	Subject string `json:"subject"`
	// Problem says what is wrong and what follows from it.
	Problem string `json:"problem"`
	// Change says which line to change, and how. It may have several lines.
	Change string `json:"change,omitempty"`
}

// Report is the result of all checks.
type Report struct {
	// Looked lists what was looked at and found to be right, one line each.
	Looked   []string  `json:"looked"`
	Findings []Finding `json:"findings"`
}

// Count returns a number with its noun: "1 host", "2 hosts".
func Count(n int, one, more string) string {
	if n == 1 {
		return "1 " + one
	}
	return fmt.Sprintf("%d %s", n, more)
}

// Add adds findings to the report. Without findings ok says what was right.
func (r *Report) Add(ok string, found ...Finding) {
	r.Findings = append(r.Findings, found...)
	if len(found) == 0 && ok != "" {
		r.Looked = append(r.Looked, ok)
	}
}

// Bad returns the number of findings that are no notes.
func (r *Report) Bad() (n int) {
	for _, f := range r.Findings {
		if f.Severity != Note {
			n++
		}
	}
	return n
}

// Escape sequences of the colours of a terminal.
var colors = map[string]string{"ok": "\x1b[32m", string(Failure): "\x1b[31m", string(Warning): "\x1b[33m"}

// Write writes the report for people, with the colours of a terminal if color
// is set.
func (r *Report) Write(w io.Writer, color bool) error {
	var b strings.Builder
	line := func(word, format string, args ...any) {
		text := word
		if start := colors[word]; start != "" && color {
			text = start + word + "\x1b[0m"
		}
		fmt.Fprintf(&b, "%s%s "+format+"\n", append([]any{text, strings.Repeat(" ", max(0, 8-len(word)))}, args...)...)
	}
	for _, ok := range r.Looked {
		line("ok", "%s", ok)
	}
	for _, f := range r.Findings {
		line(string(f.Severity), "%s: %s", f.Subject, f.Problem)
		if f.Change != "" {
			lines := strings.Split(strings.TrimSuffix(f.Change, "\n"), "\n")
			fmt.Fprintf(&b, "         change: %s\n", lines[0])
			for _, l := range lines[1:] {
				fmt.Fprintf(&b, "                 %s\n", l)
			}
		}
	}
	_, err := io.WriteString(w, b.String())
	return err
}
