package plugin

import (
	"fmt"
	"path"
	"slices"
	"strings"
)

// Globs is a list of patterns in a configuration, for names: * stands for any run of characters, ? for one, [a-z] for one of those; \ takes the meaning
// of the one after it. Unlike in a path, a slash is a character like any other.
type Globs []string

// slashless hides slashes, which are special to path.Match, behind a character that names do not have.
var slashless = strings.NewReplacer("/", "\x00")

// Match reports whether any of the globs matches the whole name. One that Check does not accept matches nothing.
func (g Globs) Match(name string) bool {
	return slices.ContainsFunc(g, func(glob string) bool {
		if glob == "*" {
			return true
		}
		ok, err := path.Match(slashless.Replace(glob), slashless.Replace(name))
		return ok && err == nil
	})
}

// Check returns what is wrong with the globs, which are those of a field, as *[FieldError] for Validate.
func (g Globs) Check(field string) []error {
	var errs []error
	for i, glob := range g {
		if _, err := path.Match(glob, ""); err != nil || glob == "" {
			errs = append(errs, &FieldError{
				Field:  fmt.Sprintf("%s[%d]", field, i),
				Reason: fmt.Sprintf(`%q is no glob; use *, ? and [a-z], and \ before one of them that is meant literally`, glob),
			})
		}
	}
	return errs
}

// Selection selects names in a configuration, usually those of the services to follow.
type Selection struct {
	Include Globs `json:"include,omitempty" jsonschema_description:"Globs (* any run, ? one character, [a-z] one of). Empty: every name."`
	Exclude Globs `json:"exclude,omitempty" jsonschema_description:"Globs; they win over include."`
}

// Match reports whether the name is selected: any of Include matches, or Include is empty, and none of Exclude matches.
func (s Selection) Match(name string) bool {
	return (len(s.Include) == 0 || s.Include.Match(name)) && !s.Exclude.Match(name)
}

// Check returns what is wrong with the selection, which is that of a field, as *[FieldError] for Validate.
func (s Selection) Check(field string) []error {
	return append(s.Include.Check(field+".include"), s.Exclude.Check(field+".exclude")...)
}
