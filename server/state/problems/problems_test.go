package problems

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"strings"
	"testing"
	"testing/synctest"
	"time"
	"unicode/utf8"
)

func TestFieldOf(t *testing.T) {
	for reason, want := range map[string]string{
		"":                                     "",
		"no address":                           "",
		"its host is invalid (translate.host)": "translate.host",
		"left out by translate.relabel.instances[1]":            "translate.relabel.instances",
		"config.tls is wrong; limits.services_per_registry too": "limits.services_per_registry",
		"mistranslate.host and translate alone":                 "",
	} {
		if got := FieldOf(reason); got != want {
			t.Errorf("of %q: %q, want %q", reason, got, want)
		}
	}
}

// A list is what a map of the newest reasons is; what is fresh differs from
// what was said before, across a listing, too; and the kinds add up.
func TestListModel(t *testing.T) {
	for seed := range uint64(50) {
		r := rand.New(rand.NewPCG(seed, 29))
		l, reasons, known := NewList(), map[string]string{}, map[string]string{}
		reason := func() string {
			return []string{"", "of the registry", "see translate.host", "see config.tls", "see translate.host and config.tls"}[r.IntN(5)]
		}
		for range 300 {
			switch r.IntN(20) {
			case 0:
				incomplete := r.IntN(2) == 0
				was := known
				if known = reasons; incomplete {
					for id, reason := range was {
						if _, have := known[id]; !have {
							known[id] = reason
						}
					}
				}
				reasons = map[string]string{}
				l.Relist(incomplete)
			case 1:
				l.Clear()
				clear(reasons)
			default:
				id, now := fmt.Sprint(r.IntN(6)), reason()
				before, listed := reasons[id]
				if !listed {
					before = known[id]
				}
				if got, want := l.Set(id, now), now != "" && now != before; got != want {
					t.Fatalf("seed %d: %s is %q after %q: fresh is %v", seed, id, now, before, got)
				}
				if reasons[id] = now; now == "" {
					delete(reasons, id)
					delete(known, id)
				}
			}
			have, by := map[string]string{}, Kinds{}
			for _, p := range l.append(nil) {
				have[p.ID] = p.Reason
				by.count(p.Reason, 1)
			}
			if !maps.Equal(have, reasons) || l.Len() != len(reasons) || l.Beyond > 0 {
				t.Fatalf("seed %d: listed are %v, want %v", seed, have, reasons)
			}
			for kind, n := range l.By {
				if n != by[kind] {
					t.Fatalf("seed %d: %d of %s, want %d of %v", seed, n, kind, by[kind], have)
				}
			}
		}
	}
}

// What a plugin reports without end is bounded.
func TestBounds(t *testing.T) {
	l := NewList()
	for n := range Max + 3 {
		if fresh := l.Set(fmt.Sprint(n), fmt.Sprintf("see config.field%c%c", 'a'+n%26, 'a'+n/26%26)); fresh != (n < Max) {
			t.Fatalf("%d is fresh: %v", n, fresh)
		}
	}
	if l.Len() != Max || l.Beyond != 3 || len(l.By) != MaxFields+1 || l.By[OfOthers] == 0 {
		t.Errorf("%d of %d kinds, %d beyond", l.Len(), len(l.By), l.Beyond)
	}
	l.Relist(true)
	if l.Set("0", "see config.fieldaa") || !l.Set("0", "other") || l.Beyond != 0 || l.By["config.fieldab"] != 0 {
		t.Errorf("after a new listing: %+v", l.By)
	}
	long := strings.Repeat("é", MaxReason)
	l.Set(long, long)
	for _, p := range l.append(nil) {
		if len(p.ID) > MaxID+3 || len(p.Reason) > MaxReason+3 || !utf8.ValidString(p.ID) || !utf8.ValidString(p.Reason) {
			t.Errorf("an id of %d and a reason of %d bytes", len(p.ID), len(p.Reason))
		}
	}
}

func TestRejections(t *testing.T) {
	r := Rejections{ResourceID("c", "ns/a"): {"a", 1}, ResourceID("", "ns/a"): {"?", 2}, ResourceID("c", "ns/b"): {"b", 2}}
	if r.Sweep(2); len(r) != 2 {
		t.Errorf("after a listing: %v", r)
	}
	if r.Forget("c", "ns/a"); len(r) != 1 || r["resource c ns/b"].Reason != "b" {
		t.Errorf("after a resource of an unknown kind is accepted: %v", r)
	}
}

// Of many lines within a minute some are logged, and the others are counted.
func TestLines(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var l Lines
		allowed := func(n int) (got int) {
			for range n {
				if l.Allow() {
					got++
				}
			}
			return got
		}
		want := func(when string, got, want int) {
			t.Helper()
			if got != want {
				t.Errorf("%s: %d, want %d", when, got, want)
			}
		}
		want("of as many as may be", allowed(MaxLines), MaxLines)
		want("a summary of nothing", l.Summary(true, false), 0)
		want("of more", allowed(30), 0)
		want("a summary within a listing", l.Summary(false, true), 0)
		want("the first summary", l.Summary(false, false), 30)
		want("of more after it", allowed(5), 0)
		want("a second summary in the window", l.Summary(false, false), 0)
		want("at the end of a listing", l.Summary(true, true), 5)
		want("of more again", allowed(7), 0)
		if !l.Dropped() || l.Over() {
			t.Error("nothing was dropped, or the window is over")
		}
		time.Sleep(Within)
		if !l.Over() {
			t.Error("the window is not over")
		}
		want("after the window", allowed(1), 1)
		want("what was dropped in the one before", l.Take(), 7)

		var of Limit
		if !of.Reached("a") || of.Reached("a") || !of.Reached("b") || !of.Reached("a") {
			t.Error("a limit is told once, and again after another one")
		}
		time.Sleep(limitQuiet - time.Second)
		if of.Reached("a") {
			t.Error("a limit is told again before it was quiet")
		}
		time.Sleep(limitQuiet)
		if !of.Reached("a") {
			t.Error("a limit is not told again")
		}
	})
}
