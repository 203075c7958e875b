package admin

import (
	"bytes"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/isthmus-mesh/isthmus/server/access"
	"github.com/isthmus-mesh/isthmus/server/state/history"
)

const (
	// maxStreams bounds the pages that follow changes at a time.
	maxStreams = 50
	// maxOwnStreams bounds those of one address, or /64 of IPv6.
	maxOwnStreams = 10
	// maxStreamed bounds the changes of one event. A page that missed more is
	// told so and loads again.
	maxStreamed = 200
	// streamEvery is the shortest time between two events of a stream.
	streamEvery = 500 * time.Millisecond
	// streamAlive is the longest, so that a proxy does not close it.
	streamAlive = 20 * time.Second
	// streamLongest is how long a stream lasts. The browser comes back by
	// itself, and the listener's rules as they are then decide.
	streamLongest = time.Minute
	// streamBack is when it comes back, in milliseconds.
	streamBack = 500
	// streamWrite bounds the writing of one event.
	streamWrite = 10 * time.Second
)

// changeFilter selects changes.
type changeFilter struct{ registry, text string }

func (f *changeFilter) matches(c *history.Event) bool {
	return either(f.registry, c.Registry) && contains(f.text, c.Name)
}

// streamChanges sends changes as they happen, as server-sent events
// (https://html.spec.whatwg.org/multipage/server-sent-events.html): "changes"
// has rows of the table, the newest first; "missed" means that there were too
// many.
func (s *Server) streamChanges(w http.ResponseWriter, r *http.Request) {
	values := r.URL.Query()
	f := changeFilter{values.Get("registry"), strings.ToLower(values.Get("q"))}
	var last uint64
	// A browser that reconnects says what it has.
	for _, text := range []string{values.Get("after"), r.Header.Get("Last-Event-ID")} {
		if text == "" {
			continue
		}
		if _, err := fmt.Sscan(text, &last); err != nil {
			writeError(w, http.StatusBadRequest, fmt.Sprintf("after=%q: must be a number", text))
			return
		}
	}
	leave, ok := s.following.Take(access.Network(addressOf(r)).String())
	if !ok {
		writeError(w, http.StatusServiceUnavailable, fmt.Sprintf("%d pages follow changes already, or %d of this address, which is the most", maxStreams, maxOwnStreams))
		return
	}
	defer leave()
	control := http.NewResponseController(w)
	w.Header().Set("Content-Type", "text/event-stream")
	send := func(text string) bool {
		_ = control.SetWriteDeadline(time.Now().Add(streamWrite)) // else the server's, for a whole response
		_, err := w.Write([]byte(text))
		return err == nil && control.Flush() == nil
	}
	if !send(fmt.Sprintf("retry: %d\n\n", streamBack)) {
		return
	}
	over := time.NewTimer(streamLongest)
	defer over.Stop()
	timer := time.NewTimer(streamAlive)
	defer timer.Stop()
	for {
		changed := s.source.Changed() // read before the changes, so that none is missed
		text, next := s.event(&f, last)
		if last = next; text != "" && !send(text) {
			return
		}
		pause := time.NewTimer(streamEvery)
		select {
		case <-pause.C:
		case <-r.Context().Done():
			pause.Stop()
			return
		case <-s.ending:
			pause.Stop()
			return
		}
		timer.Reset(streamAlive)
		select {
		case <-changed:
		case <-timer.C:
			if !send(": alive\n\n") {
				return
			}
		case <-over.C:
			return
		case <-r.Context().Done():
			return
		case <-s.ending:
			return
		}
	}
}

// event returns the event for the changes after a number, "" if none matches,
// and the number of the newest.
func (s *Server) event(f *changeFilter, last uint64) (text string, newest uint64) {
	newest = last
	var found []history.Event
	for c := range s.source.Changes() {
		if newest == last && c.Number < last {
			// The numbers are those of an earlier process.
			return fmt.Sprintf("event: missed\nid: %d\ndata: -\n\n", c.Number), c.Number
		}
		if c.Number <= last {
			break
		}
		newest = max(newest, c.Number)
		if f.matches(&c) {
			if found = append(found, c); len(found) > maxStreamed {
				return fmt.Sprintf("event: missed\nid: %d\ndata: -\n\n", newest), newest
			}
		}
	}
	if len(found) == 0 {
		return "", newest
	}
	var rows bytes.Buffer
	for c := range slices.Values(found) {
		if err := templates["changes"].ExecuteTemplate(&rows, "change-row", c); err != nil {
			panic(fmt.Sprintf("BUG: admin: %v", err))
		}
	}
	// A line of data must not contain a line break.
	data := strings.NewReplacer("\n", " ", "\r", " ").Replace(rows.String())
	return fmt.Sprintf("event: changes\nid: %d\ndata: %s\n\n", newest, data), newest
}
