package shard

import (
	"fmt"
	"testing"
)

// TestOf holds the documented hash: printf %s HOST | sha256sum | cut -c1-16.
func TestOf(t *testing.T) {
	for _, c := range []struct {
		host string
		n    int
		want int
	}{
		{"web.service.consul", 16, 15},
		{"WEB.service.consul", 16, 15},
		{"web.service.consul", 7, 2},
		{"", 16, 4}, // e3b0c44298fc1c14
	} {
		if got := Of(c.host, c.n); got != c.want {
			t.Errorf("shard of %q of %d: %d, want %d", c.host, c.n, got, c.want)
		}
	}
}

func TestParse(t *testing.T) {
	for _, text := range []string{"3/16", "0-3/16", "0/1", "15/16"} {
		s, err := Parse(text)
		if err != nil || s.String() != text {
			t.Errorf("%s: %v, %v", text, s, err)
		}
	}
	for _, text := range []string{"", "3", "/", "16/16", "3-1/16", "0-16/16", "-1/4", "0/0", "a/4", "0/65537", "1/2/3", "+1/4"} {
		if s, err := Parse(text); err == nil {
			t.Errorf("%s: %+v, want an error", text, s)
		}
	}
}

// TestSplit shows that the shards of one number have each host once.
func TestSplit(t *testing.T) {
	const hosts, n = 16_000, 16
	var count [n]int
	for i := range hosts {
		host, has := fmt.Sprintf("s%d.example.org", i), 0
		for j := range n {
			if (Set{j, j, n}).Has(host) {
				count[j]++
				has++
			}
		}
		if has != 1 {
			t.Fatalf("%s is in %d shards", host, has)
		}
	}
	for j, c := range count {
		if c < hosts/n*8/10 || c > hosts/n*12/10 {
			t.Errorf("shard %d has %d of %d hosts", j, c, hosts)
		}
	}
}

// TestOverlaps compares with the remainders of all numbers.
func TestOverlaps(t *testing.T) {
	var sets []Set
	for of := 1; of <= 6; of++ {
		for first := range of {
			for last := first; last < of; last++ {
				sets = append(sets, Set{first, last, of})
			}
		}
	}
	has := func(s Set, x int) bool { return s.First <= x%s.Of && x%s.Of <= s.Last }
	for _, a := range sets {
		for _, b := range sets {
			want := false
			for x := range 60 {
				want = want || has(a, x) && has(b, x)
			}
			if a.Overlaps(b) != want {
				t.Errorf("%v and %v: %v, want %v", a, b, !want, want)
			}
		}
	}
}
