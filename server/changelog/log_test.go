package changelog

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strconv"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
)

// names is a log with an index of names, as owners have one.
type names struct {
	Log[entry]
	sync.RWMutex
	now    Revision
	places map[string]Revision
}

type entry struct{ name, content, owner string }

func newNames() *names { return &names{places: make(map[string]Revision)} }

func (n *names) put(e entry, removed bool) {
	n.Lock()
	defer n.Unlock()
	if was, ok := n.places[e.name]; ok {
		n.Leave(was)
	}
	n.now++
	n.Append(n.now, e, removed)
	n.places[e.name] = n.now
}

func (n *names) hand(e entry) {
	n.Lock()
	defer n.Unlock()
	n.now++
	n.Hand(n.places[e.name], n.now, e)
	n.places[e.name] = n.now
}

func (n *names) evict(limit int) (gone []string) {
	n.Lock()
	defer n.Unlock()
	n.Evict(limit, func(e entry) {
		gone = append(gone, e.name)
		delete(n.places, e.name)
	})
	return gone
}

// read returns what a cursor yields, in words: name=content, -name, ~name.
func (n *names) read(c *Cursor) (out []string) {
	n.Follow(n.RLocker(), &n.now, c, func(ch Change[entry]) bool {
		switch {
		case ch.Removed:
			out = append(out, fmt.Sprint(ch.Revision, " -", ch.Entry.name))
		case ch.Handed:
			out = append(out, fmt.Sprint(ch.Revision, " ~", ch.Entry.name))
		default:
			out = append(out, fmt.Sprint(ch.Revision, " ", ch.Entry.name, "=", ch.Entry.content))
		}
		return true
	})
	return out
}

func check(t *testing.T, got []string, want ...string) {
	t.Helper()
	if d := cmp.Diff(want, got, cmpopts.EquateEmpty()); d != "" {
		t.Errorf("(-want +got):\n%s", d)
	}
}

// A change moves its name to the end. Each name is there once.
func TestEachNameIsThereOnce(t *testing.T) {
	n := newNames()
	for _, name := range []string{"a", "b", "c"} {
		n.put(entry{name: name, content: "1"}, false)
	}
	var c Cursor
	check(t, n.read(&c), "1 a=1", "2 b=1", "3 c=1")
	n.put(entry{name: "b", content: "2"}, false)
	n.put(entry{name: "a"}, true)
	n.put(entry{name: "b", content: "3"}, false)
	check(t, n.read(&c), "5 -a", "6 b=3")
	check(t, n.read(&c))
	check(t, n.read(new(Cursor)), "3 c=1", "6 b=3")
	if n.Len() != 2 || c != At(6) && c.Revision != 6 {
		t.Errorf("%d names, cursor %+v", n.Len(), c)
	}
	var all []string
	for at, e := range n.All() {
		all = append(all, fmt.Sprint(at, e.name))
	}
	check(t, all, "3c", "6b")
}

// A reader before an evicted removal is lost, one behind it is not, and one
// that begins does not need it.
func TestEvictedRemovals(t *testing.T) {
	n := newNames()
	for _, name := range []string{"a", "b", "c"} {
		n.put(entry{name: name}, false)
	}
	for _, name := range []string{"a", "b", "c"} {
		n.put(entry{name: name}, true)
	}
	check(t, n.evict(2), "a")
	check(t, n.evict(2))
	lost, behind, first := At(3), At(4), Cursor{}
	check(t, n.read(&lost))
	if !lost.Lost {
		t.Error("who has not read the removal of a does not learn so")
	}
	check(t, n.read(&behind), "5 -b", "6 -c")
	check(t, n.read(&first))
	if behind.Lost || first.Lost || first.Revision != 6 {
		t.Errorf("behind %+v, first %+v", behind, first)
	}
	check(t, n.evict(0), "b", "c")
	if len(n.places) != 0 || n.Len() != 0 {
		t.Errorf("%v, %d names", n.places, n.Len())
	}
}

