package plugin

import (
	"errors"
	"strings"
	"testing"

	"github.com/isthmus-mesh/isthmus/internal/conf"
)

// A glob matches the whole name, and a slash or dot is a character like any
// other: names of services have them.
func TestGlobs(t *testing.T) {
	for _, test := range []struct {
		glob, name string
		want       bool
	}{
		{"*", "", true},
		{"*", "a/b.c", true},
		{"web", "web", true},
		{"web", "webs", false},
		{"web*", "web/a/b", true},
		{"*/b", "a/a/b", true},
		{"a?b", "a/b", true},
		{"com.*.A", "com.example.x.A", true},
		{"a[a-c]", "ab", true},
		{"a[a-c]", "ad", false},
		{`a\*`, "a*", true},
		{`a\*`, "ab", false},
		{"", "", true},
		{"[", "[", false},
	} {
		if got := (Globs{"none", test.glob}).Match(test.name); got != test.want {
			t.Errorf("%q matches %q: %t", test.glob, test.name, got)
		}
	}
	if (Globs{}).Match("a") || Globs(nil).Match("") {
		t.Error("no glob matches something")
	}
}

// Exclude wins over include, and an empty include takes everything.
func TestSelection(t *testing.T) {
	for _, test := range []struct{ include, exclude, taken, left string }{
		{"", "", "a b", ""},
		{"a*", "", "a ab", "b"},
		{"", "a*", "b", "a ab"},
		{"a* c", "ab", "a ac c", "ab b"},
	} {
		s := Selection{Include: strings.Fields(test.include), Exclude: strings.Fields(test.exclude)}
		for name := range strings.FieldsSeq(test.taken) {
			if !s.Match(name) {
				t.Errorf("%+v leaves out %s", s, name)
			}
		}
		for name := range strings.FieldsSeq(test.left) {
			if s.Match(name) {
				t.Errorf("%+v takes %s", s, name)
			}
		}
	}
}

// selecting is a configuration with a selection.
type selecting struct {
	Services Selection `json:"services,omitempty"`
	Groups   Globs     `json:"groups,omitempty"`
}

func (s selecting) Validate() error {
	return errors.Join(append(s.Services.Check("services"), s.Groups.Check("groups")...)...)
}

// What is not a glob is named with its path in a configuration, all of it at
// once; what is one is read.
func TestGlobsInConfig(t *testing.T) {
	typ, err := conf.New("config", selecting{Groups: Globs{"*"}}, conf.JSON)
	if err != nil {
		t.Fatal(err)
	}
	c, err := typ.Decode([]byte(`{"services": {"include": ["a*", "[a-z]?"], "exclude": ["b"]}}`))
	if err != nil || !c.Services.Match("ab") || c.Services.Match("b") || !c.Groups.Match("x") {
		t.Errorf("decoded %+v, %v", c, err)
	}
	_, err = typ.Decode([]byte(`{"services": {"include": ["a", "[a"], "exclude": [""]}, "groups": ["\\"]}`))
	var got []string
	for _, f := range conf.FieldErrors(err) {
		got = append(got, f.Field)
	}
	if want := "config.services.include[1] config.services.exclude[0] config.groups[0]"; strings.Join(got, " ") != want {
		t.Errorf("wrong fields %q, want %q", got, want)
	}
}

// No glob and no name make matching panic, and a glob without special
// characters matches itself only.
func FuzzGlobs(f *testing.F) {
	for _, seed := range [][2]string{{"a*", "ab"}, {"[a", "a"}, {`\`, ""}, {"a/b", "a/b"}, {"[^/]", "/"}} {
		f.Add(seed[0], seed[1])
	}
	f.Fuzz(func(t *testing.T, glob, name string) {
		g := Globs{glob}
		matches := g.Match(name)
		plain := !strings.ContainsAny(glob, `*?[\`) && !strings.HasPrefix(glob, "~") && !strings.Contains(glob+name, "\x00")
		if plain && matches != (glob == name) {
			t.Errorf("%q matches %q: %t", glob, name, matches)
		}
		if len(g.Check("f")) > 0 && glob != "" && matches {
			t.Errorf("%q is not a glob, and matches %q", glob, name)
		}
	})
}

// A pattern behind a ~ is a regular expression for the whole name.
func TestGlobsRegex(t *testing.T) {
	s := Selection{Include: Globs{`~(web|shop)-[0-9]+`, "pay-*"}, Exclude: Globs{"~.*-0+"}}
	for name, want := range map[string]bool{"web-1": true, "web-1x": false, "xweb-1": false, "shop-22": true, "shop-": false, "pay-x": true, "pay-00": false, "web-0": false} {
		if got := s.Match(name); got != want {
			t.Errorf("%s: %v, want %v", name, got, want)
		}
	}
	if errs := s.Check("services"); len(errs) > 0 {
		t.Errorf("%v", errs)
	}
	bad := Selection{Include: Globs{"~("}}
	errs := bad.Check("services")
	if len(errs) != 1 || !strings.Contains(errs[0].Error(), "services.include[0]: \"~(\" is not a regular expression (~ begins one): ") {
		t.Errorf("%v", errs)
	}
	if bad.Match("(") {
		t.Error("what is not a regular expression matches")
	}
}
