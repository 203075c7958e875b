package supervisor

import (
	"io"
	"log/slog"
	"time"
)

// Hurry shortens the host's limits for tests with plugins that misbehave.
func (h *Host) Hurry() {
	h.limits = limits{
		start:      8 * time.Second,
		answer:     4 * time.Second,
		end:        time.Second,
		silence:    6 * time.Second,
		minBackoff: 20 * time.Millisecond,
		maxBackoff: 200 * time.Millisecond,
		refused:    200 * time.Millisecond,
		healthy:    time.Minute,
	}
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
	b := &backoff{limits: defaultLimits}
	return b.restart, b.refused
}