// A name that was handed over is a change of its content to who has not read
// the content, and to who may have read past it.
func TestHandedNames(t *testing.T) {
	n := newNames()
	n.put(entry{name: "a", content: "1"}, false)
	n.put(entry{name: "b", content: "1"}, false)
	early, late := Cursor{}, Cursor{}
	check(t, n.read(&late), "1 a=1", "2 b=1")
	n.Follow(n.RLocker(), &n.now, &early, func(Change[entry]) bool { return false }) // read a, and stopped
	n.hand(entry{"a", "1", "other"})
	n.hand(entry{"a", "1", "third"})
	check(t, n.read(&early), "2 b=1", "4 a=1")
	check(t, n.read(&late), "4 ~a")
	check(t, n.read(new(Cursor)), "2 b=1", "4 a=1")
	n.put(entry{"a", "2", "third"}, false)
	n.hand(entry{"a", "2", "other"})
	check(t, n.read(&late), "6 a=2")
	n.Set(n.places["a"], entry{"a", "2", "quietly"})
	check(t, n.read(&late))
	check(t, n.read(new(Cursor)), "2 b=1", "6 a=2")
	if e, gone := n.Get(n.places["a"]); e.owner != "quietly" || gone {
		t.Errorf("%+v, removed %v", e, gone)
	}
	n.put(entry{name: "a"}, true)
	if _, gone := n.Get(n.places["a"]); !gone {
		t.Error("a is there")
	}
}

// After a reset everybody who has read something starts over.
func TestReset(t *testing.T) {
	n := newNames()
	n.put(entry{name: "a"}, false)
	n.hand(entry{name: "a"})
	was, begins := At(n.now), Cursor{}
	n.Reset(n.now + 1)
	n.now++
	clear(n.places)
	n.put(entry{name: "b", content: "1"}, false)
	check(t, n.read(&was))
	check(t, n.read(&begins), "4 b=1")
	n.put(entry{name: "b"}, true)
	c := Begin(4)
	check(t, n.read(&c), "5 -b")
	c = Begin(5)
	check(t, n.read(&c))
	if !was.Lost || begins.Lost || n.Len() != 0 {
		t.Errorf("was %+v, begins %+v, %d names", was, begins, n.Len())
	}
}

// A place that is not listed is a defect of the owner.
func TestNothingListed(t *testing.T) {
	n := newNames()
	n.put(entry{name: "a"}, false)
	n.put(entry{name: "a"}, false)
	for _, place := range []Revision{0, 1, 3} {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("Leave(%d) does not panic", place)
				}
			}()
			n.Leave(place)
		}()
	}
}

// reader follows a log at its own pace.
type reader struct {
	cursor  Cursor
	prints  bool // the owner, so that what is handed over concerns it
	have    map[string]entry
	restart int
}

// read reads until stop says so, or the end.
func (r *reader) read(t *testing.T, n *names, stop func() bool) {
	last := r.cursor.Revision
	n.Follow(n.RLocker(), &n.now, &r.cursor, func(ch Change[entry]) bool {
		if ch.Revision <= last {
			t.Fatalf("revision %d after %d", ch.Revision, last)
		}
		last = ch.Revision
		e := ch.Entry
		was, had := r.have[e.name]
		switch {
		case ch.Removed:
			if ch.Handed {
				t.Fatalf("the removal of %s is said to be handed over", e.name)
			}
			delete(r.have, e.name)
		case ch.Handed && (!had || was.content != e.content):
			t.Fatalf("%s is handed over with content %q, and the reader has %q", e.name, e.content, was.content)
		case ch.Handed && !r.prints:
		default:
			r.have[e.name] = e
		}
		return !stop()
	})
	if r.cursor.Lost {
		r.cursor, r.have = Cursor{}, map[string]entry{}
		r.restart++
	}
}

