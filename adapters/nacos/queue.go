package nacos

import (
	"container/heap"
	"context"
	"sync"
	"time"

	"github.com/isthmus-mesh/isthmus/plugin"
)

// queue holds services that need a visit, each once, ordered by due time. Its
// length is bounded by the number of services.
type queue struct {
	mu    sync.Mutex // guards everything below
	items dueHeap
	// visiting are the services being visited; visits added meanwhile wait for
	// the end of the current one.
	visiting map[*service]bool
	// wake is closed and replaced when an earlier visit is added.
	wake chan struct{}
}

type dueItem struct {
	s     *service
	due   time.Time
	index int
}

func newQueue() *queue {
	return &queue{visiting: map[*service]bool{}, wake: make(chan struct{})}
}

// add schedules a visit for the given time, or keeps an earlier one.
func (q *queue) add(s *service, due time.Time) {
	q.mu.Lock()
	defer q.mu.Unlock()
	switch it := s.queued; {
	case it == nil:
		s.queued = &dueItem{s: s, due: due}
		heap.Push(&q.items, s.queued)
	case due.Before(it.due):
		it.due = due
		heap.Fix(&q.items, it.index)
	default:
		return
	}
	q.wakeLocked()
}

func (q *queue) wakeLocked() {
	close(q.wake)
	q.wake = make(chan struct{})
}

// take waits for a due service and starts its visit; done ends it. It returns
// nil when ctx ends.
func (q *queue) take(ctx context.Context) *service {
	for {
		q.mu.Lock()
		wait := time.Hour
		var parked []*dueItem
		var got *service
		for q.items.Len() > 0 {
			it := q.items[0]
			if until := time.Until(it.due); until > 0 {
				wait = until
				break
			}
			heap.Pop(&q.items)
			if q.visiting[it.s] { // done wakes
				parked = append(parked, it)
				continue
			}
			it.s.queued = nil
			q.visiting[it.s] = true
			got = it.s
			break
		}
		for _, it := range parked {
			heap.Push(&q.items, it)
		}
		wake := q.wake
		q.mu.Unlock()
		if got != nil {
			return got
		}
		if !plugin.Pause(ctx, wait, wake) {
			return nil
		}
	}
}

// done ends a visit.
func (q *queue) done(s *service) {
	q.mu.Lock()
	defer q.mu.Unlock()
	delete(q.visiting, s)
	if s.queued != nil {
		q.wakeLocked()
	}
}

// drop removes a service.
func (q *queue) drop(s *service) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if s.queued != nil {
		heap.Remove(&q.items, s.queued.index)
		s.queued = nil
	}
}

// dueHeap implements heap.Interface, the earliest first.
type dueHeap []*dueItem

// Len implements heap.Interface.
func (h dueHeap) Len() int { return len(h) }

// Less implements heap.Interface.
func (h dueHeap) Less(i, j int) bool { return h[i].due.Before(h[j].due) }

// Swap implements heap.Interface.
func (h dueHeap) Swap(i, j int) {
	h[i], h[j] = h[j], h[i]
	h[i].index, h[j].index = i, j
}

// Push implements heap.Interface.
func (h *dueHeap) Push(x any) {
	it := x.(*dueItem) //nolint:forcetypeassert // only dueItems are pushed
	it.index = len(*h)
	*h = append(*h, it)
}

// Pop implements heap.Interface.
func (h *dueHeap) Pop() any {
	old := *h
	it := old[len(old)-1]
	old[len(old)-1] = nil
	*h = old[:len(old)-1]
	return it
}
