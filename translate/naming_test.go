package translate

import (
	"strings"
	"testing"
)

// Names that are legal stay, case goes, and the rest is mended in a way that
// keeps different names different.
func TestMendHost(t *testing.T) {
	long := strings.Repeat("a", 63)
	tests := []struct{ in, want string }{
		{"web.service.consul", "web.service.consul"},
		{"Web.Service.Consul", "web.service.consul"},
		{"web.consul.", "web.consul"},
		{"web_a.consul", "web-a.consul"},
		{"a:b/c d.consul", "a-b-c-d.consul"},
		{"-web-.consul", "web.consul"},
		{"web..consul", "web.consul"},
		{"web.1", "web.x1"},
		{"10.0.0.1", "10.0.0.x1"},
		{long + ".consul", long + ".consul"},
		{long + "b.consul", strings.Repeat("a", 54) + "-" + shortHash(8, long+"b") + ".consul"},
		{"\u670d\u52a1.nacos", shortHash(8, "\u670d\u52a1") + ".nacos"},
		{"caf\u00e9.nacos", "caf-" + shortHash(8, "caf\u00e9") + ".nacos"},
		{"\u212a.nacos", shortHash(8, "\u212a") + ".nacos"}, // the Kelvin sign, whose lower case is k
		{"___.consul", ""},
		{"", ""},
		{"..", ""},
		{"*.consul", ""},
		{strings.Repeat(long+".", 3) + long, strings.Repeat(long+".", 3) + long},
		{
			strings.Repeat(long+".", 4) + "service.consul",
			strings.Repeat("a", 54) + "-" + shortHash(8, strings.Repeat(long+".", 4)+"service.consul") + "." + strings.Repeat(long+".", 2) + "service.consul",
		},
	}
	for _, tt := range tests {
		if got := mendHost(tt.in); got != tt.want {
			t.Errorf("mendHost(%q) = %q, want %q", tt.in, got, tt.want)
		}
	}
}

func TestMendLabelKey(t *testing.T) {
	tests := []struct{ in, want string }{
		{"version", "version"},
		{"Version_1.x", "Version_1.x"},
		{"app.kubernetes.io/name", "app.kubernetes.io/name"},
		{"Example.ORG/name", "example.org/name"},
		{"foo bar", "foo-bar"},
		{"a/b/c", "a/b-c"},
		{"/name", "name"},
		{"_/name", "name"},
		{"prefix/", ""},
		{"_", ""},
		{"", ""},
		{strings.Repeat("k", 64), strings.Repeat("k", 54) + "-" + shortHash(8, strings.Repeat("k", 64))},
	}
	for _, tt := range tests {
		if got := mendLabelKey(tt.in); got != tt.want {
			t.Errorf("mendLabelKey(%q) = %q, want %q", tt.in, got, tt.want)
		}
	}
}

func TestEntryName(t *testing.T) {
	tests := []struct {
		parts []string
		want  string
	}{
		{[]string{"web", "", "", "", ""}, "web"},
		{[]string{"Provider", "DEFAULT_GROUP", "public", "", ""}, "provider-default-group-public"},
		{[]string{"web.v1", "", "", "", "dc1"}, "web.v1-dc1"},
		{[]string{"_", "g"}, ""},
	}
	for _, tt := range tests {
		if got := entryName(tt.parts...); got != tt.want {
			t.Errorf("entryName(%q) = %q, want %q", tt.parts, got, tt.want)
		}
	}
}

// Host and plugin must agree on the selector, so the value is fixed here.
func TestSelectorValue(t *testing.T) {
	long := strings.Repeat("a", 63)
	tests := []struct{ in, want string }{
		{"web", "web"},
		{"consul/web", "web"},
		{long, long},
		{"ns/" + long + "b", strings.Repeat("a", 52) + "-" + shortHash(10, long+"b")},
	}
	for _, tt := range tests {
		if got := SelectorValue(tt.in); got != tt.want {
			t.Errorf("SelectorValue(%q) = %q, want %q", tt.in, got, tt.want)
		}
	}
}

