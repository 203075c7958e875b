package message

import (
	"errors"
	"testing"
)

// A resource beyond a limit is refused with the field that would change it. One
// that is there may be replaced by one that is no larger, beyond every limit.
func TestLimits(t *testing.T) {
	l := Limits{Resources: 3, Services: 2, Bytes: 100}
	for _, test := range []struct {
		name      string
		have      Limits
		isEntry   bool
		size, was int
		want      string
	}{
		{"the last one", Limits{2, 1, 90}, true, 10, -1, ""},
		{"too many", Limits{3, 1, 10}, false, 10, -1, "limits.resources_per_registry"},
		{"too many services", Limits{2, 2, 10}, true, 10, -1, "limits.services_per_registry"},
		{"another kind", Limits{2, 2, 10}, false, 10, -1, ""},
		{"too large", Limits{2, 1, 91}, true, 10, -1, "limits.bytes_per_registry"},
		{"replaced", Limits{3, 2, 100}, true, 10, 10, ""},
		{"replaced by a larger one", Limits{3, 2, 99}, true, 12, 10, "limits.bytes_per_registry"},
		{"larger, and there is room", Limits{3, 2, 98}, true, 12, 10, ""},
		{"smaller, beyond all limits", Limits{5, 5, 500}, true, 9, 10, ""},
		{"of no size", Limits{2, 1, 500}, false, 0, -1, "limits.bytes_per_registry"},
	} {
		limit, isLimit := errors.AsType[*LimitError](l.Check(test.have, test.isEntry, test.size, test.was))
		if isLimit != (test.want != "") || isLimit && limit.Field != test.want {
			t.Errorf("%s: %v, want %q", test.name, limit, test.want)
		}
	}
}
