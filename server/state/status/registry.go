// Package status says what operators see of the state.
//
// Its values are snapshots that nobody changes. [Metrics] exports them.
package status

import (
	"sync/atomic"
	"time"

	"github.com/isthmus-mesh/isthmus/server/changelog"
	"github.com/isthmus-mesh/isthmus/server/state/problems"
	"github.com/isthmus-mesh/isthmus/server/state/protect"
)

// Registry describes a registry to operators.
type Registry struct {
	Registry     string              `json:"-"`
	Synced       bool                `json:"synced"`                 // a first listing is complete
	Restored     time.Time           `json:"restored,omitzero"`      // time of the saved state being served; zero after the first listing
	Required     bool                `json:"required"`               // its collections wait until it is listed
	Released     bool                `json:"released,omitempty"`     // optional, not listed, and its collections were opened without it
	Waits        []string            `json:"waiting,omitempty"`      // collections that wait for it, sorted
	WaitingSince time.Time           `json:"waiting_since,omitzero"` // since when
	Listing      bool                `json:"-"`                      // a new listing is in progress
	ListingSince time.Time           `json:"listing_since,omitzero"` // start of the first listing not completed since
	Down         string              `json:"-"`                      // why no plugin is running
	Error        string              `json:"-"`                      // why the plugin cannot follow its registry
	Detail       string              `json:"detail,omitempty"`       // how the registry is followed; may be empty
	Since        time.Time           `json:"-"`                      // last change of the fields above
	Services     uint64              `json:"services"`               // as counted by the plugin
	Instances    uint64              `json:"instances"`              // as counted by the plugin
	Resources    map[string]int      `json:"-"`                      // served, by collection
	Bytes        int                 `json:"bytes"`                  // of its resources
	ProblemCount int                 `json:"problem_count"`
	SkippedCount int                 `json:"skipped_count"`        // not meant to be served
	Removals     int                 `json:"removals"`             // resources that the registry removed and that are served
	Protection   *protect.Protection `json:"protection,omitempty"` // nil if no removal is paused
	Revision     changelog.Revision  `json:"revision"`             // after the last change
	oldNames
	// Late reports that the registry was added when all collections were open,
	// so that none waits for it.
	Late bool `json:"-"`

	// Figures of metrics.

	Changes  map[Change]*atomic.Uint64 `json:"-"` // counters that go on
	Rejected uint64                    `json:"-"` // resources, since the start
	Reasons  problems.Kinds            `json:"-"` // of problems, by kind
	Skips    problems.Kinds            `json:"-"` // of what is skipped
}

// Change is a kind of change of resources.
type Change struct{ Collection, Op string }

// oldNames are fields under the names that they had before, for this release.
type oldNames struct {
	Holds        []string  `json:"holds,omitempty"`
	HeldSince    time.Time `json:"held_since,omitzero"`
	LeftOutCount int       `json:"left_out_count"`
	Kept         int       `json:"kept"`
}

// SetOldNames sets the fields under their names before.
func (s *Registry) SetOldNames() {
	s.oldNames = oldNames{s.Waits, s.WaitingSince, s.SkippedCount, s.Removals}
}

// Stale reports whether the served state may be older than the registry's.
func (s Registry) Stale() bool { return s.Down != "" || s.Error != "" }

// Listed reports whether a complete state is served: from a listing, or
// restored.
func (s Registry) Listed() bool { return s.Synced || !s.Restored.IsZero() }
