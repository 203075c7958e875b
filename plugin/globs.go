package plugin

import (
	"fmt"
	"path"
	"regexp"
	"slices"
	"strings"
	"sync"
)

// Globs is a list of name patterns in a configuration: * matches any run of
// characters, including slashes, ? one character, [a-z] one of a range; \
// escapes the next character. A pattern that begins with ~ is a regular
// expression (RE2) that must match the whole name.
type Globs []string

// regexes caches compiled patterns: by pattern, a *regexp.Regexp, nil if it is
// invalid. The configurations bound its size.
var regexes sync.Map

// regexOf returns the regular expression of a pattern that begins with ~.
func regexOf(pattern string) (re *regexp.Regexp, isRegex bool) {
	text, isRegex := strings.CutPrefix(pattern, "~")
	if !isRegex {
		return nil, false
	}
	if kept, ok := regexes.Load(pattern); ok {
		return kept.(*regexp.Regexp), true
	}
	re, _ = regexp.Compile("^(?:" + text + ")$")
	regexes.Store(pattern, re)
	return re, true
}

// slashless replaces slashes, which are special to path.Match, by a character
// that names do not have.
var slashless = strings.NewReplacer("/", "\x00")

// Match reports whether any pattern matches the whole name. An invalid pattern
// matches nothing.
func (g Globs) Match(name string) bool {
	return slices.ContainsFunc(g, func(glob string) bool {
		if glob == "*" {
			return true
		}
		if re, ok := regexOf(glob); ok {
			return re != nil && re.MatchString(name)
		}
		ok, err := path.Match(slashless.Replace(glob), slashless.Replace(name))
		return ok && err == nil
	})
}

// Check validates the globs and returns each error as a *[FieldError] of the
// given field.
func (g Globs) Check(field string) []error {
	var errs []error
	for i, glob := range g {
		if re, ok := regexOf(glob); ok {
			if re == nil {
				_, err := regexp.Compile(glob[1:])
				errs = append(errs, &FieldError{Field: fmt.Sprintf("%s[%d]", field, i), Reason: fmt.Sprintf("%q is not a regular expression (~ begins one): %v", glob, err)})
			}
			continue
		}
		if _, err := path.Match(glob, ""); err != nil || glob == "" {
			errs = append(errs, &FieldError{
				Field:  fmt.Sprintf("%s[%d]", field, i),
				Reason: fmt.Sprintf(`%q is not a glob; use *, ? and [a-z], and \ before one of them that is meant literally`, glob),
			})
		}
	}
	return errs
}

// Selection selects names in a configuration, usually of services to follow.
type Selection struct {
	Include Globs `json:"include,omitempty" jsonschema_description:"Globs (* any run, ? one character, [a-z] one of), or regular expressions behind a ~ (~web-[0-9]+), for the whole name. Empty: every name."`
	Exclude Globs `json:"exclude,omitempty" jsonschema_description:"The same; they win over include."`
}

// Match reports whether the name is selected: Include is empty or matches, and
// Exclude does not match.
func (s Selection) Match(name string) bool {
	return (len(s.Include) == 0 || s.Include.Match(name)) && !s.Exclude.Match(name)
}

// Check validates the selection and returns each error as a *[FieldError] of
// the given field.
func (s Selection) Check(field string) []error {
	return append(s.Include.Check(field+".include"), s.Exclude.Check(field+".exclude")...)
}
