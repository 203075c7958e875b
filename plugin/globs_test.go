package plugin

import (
	"errors"
	"strings"
	"testing"
)

// A glob matches the whole name, and a slash or dot is a character like any other: names of services have them.
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

// What is no glob is named with its path in a configuration, all of it at once; what is one is read.
func TestGlobsInConfig(t *testing.T) {
	typ, err := newConfigType("config", selecting{Groups: Globs{"*"}})
	if err != nil {
		t.Fatal(err)
	}
	c, err := typ.decode([]byte(`{"services": {"include": ["a*", "[a-z]?"], "exclude": ["b"]}}`))
	if err != nil || !c.Services.Match("ab") || c.Services.Match("b") || !c.Groups.Match("x") {
		t.Errorf("decoded %+v, %v", c, err)
	}
	_, err = typ.decode([]byte(`{"services": {"include": ["a", "[a"], "exclude": [""]}, "groups": ["\\"]}`))
	var got []string
	for _, f := range fieldErrors(err) {
		got = append(got, f.Field)
	}
	if want := "config.services.include[1] config.services.exclude[0] config.groups[0]"; strings.Join(got, " ") != want {
		t.Errorf("wrong fields %q, want %q", got, want)
	}
}

// No glob and no name make matching panic, and a glob without special characters matches itself only.
func FuzzGlobs(f *testing.F) {
	for _, seed := range [][2]string{{"a*", "ab"}, {"[a", "a"}, {`\`, ""}, {"a/b", "a/b"}, {"[^/]", "/"}} {
		f.Add(seed[0], seed[1])
	}
	f.Fuzz(func(t *testing.T, glob, name string) {
		g := Globs{glob}
		matches := g.Match(name)
		if !strings.ContainsAny(glob, `*?[\`) && !strings.Contains(glob+name, "\x00") && matches != (glob == name) {
			t.Errorf("%q matches %q: %t", glob, name, matches)
		}
		if len(g.Check("f")) > 0 && glob != "" && matches {
			t.Errorf("%q is no glob, and matches %q", glob, name)
		}
	})
}
