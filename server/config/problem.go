package config

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
)

// Position is a place in a file, counted from 1. The zero value is no place.
type Position struct{ Line, Column int }

// Problem is one thing that is wrong with the configuration.
type Problem struct {
	// File is the configuration file.
	File string
	// Position is where in the file; zero if it is about the file as a whole.
	Position
	// Field is the dotted path, "registries[0].config.address"; empty if the problem is about the file as a whole.
	Field string
	// Reason says what is wrong and how to mend it.
	Reason string
}

// Error returns "FILE:LINE:COLUMN: FIELD: REASON".
func (p *Problem) Error() string {
	var b strings.Builder
	b.WriteString(p.File)
	if p.Line > 0 {
		fmt.Fprintf(&b, ":%d:%d", p.Line, p.Column)
	}
	b.WriteString(": ")
	if p.Field != "" {
		b.WriteString(p.Field + ": ")
	}
	b.WriteString(p.Reason)
	return b.String()
}

// Problems is everything that is wrong with a configuration, in the order of the file. It has at least one.
type Problems []*Problem

// Error returns one line per problem.
func (p Problems) Error() string {
	lines := make([]string, len(p))
	for i, problem := range p {
		lines[i] = problem.Error()
	}
	return strings.Join(lines, "\n")
}

// Unwrap returns the problems, for errors.AsType.
func (p Problems) Unwrap() []error {
	errs := make([]error, len(p))
	for i, problem := range p {
		errs[i] = problem
	}
	return errs
}

// Sort puts the problems into the order of the file and drops repetitions.
func (p Problems) Sort() Problems {
	slices.SortStableFunc(p, func(a, b *Problem) int {
		return cmp.Or(cmp.Compare(a.Line, b.Line), cmp.Compare(a.Column, b.Column), cmp.Compare(a.Field, b.Field), cmp.Compare(a.Reason, b.Reason))
	})
	return slices.CompactFunc(p, func(a, b *Problem) bool { return *a == *b })
}

// Position returns where the field of a dotted path stands: its key or, for an item of a list, the item. For a field that the file does
// not have it is the innermost block around it that the file has.
func (c *Config) Position(path string) Position {
	for {
		if p, ok := c.positions[path]; ok {
			return p
		}
		i := strings.LastIndexAny(path, ".[")
		if i < 0 {
			return c.positions[""]
		}
		path = path[:i]
	}
}

// Problem returns what a plugin found wrong with the blocks of a registry as a problem of the file. The field is a path within
// the registry: "config.address", "translate.ports[0].number".
func (c *Config) Problem(registry, field, reason string) *Problem {
	path := ""
	for i := range c.Registries {
		if c.Registries[i].Name == registry {
			path = fmt.Sprintf("registries[%d]", i)
		}
	}
	switch {
	case path == "":
		path = field
	case field != "":
		path += "." + field
	}
	return &Problem{File: c.file, Position: c.Position(path), Field: path, Reason: reason}
}