// Over random runs the log agrees with a plain map that has the whole history:
// of each revision it knows the state, and each reader, at any pace and
// wherever it stops, has at the end of a reading exactly the state of its
// cursor.
func TestModel(t *testing.T) {
	restarts := 0
	for seed := range uint64(60) {
		r := rand.New(rand.NewPCG(seed, 1))
		n := newNames()
		model := map[string]entry{}
		history := []map[string]entry{{}} // by revision
		limit := r.IntN(12)
		readers := make([]*reader, 6)
		for i := range readers {
			readers[i] = &reader{prints: i%2 == 0, have: map[string]entry{}}
		}
		wide := []int{5, 40, 2000}[seed%3] // the last is of several chunks
		for range 1500 {
			name := strconv.Itoa(r.IntN(wide))
			was, there := model[name]
			next := entry{name, strconv.Itoa(r.IntN(3)), strconv.Itoa(r.IntN(3))}
			switch k := r.IntN(20); {
			case k == 0:
				at := n.now + 1
				n.Reset(at)
				n.now = at
				clear(n.places)
				clear(model)
			case k < 6 && there:
				delete(model, name)
				n.put(entry{name: name}, true)
			case k < 10 && there:
				next.content = was.content
				model[name] = next
				n.hand(next)
			case k < 12 && there: // the owner changes, and nobody has to know
				next.content, next.owner = was.content, was.owner
				n.Set(n.places[name], next)
			case k < 6: // nothing to remove
			default:
				model[name] = next
				n.put(next, false)
			}
			n.evict(limit)
			for len(history) <= int(n.now) {
				history = append(history, maps.Clone(model))
			}
			if n.Len() != len(model) {
				t.Fatalf("seed %d: %d names, want %d", seed, n.Len(), len(model))
			}
			if rd := readers[r.IntN(len(readers))]; r.IntN(8) == 0 {
				rd.read(t, n, func() bool { return r.IntN(4) == 0 })
			} else if r.IntN(20) == 0 {
				rd.read(t, n, func() bool { return false })
				if rd.cursor.HasBegun() {
					compare(t, seed, rd, history[rd.cursor.Revision])
				}
			}
		}
		for _, rd := range readers {
			for range 2 { // one that is lost begins again
				rd.read(t, n, func() bool { return false })
			}
			if rd.cursor.Revision != n.now {
				t.Errorf("seed %d: a reader at %d, want %d", seed, rd.cursor.Revision, n.now)
			}
			compare(t, seed, rd, model)
			restarts += rd.restart
		}
		if most := 2*(n.live+n.dead) + 66; len(n.slots) > most {
			t.Errorf("seed %d: %d slots for %d names", seed, len(n.slots), n.live+n.dead)
		}
	}
	if restarts == 0 {
		t.Error("no reader was ever lost")
	}
}

// compare compares what a reader has with the state of a revision, without the
// owner unless it prints it.
func compare(t *testing.T, seed uint64, rd *reader, want map[string]entry) {
	t.Helper()
	var got, expect []string
	text := func(e entry) string {
		if rd.prints {
			return fmt.Sprint(e)
		}
		return e.name + "=" + e.content
	}
	for _, e := range rd.have {
		got = append(got, text(e))
	}
	for _, e := range want {
		expect = append(expect, text(e))
	}
	slices.Sort(got)
	slices.Sort(expect)
	if d := cmp.Diff(expect, got, cmpopts.EquateEmpty()); d != "" {
		t.Fatalf("seed %d: at %d (-model +reader):\n%s", seed, rd.cursor.Revision, d)
	}
}

// Readers beside a writer end with what it left.
func TestConcurrent(t *testing.T) {
	n := newNames()
	var writer, readers sync.WaitGroup
	done := make(chan struct{})
	writer.Go(func() {
		r := rand.New(rand.NewPCG(1, 2))
		for i := range 20_000 {
			n.put(entry{name: strconv.Itoa(r.IntN(600)), content: strconv.Itoa(i)}, r.IntN(3) == 0)
			n.evict(100)
		}
		close(done)
	})
	have := make([]*reader, 4)
	for i := range have {
		rd := &reader{have: map[string]entry{}}
		have[i] = rd
		readers.Go(func() {
			for over := false; !over; {
				select {
				case <-done:
					over = true
				default:
				}
				rd.read(t, n, func() bool { return false })
			}
		})
	}
	writer.Wait()
	readers.Wait()
	want := map[string]entry{}
	for _, e := range n.All() {
		want[e.name] = e
	}
	for _, rd := range have {
		for range 2 { // one that is lost begins again
			rd.read(t, n, func() bool { return false })
		}
		compare(t, 0, rd, want)
	}
}

// BenchmarkFollow is one change of a log and its reading.
func BenchmarkFollow(b *testing.B) {
	n := newNames()
	for i := range 100_000 {
		n.put(entry{name: strconv.Itoa(i)}, false)
	}
	c := At(n.now)
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		n.put(entry{name: strconv.Itoa(i % 1000)}, false)
		n.Follow(n.RLocker(), &n.now, &c, func(Change[entry]) bool { return true })
	}
}
