package admin

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/pprof"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/isthmus-mesh/isthmus/server/access"
)

// Limits of one request. A profile or a trace may take 30 seconds and more.
const (
	readTimeout     = 10 * time.Second
	writeTimeout    = 2 * time.Minute
	idleTimeout     = 2 * time.Minute
	shutdownTimeout = 3 * time.Second
	maxHeader       = 64 << 10
)

// Options are the options of a [Server]. The zero value works.
type Options struct {
	// Gatherer provides /metrics; with nil the page is empty.
	Gatherer prometheus.Gatherer
	// Pprof enables /debug/pprof.
	Pprof bool
	// Operator is what POST requests are for; nil means that there are none.
	Operator Operator
	// Gate decides who may use the address; nil admits everyone.
	Gate *access.Gate
	// GuardProbes makes the gate decide on /healthz and /readyz, too.
	GuardProbes bool
	// Pace, unless nil, is what all requests pass first.
	Pace func(http.Handler) http.Handler
	// Log receives errors of the HTTP server; nil discards them.
	Log *slog.Logger
}

// Server is the HTTP handler of the pages and the API.
type Server struct {
	source  Source
	log     *slog.Logger
	handler http.Handler

	turns      *access.Turns // of requests that read
	held       held          // answers to them
	following  *access.Seats // of pages that follow changes
	ending     chan struct{} // closed when Run ends
	endStreams func()
}

// New returns a server that shows source.
func New(source Source, o Options) *Server {
	s := &Server{source: source, log: o.Log, ending: make(chan struct{}), turns: access.NewTurns(1, 1, queriesWaiting), following: access.NewSeats(maxOwnStreams, maxStreams)}
	s.endStreams = sync.OnceFunc(func() { close(s.ending) })
	if s.log == nil {
		s.log = slog.New(slog.DiscardHandler)
	}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { writeText(w, http.StatusOK, "ok\n") })
	mux.HandleFunc("GET /readyz", s.ready)
	mux.HandleFunc("GET /api/v1/registries", s.registries)
	mux.HandleFunc("GET /api/v1/services", s.services)
	mux.HandleFunc("GET /api/v1/resources", s.resources)
	mux.HandleFunc("GET /api/v1/sinks", s.sinks)
	mux.HandleFunc("GET /api/v1/consumers", s.consumers)
	mux.HandleFunc("GET /api/v1/consumers/{consumer}/objects", s.objects)
	mux.HandleFunc("GET /api/v1/changes", s.changes)
	mux.HandleFunc("GET /api/v1/status", s.status)
	mux.HandleFunc("GET /api/v1/conditions", s.conditions)
	mux.HandleFunc("GET /api/v1/explain", s.explain)
	if o.Operator != nil {
		mux.Handle("/api/v1/reload", action(func(w http.ResponseWriter, r *http.Request) { reload(w, r, o.Operator) }))
		mux.Handle("/api/v1/loglevel", action(func(w http.ResponseWriter, r *http.Request) { logLevel(w, r, o.Operator) }))
		mux.Handle("/api/v1/compare", action(func(w http.ResponseWriter, r *http.Request) { compare(w, r, o.Operator) }))
	}
	mux.HandleFunc("GET /api/v1/removals", s.removals)
	mux.Handle("/api/v1/registries/{registry}/removals/allow", action(s.decide(true)))
	mux.Handle("/api/v1/registries/{registry}/removals/keep", action(s.decide(false)))
	// The names of the release before.
	mux.HandleFunc("GET /api/v1/kept", former("/api/v1/removals", s.removals))
	mux.Handle("/api/v1/registries/{registry}/accept", action(former("/api/v1/registries/NAME/removals/allow", s.decide(true))))
	mux.Handle("/api/v1/registries/{registry}/refuse", action(former("/api/v1/registries/NAME/removals/keep", s.decide(false))))
	mux.HandleFunc("/api/", s.noSuchCall)
	if o.Gatherer != nil {
		mux.Handle("GET /metrics", promhttp.HandlerFor(o.Gatherer, promhttp.HandlerOpts{ErrorHandling: promhttp.ContinueOnError}))
	}
	if o.Pprof {
		mux.HandleFunc("/debug/pprof/", operatorOnly(pprof.Index))
		mux.HandleFunc("/debug/pprof/cmdline", operatorOnly(pprof.Cmdline))
		mux.HandleFunc("/debug/pprof/profile", operatorOnly(pprof.Profile))
		mux.HandleFunc("/debug/pprof/symbol", operatorOnly(pprof.Symbol))
		mux.HandleFunc("/debug/pprof/trace", operatorOnly(pprof.Trace))
	}
	s.pages(mux)
	s.handler = sameOrigin(s.inTurn(mux))
	if o.Gate != nil {
		s.handler = o.Gate.Handler(s.handler, func(path string) bool {
			return !o.GuardProbes && (path == "/healthz" || path == "/readyz")
		})
	}
	if o.Pace != nil {
		s.handler = o.Pace(s.handler)
	}
	s.handler = secure(s.handler)
	return s
}

