package history

import (
	"fmt"
	"runtime"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// all reads everything, a few at a time.
func all(h *History, few int) (events []Event) {
	for next := ^uint64(0); ; {
		var some []Event
		some, next = h.Read(next, make([]Event, 0, few))
		if events = append(events, some...); len(some) < few {
			return events
		}
	}
}

// A change comes back as it was added, newest first.
func TestRead(t *testing.T) {
	var h History
	at := time.Unix(7, 8)
	h.Add(&Change{At: at, Registry: "dc1", Collection: "c", Name: "ns/a", Revision: 3, Hash: 5, New: Endpoint{"10.0.0.1", 2}})
	h.Add(&Change{At: at, Registry: "dc1", Collection: "c", Name: "ns/a", Revision: 4, Hash: 6, Old: Endpoint{"10.0.0.1", 2}, New: Endpoint{"10.0.0.22", 3}, Idle: Idle{"not", "removed"}})
	h.Add(&Change{At: at, Registry: "dc2", Collection: "c", Name: "ns/a", Revision: 5, Removed: true, Old: Endpoint{"10.0.0.22", 3}, Idle: Idle{"critical", "fails"}})
	h.Add(&Change{At: at, Registry: "dc2", Collection: "d", Name: "ns/b", Revision: 6, Removed: true})
	want := []Event{
		{Time: at, Registry: "dc2", Collection: "d", Name: "ns/b", Op: "remove", Revision: 6, Number: 4},
		{Time: at, Registry: "dc2", Collection: "c", Name: "ns/a", Op: "remove", Revision: 5, Number: 3, Old: &Endpoint{"10.0.0.22", 3}, Health: "critical", Reason: "fails"},
		{Time: at, Registry: "dc1", Collection: "c", Name: "ns/a", Op: "upsert", Version: "0000000000000006", Revision: 4, Number: 2, Old: &Endpoint{"10.0.0.1", 2}, New: &Endpoint{"10.0.0.22", 3}},
		{Time: at, Registry: "dc1", Collection: "c", Name: "ns/a", Op: "upsert", Version: "0000000000000005", Revision: 3, Number: 1, New: &Endpoint{"10.0.0.1", 2}},
	}
	for few := 1; few < 6; few++ {
		if d := cmp.Diff(want, all(&h, few)); d != "" {
			t.Errorf("%d at a time (-want +got):\n%s", few, d)
		}
	}
	if h.Recorded() != 4 {
		t.Errorf("%d recorded", h.Recorded())
	}
}

// The history has the newest changes, in order, and no more memory than for its
// number of them. A reader leaves out what is evicted meanwhile.
func TestBounded(t *testing.T) {
	before := heap()
	h := new(History)
	add := func(n int) {
		for range n {
			h.Add(&Change{At: time.Unix(1, 0), Registry: "dc1", Collection: "c", Name: fmt.Sprintf("namespace/a-service-with-a-name-%06d", h.recorded)})
		}
	}
	const more = 500
	add(Max + more)
	if grown := heap() - before; grown > Max*260 {
		t.Errorf("%d changes take %d bytes", Max, grown)
	}
	events := all(h, 256)
	if len(events) != Max || events[0].Number != Max+more || events[len(events)-1].Number != more+1 {
		t.Errorf("%d changes from %d to %d", len(events), events[0].Number, events[len(events)-1].Number)
	}
	for i, e := range events {
		if want := uint64(Max + more - i); e.Number != want || e.Name != fmt.Sprintf("namespace/a-service-with-a-name-%06d", want-1) {
			t.Fatalf("event %d is %d: %s", i, e.Number, e.Name)
		}
	}
	some, next := h.Read(more+3, make([]Event, 0, 2))
	if add(1); len(some) != 2 || next != more+1 {
		t.Fatalf("%d events, next %d", len(some), next)
	}
	if late, next := h.Read(next, make([]Event, 0, 2)); len(late) != 0 || next != more+1 {
		t.Errorf("an evicted change is %v, next %d", late, next)
	}
}

func heap() int {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int(m.HeapAlloc)
}

// Samples are bounded, and the last one is of now.
func TestSamples(t *testing.T) {
	var h History
	for n := range 5 {
		h.AddSample(Sample{Services: n}, 3)
	}
	want := []Sample{{Services: 2}, {Services: 3}, {Services: 4}, {Services: 9}}
	for range 2 { // reading adds none
		if d := cmp.Diff(want, h.Samples(Sample{Services: 9})); d != "" {
			t.Errorf("(-want +got):\n%s", d)
		}
	}
}
