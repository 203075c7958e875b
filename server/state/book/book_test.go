package book

import (
	"maps"
	"math/rand/v2"
	"sync"
	"testing"
)

// Readers see a map as it was committed last, whatever the writer has changed
// since.
func TestModel(t *testing.T) {
	for seed := range uint64(200) {
		r := rand.New(rand.NewPCG(seed, 1))
		var b Book
		m := NewMap[int, int](&b)
		now, committed := map[int]int{}, map[int]int{}
		for step := range 300 {
			key := r.IntN(100)
			switch r.IntN(10) {
			case 0, 1, 2, 3, 4:
				m.Set(key, step)
				now[key] = step
			case 5, 6, 7:
				m.Remove(key)
				delete(now, key)
			case 8:
				b.Commit()
				committed = maps.Clone(now)
				if m.Begun() > 0 {
					t.Fatalf("seed %d: %d keys of no batch", seed, m.Begun())
				}
			case 9:
				if m.Begun() == 0 { // what readers must not see before
					b.ChangeAll(func() {
						m.Set(key, step)
						b.ChangeAll(func() { m.Remove(key + 1) })
					})
					now[key] = step
					delete(now, key+1)
					committed = maps.Clone(now)
				}
			}
			b.RLock()
			for key := range 101 {
				if got := m.Shared(key); got != committed[key] {
					t.Fatalf("seed %d, step %d: key %d is %d, want %d", seed, step, key, got, committed[key])
				}
			}
			if !maps.Equal(m.Now, now) || len(m.Keys()) != len(now) {
				t.Fatalf("seed %d, step %d: now %v, want %v", seed, step, m.Now, now)
			}
			b.RUnlock()
		}
	}
}

// A reader beside the writer sees both keys of each batch, or none.
func TestReadersBeside(t *testing.T) {
	var b Book
	m := NewMap[string, int](&b)
	var reader sync.WaitGroup
	done := make(chan struct{})
	reader.Go(func() {
		for {
			b.RLock()
			x, y := m.Shared("x"), m.Shared("y")
			b.RUnlock()
			if x != y {
				t.Errorf("x is %d and y is %d", x, y)
				return
			}
			select {
			case <-done:
				return
			default:
			}
		}
	})
	for n := range 2000 {
		m.Set("x", n)
		m.Set("y", n)
		b.Commit()
	}
	close(done)
	reader.Wait()
}
