package conf

import "testing"

func FuzzDistance(f *testing.F) {
	f.Add("address", "adress")
	f.Add("", "x")
	f.Fuzz(func(t *testing.T, a, b string) {
		if len(a) > 200 || len(b) > 200 {
			return
		}
		const all = 1 << 20
		d := Distance(a, b, all)
		if d != Distance(b, a, all) || d < 0 || d > max(len(a), len(b)) || (d == 0) != (string([]rune(a)) == string([]rune(b))) {
			t.Errorf("%q to %q: %d, back %d", a, b, d, Distance(b, a, all))
		}
	})
}
