package protect

import (
	"errors"
	"iter"
	"maps"
	"time"
)

// Errors of decisions on paused removals.
var (
	// ErrNothingPaused is returned if no removal is paused.
	ErrNothingPaused = errors.New("no removal is paused: the registry has everything that is served of it")
	// ErrAlreadyKept is returned if no removal awaits a decision.
	ErrAlreadyKept = errors.New("everything whose removal is paused is kept already; isthmus removals allow is still possible")
)

// Paused has the removals of a registry that are paused, by what is removed.
type Paused[K comparable] struct {
	Guard
	items map[K]*Item
	told  time.Time // time of the last log line
}

// Len returns the number of paused removals.
func (p *Paused[K]) Len() int { return len(p.items) }

// All yields the paused removals, in any order.
func (p *Paused[K]) All() iter.Seq2[K, *Item] { return maps.All(p.items) }

// Keys yields what is removed, in any order.
func (p *Paused[K]) Keys() iter.Seq[K] { return maps.Keys(p.items) }

// Set pauses a removal.
func (p *Paused[K]) Set(key K, it *Item) {
	if p.items == nil {
		p.items = make(map[K]*Item)
	}
	p.items[key] = it
	p.Count(it, 1)
}

// Drop forgets a paused removal.
func (p *Paused[K]) Drop(key K) {
	p.Count(p.items[key], -1)
	delete(p.items, key)
}

// Take forgets all paused removals, and returns them.
func (p *Paused[K]) Take() (items map[K]*Item) {
	items, p.items = p.items, nil
	p.Reset()
	return items
}

// Keep keeps everything that is removed until the registry has it again.
func (p *Paused[K]) Keep() error {
	switch {
	case len(p.items) == 0:
		return ErrNothingPaused
	case p.Pending == 0:
		return ErrAlreadyKept
	}
	for _, it := range p.items {
		it.Kept = true
	}
	p.Pending, p.Mass = 0, 0
	p.ForgetPeaks()
	return nil
}

// Due yields what nobody has decided on in time, and reports whether there is
// anything.
func (p *Paused[K]) Due(now time.Time) (due iter.Seq[K], ok bool) {
	if p.Pending == 0 || now.Sub(p.Since) < p.Config.Hold {
		return nil, false
	}
	if p.Since = Earliest(maps.Values(p.items)); now.Sub(p.Since) < p.Config.Hold {
		return nil, false // those before are there again
	}
	return func(yield func(K) bool) {
		for key, it := range p.items {
			if p.Config.IsDue(it, now) && !yield(key) {
				return
			}
		}
	}, true
}

// Restart gives all that is paused another time.
func (p *Paused[K]) Restart(now time.Time) {
	for _, it := range p.items {
		it.From = now
	}
	p.Since = now
}

// Update updates the time of what is pending after removals were dropped or
// decided on, and forgets what the last of them was compared with.
func (p *Paused[K]) Update() {
	if p.Pending > 0 {
		p.Since = Earliest(maps.Values(p.items))
		return
	}
	p.Since, p.told = time.Time{}, time.Time{}
	if len(p.items) == 0 {
		p.Of = 0
	}
}

// Tell reports whether the paused removals are worth a log line, if so many
// were pending before: the first, or more, with a pause between two lines.
func (p *Paused[K]) Tell(before int, now time.Time) bool {
	if p.Pending == 0 || before > 0 && (p.Pending <= before || now.Sub(p.told) < tellAgain) {
		return false
	}
	p.told = now
	return true
}

const tellAgain = time.Minute
