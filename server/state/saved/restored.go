package saved

import (
	"errors"
	"time"
)

// Registry is the registry that a number in items identifies.
type Registry struct {
	// Name is the registry's name. Items of registries that are not configured
	// are left out.
	Name string
	// AsOf is the last time at which the saved items were known to be current.
	AsOf time.Time
}

// Restored summarizes the items restored for a registry.
type Restored struct {
	Registry            string
	Services, Instances int
	Published           int // resources without a service
	LeftOut             int // beyond a limit, or instances without their service
}

// ErrNotEmpty is returned when restoring into a DB that is in use.
var ErrNotEmpty = errors.New("state: what was saved has to be restored before any registry is followed")

// DefectError is a panic while a registry's items were restored, which is a
// defect of the bridge. Nothing is restored.
type DefectError struct {
	Registry string // "" if it is of none in particular
	Err      error
}

// Error implements error.
func (e *DefectError) Error() string { return e.Err.Error() }
