package consul

import (
	"errors"
	"fmt"
	"net/http"
	"sync"
	"time"

	"github.com/hashicorp/consul/api"
)

const (
	// openLeast is how long a query has to wait before the status of a proxy
	// means that the proxy ended it, rather than that there is no server.
	openLeast = time.Second
	// The intervals at which one query waits for longer than what passes, to
	// find that the proxy lets it: they double.
	tryFirst, tryMost = time.Minute, time.Hour
)

// errEnded means that a proxy ended a query that waited, before Consul had to
// answer it. Nothing is known to have changed.
var errEnded = errors.New("a proxy before consul ended the query")

// proxyError is an answer of 5xx that does not carry Consul's index, to a query
// that waits. A proxy gives such answers, and Consul where a query has failed.
type proxyError struct{ api.StatusError }

// waits limits how long queries wait to what a proxy before Consul lets pass.
type waits struct {
	most time.Duration // as configured
	// detail receives a description of a limit, "" for none.
	detail func(string)

	mu      sync.Mutex    // guards everything below
	passes  time.Duration // the limit, 0 for none
	endedAt time.Duration // when the proxy ended the query that set the limit
	trying  bool          // a query waits for longer
	tryAt   time.Time     // when the next one may
	tryIn   time.Duration // after this one
}

// next returns how long a query that is to wait for d may wait, and whether it
// waits for longer than what is known to pass. It must be passed to done.
func (w *waits) next(d time.Duration) (_ time.Duration, try bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	switch {
	case w.passes == 0 || d <= w.passes:
		return d, false
	case w.trying || time.Now().Before(w.tryAt):
		return w.passes, false
	}
	w.trying = true
	return d, true
}

// done records how long a query waited that was to wait for d, and how it
// ended. It returns whether the server may have been replaced, and the error
// for the query's caller.
func (w *waits) done(err error, d, after time.Duration, try bool) (replaced bool, _ error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if try {
		w.trying = false
	}
	p, ended := errors.AsType[*proxyError](err)
	switch {
	case err == nil && w.passes > 0 && after > w.endedAt+w.endedAt/16:
		w.passes, w.tryIn = 0, 0
		w.detail("")
		return false, nil
	case !ended || after < openLeast:
		return false, err
	case after >= d:
		// Consul had to answer by then, so the proxy waited in vain. The
		// immediate retry shows whether that is an outage.
		f := classifyStatus(p.StatusError)
		f.interrupted = true
		return false, f
	}
	// The server adds at most a sixteenth to a wait.
	if passes := after - after/8; w.passes == 0 || try || passes < w.passes {
		w.passes = passes
	}
	if w.tryIn = min(2*w.tryIn, tryMost); !try {
		w.tryIn = tryFirst
	}
	w.tryAt = time.Now().Add(w.tryIn)
	if at := after.Round(time.Second); at != w.endedAt {
		w.endedAt = at
		w.detail(fmt.Sprintf("a proxy before consul ends queries after %v (%d), so they wait for %v and not for %v: that is %.0f times the requests; let it wait for %v",
			at, p.Code, w.passes.Round(100*time.Millisecond), w.most, float64(w.most)/float64(w.passes), (w.most + w.most/8).Round(time.Second)))
	}
	// A time-out says that nothing came; any other status may say that the
	// server is gone.
	return p.Code != http.StatusGatewayTimeout, errEnded
}
