package conditions

import (
	"bytes"
	"log/slog"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
)

// Each kind has what it affects, a metric that is there without it, an alert
// that asks for that metric, and a section in the runbooks.
func TestKinds(t *testing.T) {
	read := func(file string) string {
		text, err := os.ReadFile("../../" + file)
		if err != nil {
			t.Fatal(err)
		}
		return string(text)
	}
	rules, runbooks := read("deploy/alerts/isthmus.rules.yaml"), read("docs/runbooks.md")
	reg := prometheus.NewPedanticRegistry()
	NewList(reg, slog.New(slog.DiscardHandler))
	if n, err := testutil.GatherAndCount(reg, "isthmus_condition"); err != nil || n != len(definitions) {
		t.Errorf("%d series for %d kinds: %v", n, len(definitions), err)
	}
	for _, d := range definitions {
		if d.Affects == "" {
			t.Errorf("%s does not say what it affects", d.Kind)
		}
		_, rule, ok := strings.Cut(rules, "- alert: "+d.Kind.Alert()+"\n")
		rule, _, _ = strings.Cut(rule, "- alert: ")
		if !ok || !strings.Contains(rule, `isthmus_condition{condition="`+string(d.Kind)+`"} == 1`) {
			t.Errorf("no alert %s asks for the condition %s", d.Kind.Alert(), d.Kind)
		}
		if !strings.Contains(rule, "{severity: "+string(d.Severity)+"}") {
			t.Errorf("%s is %s, and its alert is not", d.Kind, d.Severity)
		}
		if !strings.Contains(rule, "runbook_url: "+d.Kind.Link()+"\n") || !strings.Contains(runbooks, "\n## "+d.Kind.Alert()+"\n") {
			t.Errorf("no section of the runbooks for %s", d.Kind.Alert())
		}
	}
}

// A condition keeps the time at which it began while it lasts, and those that
// nothing else logs are logged once.
func TestList(t *testing.T) {
	var log bytes.Buffer
	reg := prometheus.NewPedanticRegistry()
	l := NewList(reg, slog.New(slog.NewTextHandler(&log, nil)))
	start := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	found := func() []Condition {
		return []Condition{
			New(SinkLags, "sink a", time.Time{}, "slow"), New(SinkLags, "sink b", time.Time{}, "slow"),
			New(TypesWaiting, "registry dc1", start.Add(-time.Hour), "it waits"),
		}
	}
	l.Set(start, found())
	l.Set(start.Add(time.Minute), found())
	var got []string
	for _, c := range l.Get() {
		got = append(got, string(c.Kind)+" "+c.Since.Format(time.TimeOnly))
	}
	if d := cmp.Diff([]string{"types-waiting 02:04:05", "sink-lags 03:04:05", "sink-lags 03:04:05"}, got); d != "" {
		t.Errorf("conditions (-want +got):\n%s", d)
	}
	if n := strings.Count(log.String(), "a condition needs attention"); n != 2 {
		t.Errorf("%d lines, want one for each slow sink:\n%s", n, log.String())
	}
	if err := testutil.GatherAndCompare(reg, strings.NewReader(""), "isthmus_none"); err != nil {
		t.Error(err)
	}
	if n := testutil.CollectAndCount(l); n != len(definitions) {
		t.Errorf("%d series, want one for both sinks", n)
	}
	l.Set(start.Add(2*time.Minute), nil)
	if n := strings.Count(log.String(), "a condition is over"); n != 2 || len(l.Get()) != 0 {
		t.Errorf("%d lines, %v", n, l.Get())
	}
	l.Set(start.Add(3*time.Minute), found()[:1])
	if since := l.Get()[0].Since; !since.Equal(start.Add(3 * time.Minute)) {
		t.Errorf("a condition that came again is there since %s", since)
	}
}

// A line says all that the page says, and is one line whatever a peer sent.
func TestString(t *testing.T) {
	c := New(RegistryNotLive, "registry dc1", time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC), "it is degraded: %s", "line one\nline two")
	for _, want := range []string{"registry dc1: registry-not-live: it is degraded: line one line two, since 2026-01-02T03:04:05Z.", c.Affects, c.Cure, "#isthmusregistrynotlive"} {
		if !strings.Contains(c.String(), want) {
			t.Errorf("%q lacks %q", c.String(), want)
		}
	}
}
