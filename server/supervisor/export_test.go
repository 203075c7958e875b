package supervisor

import "time"

// Hurry shortens the host's limits for tests with plugins that misbehave.
func (h *Host) Hurry() {
	h.limits = limits{
		start:      3 * time.Second,
		answer:     time.Second,
		end:        time.Second,
		silence:    3 * time.Second,
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

// Backoff returns the pauses of a bridge as it is outside of tests: after a process that was live for some time, and after a configuration was refused.
func Backoff() (restart func(live time.Duration) time.Duration, refused func() time.Duration) {
	b := &backoff{limits: defaultLimits}
	return b.restart, b.refused
}
