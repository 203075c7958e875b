package config

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/isthmus-mesh/isthmus/internal/conf"
)

// Position is a position in a file, counted from 1. The zero value is no
// position.
type Position = conf.Position

// Problem is one error in the configuration.
type Problem struct {
	// File is the configuration file.
	File string
	// Position is the position in the file; zero if the problem concerns the
	// whole file.
	Position
	// Field is the dotted path, "registries[0].config.address"; empty if the
	// problem concerns the whole file.
	Field string
	// Reason describes the error and its cure.
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

// Problems are all errors of a configuration, in the order of the file. It is
// not empty.
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

// Sort sorts the problems in the order of the file and drops duplicates.
func (p Problems) Sort() Problems {
	slices.SortStableFunc(p, func(a, b *Problem) int {
		return cmp.Or(cmp.Compare(a.Line, b.Line), cmp.Compare(a.Column, b.Column), cmp.Compare(a.Field, b.Field), cmp.Compare(a.Reason, b.Reason))
	})
	return slices.CompactFunc(p, func(a, b *Problem) bool { return *a == *b })
}

// Position returns the position of the field at a dotted path: its key or, in a
// list, the item. For a missing field it is that of the innermost existing
// block around it.
func (c *Config) Position(path string) Position { return c.doc.Position(path) }

// Problem converts an error that a plugin reports for registry i to a problem
// of the file. The field is a path within the registry: "config.address",
// "translate.ports[0].number"; empty if the error concerns the whole registry.
// It returns nil if [Parse] found a problem with that field, with a block
// around it or with a part of it, because the plugin did not receive that
// value.
func (c *Config) Problem(i int, field, reason string) *Problem {
	path := registryPath(i)
	if field != "" {
		path += "." + field
		for _, p := range c.problems {
			if within(p.Field, path) || within(path, p.Field) && within(p.Field, registryPath(i)) {
				return nil
			}
		}
	}
	return &Problem{File: c.file, Position: c.Position(path), Field: path, Reason: reason}
}

// Askable reports whether the plugin of registry i can validate its blocks:
// there is no problem with the fields that identify the plugin.
func (c *Config) Askable(i int) bool {
	at := registryPath(i)
	return !slices.ContainsFunc(c.problems, func(p *Problem) bool {
		return p.Field == "" || p.Field == "plugin_dir" || p.Field == at || within(p.Field, at+".type") || within(p.Field, at+".plugin")
	})
}

func registryPath(i int) string { return fmt.Sprintf("registries[%d]", i) }

// within reports whether a path is block or below it.
func within(path, block string) bool {
	rest, ok := strings.CutPrefix(path, block)
	return ok && (rest == "" || rest[0] == '.' || rest[0] == '[')
}
