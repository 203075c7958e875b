package admin

import (
	"context"
	"iter"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/isthmus-mesh/isthmus/server/access"
)

const (
	// queriesWaiting bounds how many queries of one address wait for their
	// turn.
	queriesWaiting = 20
	// queryWait bounds the wait.
	queryWait = 10 * time.Second
	// restMost bounds the pause after a query. It is well below queryWait, so
	// that who asks one after the other is never refused.
	restMost = queryWait / 4
	// maxHeld bounds the answers that are being read, in bytes: one may be
	// larger, and then is the only one.
	maxHeld = 32 << 20
	// yieldEvery is how many items of a list are looked at without a pause for
	// others.
	yieldEvery = 256
	// yieldFor is the pause.
	yieldFor = 200 * time.Microsecond
)

// inTurn has requests that read the state wait for their turn: one at a time,
// those of each address in turn, and after each nothing for three times as
// long as it took, restMost at most. So they take an eighth of two processors,
// and who asks without end waits for himself.
func (s *Server) inTurn(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !access.Safe(r.Method) || light(r.URL.Path) {
			next.ServeHTTP(w, r)
			return
		}
		ctx, cancel := context.WithTimeout(r.Context(), queryWait)
		defer cancel()
		turn, err := s.turns.Enter(ctx, access.Network(addressOf(r)).String())
		if err != nil {
			w.Header().Set("Retry-After", "1")
			writeError(w, http.StatusTooManyRequests, "too many requests of this address are under way; ask again in a second")
			return
		}
		defer turn.Leave()
		began := time.Now()
		b := &buffered{ResponseWriter: w}
		next.ServeHTTP(b, r)
		turn.FreeAfter(min(3*time.Since(began), restMost))
		defer s.held.add(w, len(b.body))()
		b.send() // a client that reads slowly keeps only its own address waiting
	})
}

// light reports whether a request costs next to nothing, or lasts: probes,
// files of the pages, streams, and profiles.
func light(path string) bool {
	switch path {
	case "/healthz", "/readyz", "/style.css", "/app.js", "/icon.svg", "/changes/stream":
		return true
	}
	return strings.HasPrefix(path, "/debug/pprof/")
}

func addressOf(r *http.Request) netip.Addr {
	a, _ := netip.ParseAddrPort(r.RemoteAddr) // invalid on a unix socket
	return a.Addr()
}

// buffered keeps a response until its turn is over.
type buffered struct {
	http.ResponseWriter
	code int
	body []byte
}

// WriteHeader implements http.ResponseWriter.
func (b *buffered) WriteHeader(code int) { b.code = code }

// Write implements http.ResponseWriter.
func (b *buffered) Write(p []byte) (int, error) {
	b.body = append(b.body, p...)
	return len(p), nil
}

// held are answers that are being read, those of each address one at a time.
type held struct {
	mu     sync.Mutex
	bytes  int // guarded by mu, as the rest
	oldest []*answer
}

type answer struct {
	w    http.ResponseWriter
	size int
}

// add counts an answer until it is sent. If all of them are more than maxHeld,
// the clients that have read for longest are cut off.
func (h *held) add(w http.ResponseWriter, size int) (sent func()) {
	own := &answer{w, size}
	h.mu.Lock()
	defer h.mu.Unlock()
	for h.bytes += size; h.bytes > maxHeld && len(h.oldest) > 0; h.oldest = h.oldest[1:] {
		// An error means that it is no connection.
		_ = http.NewResponseController(h.oldest[0].w).SetWriteDeadline(time.Now())
		h.bytes -= h.oldest[0].size
	}
	h.oldest = append(h.oldest, own)
	return func() {
		h.mu.Lock()
		defer h.mu.Unlock()
		if i := slices.Index(h.oldest, own); i >= 0 {
			h.oldest = slices.Delete(h.oldest, i, i+1)
			h.bytes -= size
		}
	}
}

func (b *buffered) send() {
	if b.code != 0 {
		b.ResponseWriter.WriteHeader(b.code)
	}
	_, _ = b.ResponseWriter.Write(b.body) // an error means that the client disconnected
}

// yielding lets others have the processor again and again.
func yielding[T any](items iter.Seq[T]) iter.Seq[T] {
	return func(yield func(T) bool) {
		n := 0
		for item := range items {
			if n++; n%yieldEvery == 0 {
				time.Sleep(yieldFor) //nolint:forbidigo // bounded by the length of the listing
			}
			if !yield(item) {
				return
			}
		}
	}
}
