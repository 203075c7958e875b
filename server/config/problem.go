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

// Problem returns what a plugin found wrong with the blocks of registry i as a problem of the file. The field is a path within
// the registry: "config.address", "translate.ports[0].number"; empty if it is about the registry as a whole. It is nil if [Parse] found a problem
// with that field, with a block around it or with something in it: what a plugin says of a value that it did not get is of no use.
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

// Askable says whether the plugin of registry i can be asked about its blocks. It always can if [Parse] found no problem; else
// only if none is with what says which plugin it is.
func (c *Config) Askable(i int) bool {
	at := registryPath(i)
	return !slices.ContainsFunc(c.problems, func(p *Problem) bool {
		return p.Field == "" || p.Field == "plugin_dir" || p.Field == at || within(p.Field, at+".type") || within(p.Field, at+".plugin")
	})
}

func registryPath(i int) string { return fmt.Sprintf("registries[%d]", i) }

// within says whether a path is that of a block or of something in it.
func within(path, block string) bool {
	rest, ok := strings.CutPrefix(path, block)
	return ok && (rest == "" || rest[0] == '.' || rest[0] == '[')
}
