package plugin_test

import (
	"fmt"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/isthmus-mesh/isthmus/plugin"
	"github.com/isthmus-mesh/isthmus/plugin/plugintest"
)

// TestUnselected shows that names that a selection leaves out are one entry for
// each of its lists, with their number and the first of them, whatever their
// order and number.
func TestUnselected(t *testing.T) {
	c := plugintest.NewCatalog()
	s := plugin.Selection{Include: plugin.Globs{"web-*"}, Exclude: plugin.Globs{"*-test", "other"}}
	var u plugin.Unselected
	want := func(when string, want map[string]string) {
		t.Helper()
		u.Tell(c, "services", "dc1")
		if diff := cmp.Diff(want, look(c).LeftOut); diff != "" {
			t.Errorf("%s (-want +got):\n%s", when, diff)
		}
	}
	want("nothing is left out", map[string]string{})
	for i := 20; i > 0; i-- {
		if u.Match(s, fmt.Sprintf("api-%02d", i)) {
			t.Error("a name that is not included is selected")
		}
	}
	if !u.Match(s, "web-1") || u.Match(s, "web-test") || u.Match(s, "web-test") || u.Match(s, "other") {
		t.Error("selected otherwise than Selection.Match says")
	}
	const include, exclude = "config.services.include dc1", "config.services.exclude dc1"
	want("both", map[string]string{
		include: `20 names left out by config.services.include: "api-01", "api-02", "api-03", "api-04", "api-05", ...`,
		exclude: `2 names left out by config.services.exclude: "other", "web-test"`,
	})
	u.Forget("web-test")
	u.Forget("other")
	u.Forget("api-02")
	u.Forget("web-1")
	want("some are gone", map[string]string{
		include: `19 names left out by config.services.include: "api-01", "api-03", "api-04", "api-05", "api-06", ...`,
	})
	for i := range 100_000 {
		u.Match(s, fmt.Sprint("many-", i))
	}
	want("too many to count", map[string]string{
		include: `more than 100000 names left out by config.services.include: "api-01", "api-03", "api-04", "api-05", "api-06", ...`,
	})
	u = plugin.Unselected{}
	want("another listing", map[string]string{})
}
