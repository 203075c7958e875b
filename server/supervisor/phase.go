package supervisor

import "time"

// Phase is where a registry's plugin is in its life.
type Phase uint8

const (
	// PhaseStopped means that the plugin does not run: the supervisor has not begun, or has ended.
	PhaseStopped Phase = iota
	// PhaseStarting means that the process is being started and has not said yet who it is.
	PhaseStarting
	// PhaseConfiguring means that the plugin is being given its configuration.
	PhaseConfiguring
	// PhaseSyncing means that the plugin follows the registry and has not sent its first full listing yet.
	PhaseSyncing
	// PhaseLive means that everything the plugin knows is here, and changes arrive as they happen.
	PhaseLive
	// PhaseDegraded means that the plugin runs and cannot follow the registry at the moment; what is known stays as it is.
	PhaseDegraded
	// PhaseRestarting means that the plugin ended and is started again after a pause; what is known stays as it is.
	PhaseRestarting
	// PhaseFailed means that the plugin refuses its configuration; it is asked again now and then, what is known stays as it is.
	PhaseFailed
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
	case PhaseDegraded:
		return "degraded"
	case PhaseRestarting:
		return "restarting"
	case PhaseFailed:
		return "failed"
	default:
		return "stopped"
	}
}

// Sentence says what the phase means, for people.
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
	case PhaseDegraded:
		return "The plugin cannot follow the registry at the moment; what is known is kept."
	case PhaseRestarting:
		return "The plugin ended and is started again after a pause; what is known is kept."
	case PhaseFailed:
		return "The plugin refuses its configuration; what is known is kept."
	default:
		return "The plugin does not run."
	}
}

// MarshalText encodes the phase as its name.
func (p Phase) MarshalText() ([]byte, error) { return []byte(p.String()), nil }

// Phases returns every phase, in the order of a plugin's life.
func Phases() []Phase {
	return []Phase{
		PhaseStopped, PhaseStarting, PhaseConfiguring, PhaseSyncing, PhaseLive, PhaseDegraded, PhaseRestarting, PhaseFailed,
	}
}

// Status is what a supervisor shows of itself. It is a snapshot.
type Status struct {
	Registry string `json:"registry"`
	// Adapter is the adapter's name as configured.
	Adapter string `json:"adapter"`
	// Version is the adapter's own version, once it has said it.
	Version string `json:"version,omitempty"`
	Phase   Phase  `json:"phase"`
	// Sentence says in words what the phase means.
	Sentence string `json:"sentence"`
	// Since is when the phase began.
	Since time.Time `json:"since"`
	// Waiting says what the plugin has not done yet, and for how long: "no handshake for 8 s, of at most 10 s". It is empty for the first
	// second, and in phases in which nothing is awaited.
	Waiting string `json:"waiting,omitempty"`
	// PID is the process id, 0 while there is no process.
	PID int `json:"pid,omitempty"`
	// Restarts is how often the plugin was started again.
	Restarts int `json:"restarts"`
	// RetryAt is when the plugin is started again, in the phases restarting and failed.
	RetryAt time.Time `json:"retry_at,omitzero"`
	// LastError is what ended the plugin last, or why it cannot follow the registry at the moment.
	LastError string `json:"last_error,omitempty"`
	// LastErrorAt is when LastError happened.
	LastErrorAt time.Time `json:"last_error_at,omitzero"`
	// Violations is what is wrong with the configuration, in phase failed.
	Violations []Violation `json:"violations,omitempty"`
	// Services and Instances are how many the plugin says it knows of.
	Services  uint64 `json:"services"`
	Instances uint64 `json:"instances"`
	// LastMessage is when the plugin was heard of last.
	LastMessage time.Time `json:"last_message,omitzero"`
	// LastHeard is when the registry itself answered or sent anything last, as its adapter tells it; zero if it does not tell.
	LastHeard time.Time `json:"last_heard,omitzero"`
}
