package supervisor

import (
	"io"
	"log/slog"
	"math/rand/v2"
	"time"

	pluginv1 "github.com/isthmus-mesh/isthmus/plugin/proto/isthmus/plugin/v1"
)

// Hurry shortens the host's pauses for tests with plugins that misbehave. Steps
// may take as long as a busy machine needs.
func (h *Host) Hurry() {
	h.limits = limits{
		start:      time.Minute,
		answer:     time.Minute,
		end:        time.Second,
		silence:    time.Minute,
		minBackoff: 20 * time.Millisecond,
		maxBackoff: 200 * time.Millisecond,
		refused:    200 * time.Millisecond,
		healthy:    time.Minute,
	}
}

// HurryHung is Hurry for tests with plugins that hang, which are given up soon.
func (h *Host) HurryHung() {
	h.Hurry()
	h.limits.start, h.limits.answer, h.limits.silence = 8*time.Second, 4*time.Second, 6*time.Second
}

// Dir returns the directory of the sockets.
func (h *Host) Dir() string { return h.dir }

// ParseLine is parseLine.
var ParseLine = parseLine

// CopyLog puts what a plugin writes into a log, as for a plugin's stderr, and
// returns at the end of it.
func CopyLog(log *slog.Logger, r io.Reader) { newLogPump(log).copy(r, "stderr") }

// Bounds of a plugin's output.
const (
	MaxLine  = maxLine
	MaxLines = maxLines
	MaxBytes = maxBytes
)

// Backoff returns the pauses of a bridge as it is outside of tests: after a
// process that was live for some time, and after a configuration was refused.
func Backoff() (restart func(live time.Duration) time.Duration, refused func() time.Duration) {
	b := &backoff{limits: defaultLimits, jitter: rand.N[time.Duration]}
	return b.restart, b.refused
}

// Limits returns the time limits of a bridge as it is outside of tests.
func Limits() (start, answer, end, minBackoff, maxBackoff, refused, healthy time.Duration) {
	l := defaultLimits
	return l.start, l.answer, l.end, l.minBackoff, l.maxBackoff, l.refused, l.healthy
}

// SetOwn takes an adapter's own metrics.
func (m *Metrics) SetOwn(registry string, metrics ...*pluginv1.Metric) { m.own.set(registry, metrics) }
