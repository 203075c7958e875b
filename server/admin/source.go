package admin

import (
	"encoding/json"
	"iter"
	"time"
)

// Source is what is shown. Its methods are quick, never block and may be called from any goroutine. What they return belongs to
// the caller.
type Source interface {
	// NotReady says why /readyz says 503, in words; empty if it does not. It is asked often, and collects nothing else.
	NotReady() []string
	// Overview returns everything but the lists below.
	Overview() Overview
	// Services yields each service of each registry once, in any order.
	Services() iter.Seq[Service]
	// Resources yields each resource once, in any order, as sinks of the inline shape get them and WorkloadEntries too.
	Resources() iter.Seq[Resource]
	// Changes yields the latest changes that are still known, newest first.
	Changes() iter.Seq[Change]
}

// Overview is the state of the bridge.
type Overview struct {
	Version    string     `json:"version"` // of the program
	Started    time.Time  `json:"started"`
	Revision   uint64     `json:"revision"`  // how many changes the store has seen
	NotReady   []string   `json:"not_ready"` // why /readyz says 503, in words; empty if it does not
	Registries []Registry `json:"registries"`
	Sinks      []Sink     `json:"sinks"`
}

// Registry is the state of one registry.
type Registry struct {
	Name        string    `json:"name"`
	Adapter     string    `json:"adapter"`
	Version     string    `json:"version,omitempty"`    // of the adapter
	Phase       string    `json:"phase"`                // one word
	Explanation string    `json:"explanation"`          // the phase in a sentence
	Since       time.Time `json:"since,omitzero"`       // of the phase
	Error       string    `json:"error,omitempty"`      // why what is served may be old; empty while nothing is wrong
	LastError   string    `json:"last_error,omitempty"` // what went wrong last; it is over if Error is empty
	LastErrorAt time.Time `json:"last_error_at,omitzero"`
	Detail      string    `json:"detail,omitempty"` // how it is followed, if that is worth telling
	Synced      bool      `json:"synced"`           // a first listing is in
	// ListingSince is since when the listing is incomplete; zero while it is complete.
	ListingSince time.Time `json:"listing_since,omitzero"`
	// LastHeard is when the registry itself answered or sent anything last, as its adapter tells it; zero if it does not tell.
	LastHeard time.Time `json:"last_heard,omitzero"`
	PID       int       `json:"pid,omitempty"`
	Restarts  int       `json:"restarts"`
	Revision  uint64    `json:"revision"` // of the last change that the registry made
	Services  int       `json:"services"`
	Instances int       `json:"instances"`
	Resources int       `json:"resources"`
	Bytes     int       `json:"bytes"` // of these, as limits.bytes_per_registry counts
	// ProblemCount is the number of problems; Problems may be fewer.
	ProblemCount int       `json:"problem_count"`
	Problems     []Problem `json:"problems"`
}

// Problem is something in a registry that can not be used as it is.
type Problem struct {
	ID     string `json:"id"`
	Reason string `json:"reason"`
}

// Sink is one connected stream.
type Sink struct {
	Address       string         `json:"address"`
	Node          string         `json:"node"`
	Version       string         `json:"version,omitempty"` // what the node says of itself
	Protocol      string         `json:"protocol"`          // sotw, delta, mcp or mcp reverse
	Profile       string         `json:"profile"`
	Shape         string         `json:"shape"`
	Connected     time.Time      `json:"connected"`
	StaleNonces   uint64         `json:"stale_nonces,omitempty"` // requests that were ignored; of mcp only
	Subscriptions []Subscription `json:"subscriptions"`
}

// Subscription is one sink's interest in one type.
type Subscription struct {
	TypeURL       string `json:"type_url"`
	Collection    string `json:"collection"`
	State         string `json:"state"` // held, sent or current
	Sent          uint64 `json:"sent"`  // responses
	SentVersion   string `json:"sent_version"`
	SentRevision  uint64 `json:"sent_revision"`
	AckedVersion  string `json:"acked_version"`
	AckedRevision uint64 `json:"acked_revision"`
	// Lag is how many revisions of the store the sink has not confirmed; changes of other collections count too while a
	// response is under way.
	Lag       uint64 `json:"lag"`
	Nacks     uint64 `json:"nacks"`
	LastNack  string `json:"last_nack,omitempty"`
	Resources int    `json:"resources"` // in the newest response
	Bytes     int    `json:"bytes"`     // of the newest response

	// The rest is of mcp only.

	// Incremental says that the newest response was.
	Incremental bool `json:"incremental,omitempty"`
	// Oversize says that the newest response is larger than a Pilot accepts unless it is told to.
	Oversize bool `json:"oversize,omitempty"`
	// Waiting says what one that is held waits for besides its registries: "profile", a collection that has to be acknowledged first, or
	// "penalty".
	Waiting string `json:"waiting,omitempty"`
}

// Service is one service and what became of it.
type Service struct {
	Registry  string   `json:"registry"`
	Name      string   `json:"name"` // namespace/name of its ServiceEntry
	Hosts     []string `json:"hosts"`
	Endpoints int      `json:"endpoints"`
	Version   string   `json:"version"`
	// ShadowedBy is the registry that owns the name; this one's service is not served then. It is empty if it is served.
	ShadowedBy string `json:"shadowed_by,omitempty"`
}

// Resource is one resource as it is served.
type Resource struct {
	Registry   string `json:"registry"`
	Collection string `json:"collection"`
	Name       string `json:"name"`
	Version    string `json:"version"`
	// Body returns the resource as protobuf JSON. It is called only for what is asked for with ?body=true; nil leaves
	// the body out.
	Body func() (json.RawMessage, error) `json:"-"`
}

// Change is one change of a resource.
type Change struct {
	Revision   uint64    `json:"revision"` // several changes that came in one batch may share one
	Time       time.Time `json:"time,omitzero"`
	Registry   string    `json:"registry,omitempty"`
	Collection string    `json:"collection"`
	Name       string    `json:"name"`
	Version    string    `json:"version,omitempty"`
	Op         string    `json:"op"` // upsert or remove
}
