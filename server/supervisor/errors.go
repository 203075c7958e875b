package supervisor

import (
	"errors"
	"fmt"
	"strings"
)

var (
	// ErrHung reports that a plugin exceeded the time limit between messages.
	ErrHung = errors.New("the plugin hangs: it sent no sign of life")
	// ErrRenew reports that a plugin has ended because only another process can
	// go on, and nothing is wrong.
	ErrRenew = errors.New("the plugin asks for a new process")
	// ErrContract reports that a plugin broke the contract.
	ErrContract = errors.New("the plugin broke the contract")
	// ErrExited reports that the plugin's process ended.
	ErrExited = errors.New("the plugin's process ended")
	// ErrChecksum reports that the executable's checksum is not the configured
	// one.
	ErrChecksum = errors.New("the executable's SHA-256 is not the configured one")
	// ErrSignature reports that the executable has no signature of the
	// configured key.
	ErrSignature = errors.New("the executable is not signed with the configured key")
)

// Violation is one error in a registry's configuration.
type Violation struct {
	// Field is a dotted path from the registry's block: "config.address",
	// "translate.ports[0].number".
	Field string `json:"field"`
	// Reason describes the error and its cure.
	Reason string `json:"reason"`
}

// String returns "FIELD: REASON".
func (v Violation) String() string {
	if v.Field == "" {
		return v.Reason
	}
	return v.Field + ": " + v.Reason
}

// ConfigError reports that a plugin refused its configuration.
type ConfigError struct {
	// Violations is never empty.
	Violations []Violation
}

// Error lists the violations on one line.
func (e *ConfigError) Error() string {
	const most = 5
	var s []string
	for _, v := range e.Violations[:min(most, len(e.Violations))] {
		s = append(s, v.String())
	}
	if n := len(e.Violations) - most; n > 0 {
		s = append(s, fmt.Sprintf("and %d more", n))
	}
	return "configuration: " + strings.Join(s, "; ")
}
