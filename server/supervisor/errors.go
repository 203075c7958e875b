package supervisor

import (
	"errors"
	"fmt"
	"strings"
)

var (
	// ErrHung says that a plugin sent nothing for too long.
	ErrHung = errors.New("the plugin hangs: it sent no sign of life")
	// ErrContract says that a plugin broke the contract.
	ErrContract = errors.New("the plugin broke the contract")
	// ErrExited says that the plugin's process ended.
	ErrExited = errors.New("the plugin's process ended")
	// ErrChecksum says that an executable is not the one whose checksum is configured.
	ErrChecksum = errors.New("the executable's SHA-256 is not the configured one")
)

// Violation is one thing wrong with a registry's configuration.
type Violation struct {
	// Field is a dotted path from the registry's block: "config.address", "translate.ports[0].number".
	Field string `json:"field"`
	// Reason says what is wrong and how to mend it.
	Reason string `json:"reason"`
}

// String returns "FIELD: REASON".
func (v Violation) String() string {
	if v.Field == "" {
		return v.Reason
	}
	return v.Field + ": " + v.Reason
}

// ConfigError says that a plugin refused its configuration.
type ConfigError struct {
	// Violations is everything that is wrong; it is not empty.
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
