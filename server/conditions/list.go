package conditions

import (
	"cmp"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// Condition is one thing that is wrong.
type Condition struct {
	Kind     Kind     `json:"condition"`
	Severity Severity `json:"severity"`
	// Subject is what has it: "registry dc1", "listener listen.xds".
	Subject string    `json:"subject"`
	Since   time.Time `json:"since"`
	Problem string    `json:"problem"`
	Affects string    `json:"affects"`
	Cure    string    `json:"cure"`
	// Link is the section of the runbooks.
	Link string `json:"link"`
}

// New returns a condition of a kind. A zero since means from when a [List] has
// it first.
func New(kind Kind, subject string, since time.Time, format string, args ...any) Condition {
	d := kind.definition()
	return Condition{
		Kind: kind, Severity: d.Severity, Subject: subject, Since: since, Problem: fmt.Sprintf(format, args...),
		Affects: d.Affects, Cure: d.Cure, Link: kind.Link(),
	}
}

// String returns the condition as one line.
func (c Condition) String() string {
	since := ""
	if !c.Since.IsZero() {
		since = ", since " + c.Since.UTC().Format(time.RFC3339)
	}
	parts := []string{fmt.Sprintf("%s: %s: %s%s.", c.Subject, c.Kind, strings.TrimSuffix(c.Problem, "."), since)}
	for _, p := range []string{c.Affects, c.Cure} {
		if p != "" {
			parts = append(parts, p)
		}
	}
	line := strings.Join(append(parts, "See "+c.Link), " ")
	return strings.Map(func(r rune) rune {
		if r == '\n' || r == '\r' {
			return ' '
		}
		return r
	}, line)
}

// id identifies a condition over time.
type id struct {
	kind    Kind
	subject string
}

// List is what is wrong now. It is safe for concurrent use.
type List struct {
	log  *slog.Logger
	desc *prometheus.Desc
	now  atomic.Pointer[[]Condition]

	mu    sync.Mutex
	since map[id]time.Time // of each condition in now; guarded by mu
}

// NewList returns an empty list and registers its metric.
func NewList(reg prometheus.Registerer, log *slog.Logger) *List {
	l := &List{
		log: log, since: make(map[id]time.Time),
		desc: prometheus.NewDesc("isthmus_condition", "1 for each thing that is wrong now; 0, without a subject, for each kind of which there is none.", []string{"condition", "subject"}, nil),
	}
	l.now.Store(&[]Condition{})
	reg.MustRegister(l)
	return l
}

// Get returns what is wrong, the worst first. The caller must not change it.
func (l *List) Get() []Condition { return *l.now.Load() }

// Set replaces the list. Conditions without a time get that of the first list
// that had them. It logs what begins and ends of those that nothing else logs.
func (l *List) Set(now time.Time, found []Condition) {
	l.mu.Lock()
	defer l.mu.Unlock()
	since := make(map[id]time.Time, len(found))
	for i := range found {
		c := &found[i]
		key := id{c.Kind, c.Subject}
		first, known := l.since[key]
		if !known {
			first = now
		}
		since[key] = first
		if c.Since.IsZero() {
			c.Since = first
		}
		if !known && c.Kind.definition().Logged {
			l.log.Warn("a condition needs attention", "condition", c.Kind, "subject", c.Subject, "problem", c.Problem, "affects", c.Affects, "cure", c.Cure, "see", c.Link)
		}
	}
	for key := range l.since {
		if _, still := since[key]; !still && key.kind.definition().Logged {
			l.log.Info("a condition is over", "condition", key.kind, "subject", key.subject)
		}
	}
	slices.SortStableFunc(found, func(a, b Condition) int { return cmp.Compare(a.Severity.rank(), b.Severity.rank()) })
	l.since = since
	l.now.Store(&found)
}

// Describe implements [prometheus.Collector].
func (l *List) Describe(ch chan<- *prometheus.Desc) { ch <- l.desc }

// Collect implements [prometheus.Collector]. Subjects of sinks are left out of
// the label, as there is no bound on them.
func (l *List) Collect(ch chan<- prometheus.Metric) {
	seen := make(map[id]bool)
	series := func(k Kind, subject string, value float64) {
		if key := (id{k, subject}); !seen[key] {
			seen[key], seen[id{k, ""}] = true, true
			ch <- prometheus.MustNewConstMetric(l.desc, prometheus.GaugeValue, value, string(k), subject)
		}
	}
	for _, c := range l.Get() {
		subject := c.Subject
		if strings.HasPrefix(subject, "sink ") {
			subject = "sinks"
		}
		series(c.Kind, subject, 1)
	}
	for _, d := range definitions {
		series(d.Kind, "", 0)
	}
}