// operatorOnly refuses callers whose role is to read.
func operatorOnly(next http.HandlerFunc) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		if !operates(w, r) {
			return
		}
		next(w, r)
	}
}

// ServeHTTP implements http.Handler.
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) { s.handler.ServeHTTP(w, r) }

// Run serves l until ctx ends, and closes l.
func (s *Server) Run(ctx context.Context, l net.Listener) error {
	h := &http.Server{
		Handler:           s,
		ReadHeaderTimeout: readTimeout,
		ReadTimeout:       readTimeout,
		WriteTimeout:      writeTimeout,
		IdleTimeout:       idleTimeout,
		MaxHeaderBytes:    maxHeader,
		ErrorLog:          slog.NewLogLogger(s.log.Handler(), slog.LevelWarn),
	}
	ended := make(chan error, 1)
	go func() { ended <- h.Serve(l) }() // Run waits for it; Shutdown or Close ends it
	select {
	case err := <-ended:
		return fmt.Errorf("admin server on %s: %w", l.Addr(), err)
	case <-ctx.Done():
	}
	s.endStreams()
	grace, cancel := context.WithTimeout(context.Background(), shutdownTimeout)
	defer cancel()
	err := h.Shutdown(grace)
	if err != nil {
		err = errors.Join(fmt.Errorf("admin server on %s: requests were under way for %s after the end: %w", l.Addr(), shutdownTimeout, err), h.Close())
	}
	if serve := <-ended; !errors.Is(serve, http.ErrServerClosed) {
		err = errors.Join(err, serve)
	}
	return err
}

// secure sets headers that restrict browsers to showing the pages.
func secure(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		h := w.Header()
		h.Set("Content-Security-Policy", "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'")
		h.Set("X-Content-Type-Options", "nosniff")
		h.Set("Referrer-Policy", "no-referrer")
		h.Set("Cross-Origin-Resource-Policy", "same-origin")
		h.Set("Cache-Control", "no-store")
		next.ServeHTTP(w, r)
	})
}

func (s *Server) ready(w http.ResponseWriter, _ *http.Request) {
	code, lines := http.StatusOK, []string{"ready"}
	if reasons := s.source.NotReady(); len(reasons) > 0 {
		code, lines = http.StatusServiceUnavailable, reasons
	}
	for _, c := range s.source.Conditions() {
		lines = append(lines, c.String())
	}
	writeText(w, code, strings.Join(lines, "\n")+"\n")
}

func writeText(w http.ResponseWriter, code int, text string) {
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	w.WriteHeader(code)
	_, _ = io.WriteString(w, text)
}

// ago returns the time from t to now in one unit: "3 s", "5 min", "2 h", "4 d".
func ago(now, t time.Time) string {
	if t.IsZero() {
		return ""
	}
	switch d := now.Sub(t); {
	case d < 2*time.Minute:
		return fmt.Sprintf("%d s", max(0, d/time.Second))
	case d < 2*time.Hour:
		return fmt.Sprintf("%d min", d/time.Minute)
	case d < 48*time.Hour:
		return fmt.Sprintf("%d h", d/time.Hour)
	default:
		return fmt.Sprintf("%d d", d/(24*time.Hour))
	}
}

// size formats a number of bytes.
func size[N int | int64](n N) string {
	switch {
	case n < 1000:
		return fmt.Sprintf("%d B", n)
	case n < 1_000_000:
		return fmt.Sprintf("%.1f kB", float64(n)/1e3)
	default:
		return fmt.Sprintf("%.1f MB", float64(n)/1e6)
	}
}

// types returns the names of collections without their groups.
func types(collections []string) string {
	names := make([]string, len(collections))
	for i, c := range collections {
		names[i] = c[strings.LastIndex(c, "/")+1:]
	}
	return strings.Join(names, ", ")
}

// maxShown is the number of items of a list on the page.
const maxShown = 50

func first[T any](list []T) []T { return list[:min(len(list), maxShown)] }
