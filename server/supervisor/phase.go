package supervisor

import "time"

// Phase is a phase in the life of a registry's plugin.
type Phase uint8

const (
	// PhaseStopped means that the supervisor, and so the plugin, does not run.
	PhaseStopped Phase = iota
	// PhaseStarting means that the process is starting and not yet described.
	PhaseStarting
	// PhaseConfiguring means that the plugin is receiving its configuration.
	PhaseConfiguring
	// PhaseSyncing means that the first full listing is not complete.
	PhaseSyncing
	// PhaseLive means that the listing is complete and changes arrive as they
	// happen.
	PhaseLive
	// PhaseDegraded means that the plugin runs but cannot follow the registry
	// at the moment; its resources are retained.
	PhaseDegraded
	// PhaseRestarting means that the plugin ended and restarts after a pause;
	// its resources are retained.
	PhaseRestarting
	// PhaseFailed means that the plugin refuses its configuration. It is
	// retried periodically; its resources are retained.
	PhaseFailed
	// PhaseRestored is displayed for a registry that is served from disk. No
	// plugin has it.
	PhaseRestored
	// PhaseRemovalPaused is displayed in place of live while a removal that may
	// be accidental is paused. No plugin has it.
	PhaseRemovalPaused
)

// String returns the phase's name in lower case.
func (p Phase) String() string {
	switch p {
	case PhaseStarting:
		return "starting"
	case PhaseConfiguring:
		return "configuring"
	case PhaseSyncing:
		return "syncing"
	case PhaseLive:
		return "live"
	case PhaseRemovalPaused:
		return "removal-paused"
	case PhaseDegraded:
		return "degraded"
	case PhaseRestarting:
		return "restarting"
	case PhaseFailed:
		return "failed"
	case PhaseRestored:
		return "restored"
	default:
		return "stopped"
	}
}

// Sentence explains the phase, for display.
func (p Phase) Sentence() string {
	switch p {
	case PhaseStarting:
		return "The plugin's process is being started."
	case PhaseConfiguring:
		return "The plugin is being given its configuration."
	case PhaseSyncing:
		return "The plugin follows the registry; its first full listing is not complete yet."
	case PhaseLive:
		return "Changes arrive as they happen."
	case PhaseRemovalPaused:
		return "A removal looks like an accident and is paused; everything else arrives as it happens."
	case PhaseDegraded:
		return "The plugin cannot follow the registry at the moment; nothing is removed meanwhile."
	case PhaseRestarting:
		return "The plugin ended and is started again after a pause; what it has listed is served meanwhile."
	case PhaseRestored:
		return "The registry is served as it was kept on disk, until its first listing is complete."
	case PhaseFailed:
		return "The plugin refuses its configuration; what it listed before is served meanwhile."
	default:
		return "The plugin does not run."
	}
}

// MarshalText encodes the phase as its name.
func (p Phase) MarshalText() ([]byte, error) { return []byte(p.String()), nil }

// Phases returns all phases, in the order of a plugin's life.
func Phases() []Phase {
	return []Phase{
		PhaseStopped, PhaseStarting, PhaseConfiguring, PhaseSyncing, PhaseLive, PhaseDegraded, PhaseRestarting, PhaseFailed,
	}
}

// Status is a snapshot of a supervisor.
type Status struct {
	Registry string `json:"name"`
	// Adapter is the adapter's name as configured.
	Adapter string `json:"adapter"`
	// Version is the adapter's version, empty until it is known.
	Version string `json:"version,omitempty"`
	Phase   Phase  `json:"phase"`
	// Sentence explains the phase, for display.
	Sentence string `json:"explanation"`
	// Since is the start of the phase.
	Since time.Time `json:"since,omitzero"`
	// Waiting names the pending step, the time it has taken and its limit: "no
	// handshake for 8 s, of at most 10 s". It is empty in the first second, and
	// if no step is pending.
	Waiting string `json:"-"`
	// PID is the process id, 0 if there is no process.
	PID int `json:"pid,omitempty"`
	// Confinement is what the process may not do or only do, a phrase each, in
	// force since its configuration: what the kernel says of it, what bounds
	// it, then what the plugin says.
	Confinement []string `json:"confinement,omitempty"`
	// Restarts counts restarts of the plugin.
	Restarts int `json:"restarts"`
	// RetryAt is the time of the next start, in the phases restarting and
	// failed.
	RetryAt time.Time `json:"-"`
	// LastError is why the plugin ended last, or why it cannot follow the
	// registry at the moment.
	LastError string `json:"last_error,omitempty"`
	// LastErrorAt is the time of LastError.
	LastErrorAt time.Time `json:"last_error_at,omitzero"`
	// Violations are the errors in the configuration, in phase failed.
	Violations []Violation `json:"-"`
	// Services and Instances are the plugin's own counts.
	Services  uint64 `json:"-"`
	Instances uint64 `json:"-"`
	// LastMessage is the time of the plugin's last message.
	LastMessage time.Time `json:"-"`
	// LastHeard is when the registry last sent anything, as reported by the
	// adapter; zero if unknown.
	LastHeard time.Time `json:"last_heard,omitzero"`
}
