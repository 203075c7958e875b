package consul

import (
	"container/list"
	"context"
	"sync"
	"sync/atomic"
	"time"
)

const (
	// ownQueries is how many queries of one scope wait besides those of the watches: see rest.go.
	ownQueries = 3
	// manyFetches is how many queries that do not wait may be under way at once where they share connections: the first listing of
	// many services, or all of them again after an outage.
	manyFetches = 48
	// leastConnections is the least that max_connections may say for one scope: its own queries, some that do not wait, and some watches.
	leastConnections = 16
	// turnTime is how long a watch holds a connection, about, before it may have to go.
	turnTime = 30 * time.Second
	// refusedFor is how long a connection that was refused makes watches hold fewer.
	refusedFor = time.Hour
)

// turns shares out the connections of a registry among its queries, where each of them takes one (HTTP/1.1). So many are for the queries of
// the scopes themselves, so many for queries that do not wait, and the others are places for watches that wait for their services to change.
//
// A watch without a place stands in the queue, and rests: see rest.go. A service that changed before is likely to change again, so the places go to
// the services that changed last: at the end of a wait that lasts turnTime a watch hands its place on, if it is one of those that must go. Nothing is
// cut off for that: Consul goes on counting a connection whose client left until the wait that was asked for is over.
//
// Where queries share connections (HTTP/2) there is nothing to share out, and every watch waits.
type turns struct {
	// multiplexed says that the last answer came over HTTP/2.
	multiplexed atomic.Bool
	// many and few have a place for each query that does not wait: many where connections are shared, few where they are not.
	many, few chan struct{}
	// connections bounds them all.
	connections int
	// crowded is told when watches begin to rest, and with false when none does any more. It must not block; nil for nobody.
	crowded func(bool)

	mu      sync.Mutex     // guards everything below, and the turn of each watch
	watches int            // how many there are
	most    int            // places for them, as configured
	places  int            // the same, less what Consul refused
	holders map[*turn]bool // who has one
	queue   list.List      // of *turn: who has none, those whose service changed last in front
	told    bool           // what crowded was told last
	// lastRefused is when Consul last refused a connection.
	lastRefused time.Time
}

// turn is the part of one watch in turns, guarded by turns.mu.
type turn struct {
	at *list.Element // its place in the queue, nil if it is not there
	// changed is when the service last changed, the zero time if that was before it was followed.
	changed time.Time
	// given is sent to when a place was given to it. It has room for one.
	given chan struct{}
}

func newTurn() turn { return turn{given: make(chan struct{}, 1)} }

// newTurns divides up the connections of a registry with so many scopes.
func newTurns(connections, scopes int) *turns {
	connections = max(connections, needed(scopes))
	left := connections - scopes*ownQueries
	few := min(max(left/4, 4), manyFetches)
	return &turns{
		many: make(chan struct{}, manyFetches), few: make(chan struct{}, few),
		connections: connections, most: left - few, places: left - few, holders: map[*turn]bool{},
	}
}

// needed returns how many connections so many scopes need at least.
func needed(scopes int) int { return leastConnections + (scopes-1)*ownQueries }

// fetch waits until one more query that does not wait may begin. The function that it returns must be called at its end.
func (t *turns) fetch(ctx context.Context) (done func(), err error) {
	places := t.few
	if t.multiplexed.Load() {
		places = t.many
	}
	select {
	case places <- struct{}{}:
		return func() { <-places }, nil
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
}

// take reports whether the watch may wait on a connection. If not, it stands in the queue from then on.
func (t *turns) take(w *turn) bool {
	if t.multiplexed.Load() {
		return true
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	select {
	case <-w.given:
	default:
	}
	if !t.holders[w] && w.at == nil {
		t.enqueueLocked(w)
		t.serveLocked()
	}
	return t.holders[w]
}

// wait returns how long a watch on a connection may wait, of what it would.
func (t *turns) wait(d time.Duration) time.Duration {
	if t.multiplexed.Load() {
		return d
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.watches > t.places {
		return min(d, turnTime)
	}
	return d
}

// join makes a watch one of those that there are.
func (t *turns) join() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.watches++
}

// resting returns how many watches have no place.
func (t *turns) resting() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.queue.Len()
}

// changed says that the service of a watch has changed just now.
func (t *turns) changed(w *turn) {
	t.mu.Lock()
	defer t.mu.Unlock()
	w.changed = time.Now()
	if w.at != nil {
		t.queue.MoveToFront(w.at)
	}
}

// pass ends a wait of a watch, which hands its place on if there are too many, or if it is one of those whose services changed longest ago and as
// many in the queue have one that changed since.
func (t *turns) pass(w *turn) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if !t.holders[w] {
		return
	}
	later, earlier := 0, 0
	for at := t.queue.Front(); at != nil && turnAt(at).changed.After(w.changed); at = at.Next() {
		later++
	}
	for other := range t.holders {
		if other.changed.Before(w.changed) {
			earlier++
		}
	}
	if t.places < t.most && time.Since(t.lastRefused) > refusedFor {
		t.restoreLocked()
	}
	if len(t.holders) > t.places || later > earlier {
		delete(t.holders, w)
		t.serveLocked()
	}
}

// leave ends the part of a watch for good.
func (t *turns) leave(w *turn) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.watches--
	if w.at != nil {
		t.dequeueLocked(w)
	}
	delete(t.holders, w)
	t.serveLocked()
}

// refused says that Consul did not take the connection of a query, a watch's or with nil another one. From then on fewer watches have a place: so few
// that with all other queries no more than three quarters of the connections are used that there were, since a limit that is used up leaves nothing to other
// programs on this machine. It reports whether that is news.
func (t *turns) refused(w *turn) (news bool) {
	if t.multiplexed.Load() {
		return false
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if w != nil {
		delete(t.holders, w)
	}
	own := t.connections - t.most - cap(t.few)
	places := max(1, min(t.places, (len(t.holders)+own)*3/4-cap(t.few)))
	news = places < t.places && time.Since(t.lastRefused) > turnTime
	t.places, t.lastRefused = places, time.Now()
	return news
}

// restore takes back what refused did: the agent is another one, or has another limit.
func (t *turns) restore() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.restoreLocked()
}

func (t *turns) restoreLocked() {
	t.places = t.most
	t.serveLocked()
}

// serveLocked gives places that are free to those who stand in the queue, and says whether anybody is left there.
func (t *turns) serveLocked() {
	for len(t.holders) < t.places && t.queue.Len() > 0 {
		w := turnAt(t.queue.Front())
		t.dequeueLocked(w)
		t.holders[w] = true
		select {
		case w.given <- struct{}{}:
		default: // it has not looked since it was given one before
		}
	}
	if crowded := t.queue.Len() > 0; crowded != t.told && t.crowded != nil {
		t.told = crowded
		t.crowded(crowded)
	}
}

func (t *turns) enqueueLocked(w *turn) {
	at := t.queue.Front()
	for at != nil && turnAt(at).changed.After(w.changed) {
		at = at.Next()
	}
	switch {
	case at == nil || w.changed.IsZero():
		w.at = t.queue.PushBack(w)
	default:
		w.at = t.queue.InsertBefore(w, at)
	}
}

func (t *turns) dequeueLocked(w *turn) {
	t.queue.Remove(w.at)
	w.at = nil
}

// turnAt returns what is at a place in the queue.
func turnAt(at *list.Element) *turn {
	return at.Value.(*turn) //nolint:forcetypeassert // nothing else is in the list
}
