package view

import (
	"fmt"
	"testing"

	"github.com/isthmus-mesh/isthmus/server/state"
)

// A change of a name wakes who asked for it and nobody else, whoever follows
// the state; what is dropped or closed is followed no longer.
func TestNamesWake(t *testing.T) {
	st := newDB(t, state.Options{})
	v := New(st)
	woken := map[string]int{}
	sub := func(id string, names ...string) *Subscription {
		s := NewSubscription(v, Options{Collection: entries, Framing: DeltaXDS, Wake: func() { woken[id]++ }})
		s.Narrow()
		s.Add(names...)
		return s
	}
	all := map[string]*Subscription{"a": sub("a", "ns/1", "ns/2"), "b": sub("b", "ns/2"), "c": sub("c", "ns/3")}
	take := func() {
		t.Helper()
		for id, s := range all {
			r, ok, err := s.Next()
			if err != nil {
				t.Fatal(err)
			}
			if ok != (woken[id] > 0) {
				t.Errorf("%s: a response: %t, woken %d times", id, ok, woken[id])
			}
			s.Ack(r.Nonce, false)
		}
		clear(woken)
	}
	for id := range all {
		woken[id] = 1 // the first response needs no change
	}
	take()
	for _, tt := range []struct {
		name string
		want []string
	}{{"ns/1", []string{"a"}}, {"ns/2", []string{"a", "b"}}, {"ns/4", nil}, {"ns/3", []string{"c"}}} {
		apply(st, set(t, tt.name, "x."+tt.name))
		v.Follow()
		if len(woken) != len(tt.want) {
			t.Errorf("%s wakes %v, want %v", tt.name, woken, tt.want)
		}
		take()
	}
	all["a"].Drop("ns/2")
	apply(st, set(t, "ns/2", "y"))
	v.Follow()
	if woken["a"] != 0 || woken["b"] != 1 {
		t.Errorf("after a dropped it: woken %v", woken)
	}
	take()
	all["b"].Drop("ns/2", "ns/3") // never asked for the second
	all["c"].Add("ns/3")          // again
	woken["c"] = 1                // what is asked for again is answered again
	take()
	apply(st, set(t, "ns/2", "z"), set(t, "ns/3", "z"))
	v.Follow()
	if woken["b"] != 0 || woken["c"] != 1 {
		t.Errorf("after b dropped it: woken %v", woken)
	}
	if of := v.named[all["c"].kind].of; len(of) != 2 {
		t.Errorf("%d names are followed, want ns/1 and ns/3", len(of))
	}
	for _, s := range all {
		s.Close()
	}
	if len(v.named) != 0 {
		t.Errorf("%d kinds are followed for nobody", len(v.named))
	}
}

// BenchmarkNamesOneChange is one change among 100,000 names, and its response,
// with many subscriptions to twenty names each of which one has it.
func BenchmarkNamesOneChange(b *testing.B) {
	for _, count := range []int{1, 5_000} {
		b.Run(fmt.Sprintf("subscriptions=%d", count), func(b *testing.B) {
			st, v, changes := filled(b, 100_000)
			subs := make([]*Subscription, count)
			for i := range subs {
				s := NewSubscription(v, Options{Collection: entries, Framing: DeltaXDS})
				s.Narrow()
				for n := range 20 {
					s.Add(fmt.Sprintf("ns/service-%d", (20*i+n)%100_000))
				}
				r, _, _ := s.Next()
				s.Ack(r.Nonce, false)
				subs[i] = s
			}
			b.ReportAllocs()
			i := 0
			for b.Loop() {
				apply(st, changes[i/20&1][i%20])
				r, ok, _ := subs[0].Next()
				if !ok {
					b.Fatal("no response")
				}
				subs[0].Ack(r.Nonce, false)
				i++
			}
		})
	}
}
