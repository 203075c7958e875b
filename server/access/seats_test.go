package access

import (
	"fmt"
	"testing"
)

// Each network has so many seats, and all together have some. A seat that is
// left, however often, is one again.
func TestSeats(t *testing.T) {
	s := NewSeats(2, 5)
	var leave []func()
	for i, want := range []bool{true, true, false, true, true, true, false} { // two of a, one of others
		l, ok := s.Take(map[bool]string{true: "a", false: fmt.Sprint(i)}[i < 3])
		if ok != want {
			t.Fatalf("seat %d is taken: %v, want %v", i, ok, want)
		}
		if ok {
			leave = append(leave, l)
		}
	}
	leave[0]()
	leave[0]()
	if _, ok := s.Take("a"); !ok {
		t.Error("the seat that is left is not taken")
	}
	if _, ok := s.Take("b"); ok {
		t.Error("a seat that is left twice is two")
	}
	many := NewSeats(1, 0)
	for i := range 100 {
		if _, ok := many.Take(fmt.Sprint(i)); !ok {
			t.Errorf("network %d has no seat", i)
		}
	}
}
