package admin

import (
	"context"
	"encoding/json"
	"errors"
	"iter"
	"time"

	"github.com/isthmus-mesh/isthmus/server/conditions"
	"github.com/isthmus-mesh/isthmus/server/kubernetes"
	"github.com/isthmus-mesh/isthmus/server/state"
	"github.com/isthmus-mesh/isthmus/server/state/history"
	"github.com/isthmus-mesh/isthmus/server/state/status"
	"github.com/isthmus-mesh/isthmus/server/stream"
	"github.com/isthmus-mesh/isthmus/server/supervisor"
)

// Source provides what is shown. Its methods do not block and may be called
// from any goroutine. The caller owns the results.
type Source interface {
	// NotReady returns the reasons why /readyz answers 503, empty if it does
	// not. It is called often and must be cheap.
	NotReady() []string
	// Conditions returns what is wrong now, the worst first; mostly nothing is.
	// It is called as often.
	Conditions() []conditions.Condition
	// Overview returns everything but the lists below.
	Overview() Overview
	// Services yields each service of each registry once, in any order.
	Services() iter.Seq[status.Service]
	// Resources yields each resource once, in any order: the inline shape, and
	// WorkloadEntries, as sinks of a profile receive them, or tools if it is
	// empty. The error is that of a profile that does not exist.
	Resources(profile string) (iter.Seq[Resource], error)
	// Changes yields the latest recorded changes, newest first.
	Changes() iter.Seq[history.Event]
	// Changed returns a channel that is closed when anything changes. Get it
	// before Changes.
	Changed() <-chan struct{}
	// Samples returns the size of the state over time, oldest first.
	Samples() []history.Sample
	// Kept yields what is served although its registry no longer has it, in any
	// order: of one registry, or of all if the name is empty.
	Removals(registry string) iter.Seq[status.Removal]
	// Explain follows one host, in lower case, from registries to sinks.
	// Unlike the others it may take seconds, as it asks the plugins.
	Explain(ctx context.Context, host string) Explanation
	// Decide allows or keeps what is paused of a registry's removals, and
	// returns what that was. The error is [ErrNoRegistry],
	// [protect.ErrNothingPaused] or [protect.ErrAlreadyKept].
	Decide(registry string, accept bool) (state.Protection, error)
}

// ErrNoRegistry means that there is no registry of that name.
var ErrNoRegistry = errors.New("there is no registry of this name; /api/v1/registries lists them")

// Overview is the state of the bridge.
type Overview struct {
	Version    string                 // of the program
	Config     Config                 // in force
	Started    time.Time              // of the bridge
	Revision   state.Revision         // number of changes of the state
	NotReady   []string               // reasons why /readyz answers 503
	Conditions []conditions.Condition // what is wrong now, the worst first
	State      State                  // last good state on disk
	Registries []Registry             // in the order of the configuration
	Conflicts  []status.Conflict      // hosts that several services have
	Sinks      []stream.Status        // connected ones
	Consumers  []Consumer             // in the order of the configuration
}

// Consumer is a consumer that is written to.
type Consumer struct {
	kubernetes.Status
	// Kubeconfig is the file that names its cluster, "" for that of the pod.
	Kubeconfig string `json:"kubeconfig,omitempty"`
	// All yields its objects.
	All func() iter.Seq[kubernetes.Object] `json:"-"`
}

// State is the status of the last good state on disk.
type State struct {
	Dir       string // empty if the state is not kept
	Bytes     int64
	WrittenAt time.Time
	// Error says why the state cannot be written or could not be read at the
	// start; empty without an error.
	Error string
}

// Config is the configuration in force.
type Config struct {
	File       string    `json:"file,omitempty"`
	Hash       string    `json:"sha256"` // of the file
	Loaded     time.Time `json:"loaded,omitzero"`
	LastReload *Reload   `json:"last_reload,omitempty"`
	Memory     int       `json:"memory,omitempty"` // that there is, in bytes
	Limits     any       `json:"limits"`           // in force, by the names of the file
}

// Reload is an attempt to load the configuration again.
type Reload struct {
	Time     time.Time       `json:"time"`
	Trigger  string          `json:"trigger"`            // "SIGHUP", "file" or "API"
	Result   string          `json:"result"`             // "success" or "failure"
	Problems []ConfigProblem `json:"problems,omitempty"` // why the previous one stays in force
}

// ConfigProblem is something that is wrong with a configuration.
type ConfigProblem struct {
	File   string `json:"file,omitempty"`
	Line   int    `json:"line,omitempty"` // from 1
	Column int    `json:"column,omitempty"`
	Field  string `json:"field,omitempty"` // a dotted path
	Reason string `json:"reason"`
}

// Reloaded is what a configuration changed, or would change.
type Reloaded struct {
	Result string `json:"result"` // "success" or "failure"
	Hash   string `json:"sha256"` // of the configuration in force
	// Changed says whether anything changes.
	Changed bool `json:"changed"`
	// Changes is what, by names of registries, listeners and fields. Values are
	// not in it.
	Changes any `json:"changes,omitempty"`
	// Problems are why nothing is changed.
	Problems []ConfigProblem `json:"problems,omitempty"`
}

// Operator carries out what the API is asked to do. Its methods may be called
// from any goroutine.
type Operator interface {
	// Reload loads the configuration again. The error is that of a bridge that
	// is ending, or of ctx; a configuration that is refused is no error.
	Reload(ctx context.Context, trigger string) (Reloaded, error)
	// SetLogLevel changes the log level until the next reload, and returns the
	// one before. The error is that of a level that does not exist, or of a
	// bridge without levels.
	SetLogLevel(level string) (was string, err error)
	// Compare returns what the text of a configuration file would change. It
	// changes nothing, and asks no plugin.
	Compare(text []byte) Reloaded
}

// The two halves of a registry's status. Both types are named Status, so
// embedding them in one struct needs aliases.
type (
	// Plugin is the status of the plugin that follows the registry.
	Plugin = supervisor.Status
	// Served is the status of what the bridge has of the registry.
	Served = state.Status
)

// Registry is the status of one registry, in the types of the packages that own
// it.
type Registry struct {
	Plugin
	Served
	Error     string          `json:"error,omitempty"` // why the registry may be stale; empty while it is followed
	Resources int             `json:"resources"`       // of all collections
	Problems  []state.Problem `json:"problems"`        // fewer than ProblemCount if there are very many
	Skipped   []state.Problem `json:"skipped"`         // what is not meant to be served
	LeftOut   []state.Problem `json:"left_out"`        // the same under its name before this release
}

// Resource is one served resource.
type Resource struct {
	Registry   string `json:"registry"`
	Collection string `json:"collection"`
	Name       string `json:"name"`
	Version    string `json:"version"`
	// Body returns the resource as protobuf JSON. It is called only with
	// ?body=true; nil omits the body.
	Body func() (json.RawMessage, error) `json:"-"`
	// HasAddress reports whether an endpoint in the resource has this address,
	// or unless whole one that begins so; nil if none has any.
	HasAddress func(address string, whole bool) bool `json:"-"`
}
