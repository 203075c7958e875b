package store

import (
	"fmt"
	"iter"
	"math/rand/v2"
	"slices"
	"strconv"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// text is a value whose content is its version.
type text string

func (t text) Version() string { return string(t) }

func set(coll, name string, v text) Op[text] { return Op[text]{Collection: coll, Name: name, Value: v} }

func remove(coll, name string) Op[text] {
	return Op[text]{Collection: coll, Name: name, Remove: true}
}

func contents(s *Store[text], coll string) map[string]text {
	all, _ := s.All(coll)
	return collect(all)
}

func collect(all iter.Seq[Change[text]]) map[string]text {
	m := make(map[string]text)
	for c := range all {
		m[c.Name] = c.Value
	}
	return m
}

// A change moves its name to the tail of the log; Since returns each name once, oldest change first.
func TestSinceReturnsEachChangedNameOnce(t *testing.T) {
	s := New[text](Options{})
	s.Apply([]Op[text]{set("c", "a", "1"), set("c", "b", "1"), set("c", "c", "1")})
	_, cursor, _ := s.Since("c", 0)
	s.Apply([]Op[text]{set("c", "b", "2")})
	s.Apply([]Op[text]{set("c", "a", "2")})
	s.Apply([]Op[text]{set("c", "b", "3")})
	s.Apply([]Op[text]{remove("c", "c")})

	got, now, ok := s.Since("c", cursor)
	want := []Change[text]{
		{Name: "a", Value: "2", Revision: 5},
		{Name: "b", Value: "3", Revision: 6},
		{Name: "c", Removed: true, Revision: 7},
	}
	if d := cmp.Diff(want, got); d != "" || !ok || now != 7 {
		t.Errorf("Since: now %d, ok %t, diff (-want +got):\n%s", now, ok, d)
	}
	if got, now, ok := s.Since("c", now); len(got) != 0 || now != 7 || !ok {
		t.Errorf("Since(now) = %v, %d, %t; want nothing", got, now, ok)
	}
}

// What changes nothing costs no revision and wakes nobody.
func TestApplyOfTheSameIsNothing(t *testing.T) {
	s := New[text](Options{})
	s.Apply([]Op[text]{set("c", "a", "1")})
	wake := s.Changed()
	rev, changed := s.Apply([]Op[text]{set("c", "a", "1"), remove("c", "b"), remove("d", "a")})
	if rev != 1 || changed != 0 {
		t.Errorf("Apply = %d, %d; want 1, 0", rev, changed)
	}
	select {
	case <-wake:
		t.Error("a batch without a change woke its readers")
	default:
	}
	s.Apply([]Op[text]{set("c", "a", "2")})
	select {
	case <-wake:
	default:
		t.Error("a change did not wake its readers")
	}
}

// shared is a value that comes from somewhere, which is not part of its content.
type shared struct{ version, from string }

func (s shared) Version() string { return s.version }

// A value of the version that is there takes its place, and the batch says which ops changed something.
func TestApplyOfTheSameFromElsewhere(t *testing.T) {
	s := New[shared](Options{})
	batch := []Op[shared]{{Collection: "c", Name: "a", Value: shared{"1", "x"}}}
	s.Apply(batch)
	if !batch[0].Changed {
		t.Error("a new name is not marked as changed")
	}
	batch = append(batch, Op[shared]{Collection: "c", Name: "b", Value: shared{"1", "y"}})
	batch[0].Value.from = "y"
	if rev, changed := s.Apply(batch); rev != 2 || changed != 1 || batch[0].Changed || !batch[1].Changed {
		t.Errorf("Apply = %d, %d, %+v; want 2, 1 and only the second changed", rev, changed, batch)
	}
	if v, _ := s.Get("c", "a"); v.from != "y" {
		t.Errorf("Get = %+v, want the value that came last", v)
	}
	if got, _, _ := s.Since("c", 1); len(got) != 1 || got[0].Name != "b" {
		t.Errorf("Since(1) = %+v, want b", got)
	}
}

// A reader whose cursor lies before a dropped tombstone is told so; one behind it is not.
func TestTombstonesAreBounded(t *testing.T) {
	s := New[text](Options{Tombstones: 2})
	for _, n := range []string{"a", "b", "c"} {
		s.Apply([]Op[text]{set("c", n, "1")})
	}
	for _, n := range []string{"a", "b", "c"} { // revisions 4, 5, 6; the tombstone of revision 4 is dropped
		s.Apply([]Op[text]{remove("c", n)})
	}
	if _, _, ok := s.Since("c", 3); ok {
		t.Error("Since(3) is ok although the removal of revision 4 is forgotten")
	}
	got, _, ok := s.Since("c", 4)
	want := []Change[text]{{Name: "b", Removed: true, Revision: 5}, {Name: "c", Removed: true, Revision: 6}}
	if d := cmp.Diff(want, got); d != "" || !ok {
		t.Errorf("Since(4): ok %t, diff (-want +got):\n%s", ok, d)
	}
}

// The store agrees with plain maps over random runs, and every reader that follows it by Since, however seldom it looks, ends
// with the same content.
func TestModel(t *testing.T) {
	for seed := range uint64(30) {
		t.Run(strconv.FormatUint(seed, 10), func(t *testing.T) {
			r := rand.New(rand.NewPCG(seed, 1))
			s := New[text](Options{Tombstones: 1 + r.IntN(20)})
			model := map[string]map[string]text{"x": {}, "y": {}}
			type reader struct {
				coll   string
				cursor Revision
				have   map[string]text
			}
			readers := make([]*reader, 6)
			for i := range readers {
				readers[i] = &reader{coll: []string{"x", "y"}[i%2], have: map[string]text{}}
			}
			catchUp := func(rd *reader) {
				changes, now, ok := s.Since(rd.coll, rd.cursor)
				if !ok {
					all, at := s.All(rd.coll)
					rd.have, rd.cursor = collect(all), at
					return
				}
				last := rd.cursor
				for _, c := range changes {
					if c.Revision <= last {
						t.Fatalf("revisions do not grow: %d after %d", c.Revision, last)
					}
					last = c.Revision
					if c.Removed {
						delete(rd.have, c.Name)
					} else {
						rd.have[c.Name] = c.Value
					}
				}
				rd.cursor = now
			}
			for range 2000 {
				batch := make([]Op[text], r.IntN(5))
				before, want := s.Revision(), 0
				for i := range batch {
					coll := []string{"x", "y"}[r.IntN(2)]
					name := strconv.Itoa(r.IntN(40))
					old, have := model[coll][name]
					if r.IntN(3) == 0 {
						batch[i] = remove(coll, name)
						if have {
							want++
						}
						delete(model[coll], name)
					} else {
						v := text(strconv.Itoa(r.IntN(3)))
						batch[i] = set(coll, name, v)
						if !have || old != v {
							want++
						}
						model[coll][name] = v
					}
				}
				rev, changed := s.Apply(batch)
				if changed != want || rev != before+Revision(want) {
					t.Fatalf("Apply(%v) = %d, %d; want %d, %d", batch, rev, changed, before+Revision(want), want)
				}
				if r.IntN(10) == 0 {
					catchUp(readers[r.IntN(len(readers))])
				}
			}
			for _, rd := range readers {
				catchUp(rd)
				if d := cmp.Diff(model[rd.coll], rd.have); d != "" {
					t.Errorf("reader of %s (-model +reader):\n%s", rd.coll, d)
				}
			}
			for coll, want := range model {
				if d := cmp.Diff(want, contents(s, coll)); d != "" {
					t.Errorf("%s (-model +store):\n%s", coll, d)
				}
				if got := s.Len(coll); got != len(want) {
					t.Errorf("Len(%s) = %d, want %d", coll, got, len(want))
				}
			}
		})
	}
}

// Readers and writers at once: each reader ends with what the writers left, and sees each batch whole.
func TestConcurrentReaders(t *testing.T) {
	s := New[text](Options{Tombstones: 8})
	const writers, rounds = 4, 500
	done := make(chan struct{})
	var readers, writing sync.WaitGroup
	for range 4 {
		readers.Go(func() {
			have, cursor := map[string]text{}, Revision(0)
			for {
				wake := s.Changed()
				changes, now, ok := s.Since("c", cursor)
				if !ok {
					all, at := s.All("c")
					have, cursor = collect(all), at
				} else {
					for _, c := range changes {
						if c.Removed {
							delete(have, c.Name)
						} else {
							have[c.Name] = c.Value
						}
					}
					cursor = now
				}
				for w := range writers { // a writer's two names always change together
					if a, b := have[fmt.Sprint("a", w)], have[fmt.Sprint("b", w)]; a != b {
						t.Errorf("half a batch: a%d = %q, b%d = %q", w, a, w, b)
						return
					}
				}
				select {
				case <-wake:
				case <-done:
					if cursor == s.Revision() {
						if d := cmp.Diff(contents(s, "c"), have); d != "" {
							t.Errorf("(-store +reader):\n%s", d)
						}
						return
					}
				}
			}
		})
	}
	for w := range writers {
		writing.Go(func() {
			r := rand.New(rand.NewPCG(uint64(w), 2))
			a, b := fmt.Sprint("a", w), fmt.Sprint("b", w)
			for i := range rounds {
				if r.IntN(4) == 0 {
					s.Apply([]Op[text]{remove("c", a), remove("c", b)})
				} else {
					v := text(strconv.Itoa(i))
					s.Apply([]Op[text]{set("c", a, v), set("c", b, v)})
				}
			}
		})
	}
	writing.Wait()
	close(done)
	readers.Wait()
}

// All is a snapshot in order of last change, whatever happens while it is read.
func TestAllIsASnapshot(t *testing.T) {
	s := New[text](Options{})
	s.Apply([]Op[text]{set("c", "a", "1"), set("c", "b", "1"), set("c", "a", "2")})
	all, rev := s.All("c")
	s.Apply([]Op[text]{set("c", "d", "1"), remove("c", "a")})
	var names []string
	for c := range all {
		names = append(names, c.Name)
	}
	if !slices.Equal(names, []string{"b", "a"}) || rev != 3 {
		t.Errorf("All = %v at %d, want [b a] at 3", names, rev)
	}
}

// BenchmarkApplyOne is one change at different sizes: the cost must not grow with the size.
func BenchmarkApplyOne(b *testing.B) {
	for _, size := range []int{1_000, 100_000} {
		b.Run(fmt.Sprintf("size=%d", size), func(b *testing.B) {
			s, names := filled(size)
			versions := [2]text{"x", "y"}
			b.ReportAllocs()
			i := 0
			for b.Loop() {
				s.Apply([]Op[text]{{Collection: "c", Name: names[i%size], Value: versions[(i/size)%2]}})
				i++
			}
		})
	}
}

// BenchmarkSinceOne is one change and its pick-up by one reader at different sizes.
func BenchmarkSinceOne(b *testing.B) {
	for _, size := range []int{1_000, 100_000} {
		b.Run(fmt.Sprintf("size=%d", size), func(b *testing.B) {
			s, names := filled(size)
			versions := [2]text{"x", "y"}
			_, cursor, _ := s.Since("c", 0)
			b.ReportAllocs()
			i := 0
			for b.Loop() {
				s.Apply([]Op[text]{{Collection: "c", Name: names[i%size], Value: versions[(i/size)%2]}})
				var changes []Change[text]
				changes, cursor, _ = s.Since("c", cursor)
				if len(changes) != 1 {
					b.Fatalf("%d changes", len(changes))
				}
				i++
			}
		})
	}
}

func filled(size int) (*Store[text], []string) {
	s := New[text](Options{})
	names := make([]string, size)
	for i := range names {
		names[i] = fmt.Sprintf("ns/service-%d", i)
		s.Apply([]Op[text]{set("c", names[i], "0")})
	}
	return s, names
}