func TestGlob(t *testing.T) {
	tests := []struct {
		pattern, s string
		want       bool
	}{
		{"*", "", true},
		{"version", "version", true},
		{"version", "versions", false},
		{"app.*", "app.kubernetes.io/name", true},
		{"*.io/*", "app.kubernetes.io/name", true},
		{"v?", "v1", true},
		{"v?", "v", false},
		{"a*b*c", "aXbYbZc", true},
		{"a*b*c", "aXbYbZ", false},
		{"", "", true},
		{"", "a", false},
	}
	for _, tt := range tests {
		if got := glob(tt.pattern, tt.s); got != tt.want {
			t.Errorf("glob(%q, %q) = %v, want %v", tt.pattern, tt.s, got, tt.want)
		}
	}
}

func seedNames(f *testing.F) {
	for _, s := range []string{
		"", "web", "web_a", "Web.Service.Consul", "a..b", "1.2", "___", "\u670d\u52a1", "a\xffb", "-", "a/b/c", "\u212a",
		strings.Repeat("a", 64), strings.Repeat("a.", 200), strings.Repeat("\u00e9", 300), "app.kubernetes.io/name",
	} {
		f.Add(s)
	}
}

// fuzzName holds a naming function to its promise: legal or empty, legal names
// unchanged, mending twice changes nothing, and empty only if there is no
// letter or digit and nothing beyond ASCII.
func fuzzName(f *testing.F, mend func(string) string, ok func(string) bool, mayGiveUp func(string) bool) {
	seedNames(f)
	f.Fuzz(func(t *testing.T, s string) {
		got := mend(s)
		if got == "" {
			if !mayGiveUp(s) {
				t.Errorf("%q was given up", s)
			}
			return
		}
		if !ok(got) {
			t.Errorf("%q became %q", s, got)
		}
		if again := mend(got); again != got {
			t.Errorf("%q became %q, then %q", s, got, again)
		}
		if ok(s) && got != s {
			t.Errorf("%q is legal and became %q", s, got)
		}
	})
}

func hasNothing(s string) bool {
	return !strings.ContainsFunc(s, func(r rune) bool { return r >= 0x80 || isAlnum(byte(r)) })
}

func anyLabelHasNothing(s string) bool {
	for part := range strings.SplitSeq(s, ".") {
		if hasNothing(part) {
			return true
		}
	}
	return false
}

func FuzzMendHost(f *testing.F) { fuzzName(f, mendHost, okHost, anyLabelHasNothing) }

func FuzzMendSubdomain(f *testing.F) {
	fuzzName(f, func(s string) string { return mendSubdomain(s, maxEntryName) },
		func(s string) bool { return okSubdomain(s) && len(s) <= maxEntryName }, anyLabelHasNothing)
}

func FuzzEntryName(f *testing.F) {
	fuzzName(f, func(s string) string { return entryName(s) },
		func(s string) bool { return okSubdomain(s) && len(s) <= maxEntryName }, anyLabelHasNothing)
}

func FuzzMendNamespace(f *testing.F)  { fuzzName(f, mendNamespace, okLabel, hasNothing) }
func FuzzMendPortName(f *testing.F)   { fuzzName(f, mendPortName, okLabel, hasNothing) }
func FuzzMendLabelValue(f *testing.F) { fuzzName(f, mendLabelValue, okValue, hasNothing) }

func FuzzMendLabelKey(f *testing.F) {
	fuzzName(f, mendLabelKey, okKey, func(s string) bool {
		if _, name, ok := strings.Cut(s, "/"); ok {
			s = name
		}
		return hasNothing(s)
	})
}

func FuzzSelectorValue(f *testing.F) {
	seedNames(f)
	f.Fuzz(func(t *testing.T, s string) {
		got := SelectorValue(s)
		if !okValue(got) {
			t.Errorf("SelectorValue(%q) = %q", s, got)
		}
		if again := SelectorValue("ns/" + got); again != got {
			t.Errorf("SelectorValue(%q) = %q, then %q", s, got, again)
		}
	})
}

func FuzzGlob(f *testing.F) {
	f.Add("a*b", "ab")
	f.Add("**?", "x")
	f.Fuzz(func(t *testing.T, pattern, s string) {
		if !glob("*", s) || !glob(strings.ReplaceAll(s, "*", "?"), s) || !glob("*"+strings.NewReplacer("*", "?").Replace(s), s) {
			t.Errorf("%q does not match itself", s)
		}
		if glob(pattern, s) && !strings.ContainsAny(pattern, "*?") && pattern != s {
			t.Errorf("%q matches %q", pattern, s)
		}
	})
}
