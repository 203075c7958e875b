package stream

import (
	"context"
	"log/slog"
	"net/netip"
	"strings"
	"sync"
	"time"

	"golang.org/x/time/rate"
)

// Bounds on the lines that streams log. What is left out is in the metrics, and
// what is open is in the pages.
const (
	// addressLines bounds those of one address: so many at once, then one a
	// second. allLines bounds those of all together, then ten a second.
	addressLines, allLines = 300, 3000
	// maxLineAddresses bounds the addresses that are remembered.
	maxLineAddresses = 10_000
)

// HostOf returns what counts as one address: an address of IPv4, or the first
// 64 bits of one of IPv6, below which whoever has one address has all of them.
// It reports false for an address without a host, as of a unix socket.
func HostOf(address string) (string, bool) {
	p, err := netip.ParseAddrPort(address)
	if err != nil {
		host, _, socket := strings.Cut(address, "#") // unix:PATH#NUMBER
		return host, socket
	}
	ip := p.Addr().Unmap()
	if ip.Is4() {
		return ip.String(), true
	}
	return netip.PrefixFrom(ip, 64).Masked().String(), true // without the zone
}

// Sparse returns a logger for streams that leaves out lines of an address,
// above Debug, when there are more of them than sinks cause: who opens streams
// without end would fill the disk. The next line that is logged says how many
// were left out.
func Sparse(log *slog.Logger) *slog.Logger {
	return slog.New(&sparse{Handler: log.Handler(), spared: &spared{of: make(map[string]*rate.Limiter), all: rate.NewLimiter(10, allLines)}})
}

// Log returns the logger of the stream.
func (e *Entry) Log(log *slog.Logger) *slog.Logger {
	if s, ok := log.Handler().(*sparse); ok {
		host, _ := HostOf(e.Address)
		log = slog.New(&sparse{s.Handler, host, s.spared})
	}
	return log.With(slog.String("address", e.Address))
}

// sparse is the handler of one address, "" for none.
type sparse struct {
	slog.Handler
	host   string
	spared *spared
}

// spared is shared by the handlers of all addresses.
type spared struct {
	all *rate.Limiter

	mu sync.Mutex
	// guarded by mu
	of      map[string]*rate.Limiter
	leftOut int
}

// Handle implements [slog.Handler].
func (s *sparse) Handle(ctx context.Context, r slog.Record) error {
	if r.Level > slog.LevelDebug {
		leftOut, ok := s.spared.allow(s.host)
		if !ok {
			return nil
		}
		if leftOut > 0 {
			r = r.Clone()
			r.AddAttrs(slog.Int("left_out", leftOut))
		}
	}
	return s.Handler.Handle(ctx, r)
}

// allow reports whether a line of an address may be logged, and how many were
// left out since the last one.
func (s *spared) allow(host string) (leftOut int, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	l := s.of[host]
	if l == nil {
		if len(s.of) >= maxLineAddresses {
			clear(s.of)
		}
		l = rate.NewLimiter(rate.Every(time.Second), addressLines)
		s.of[host] = l
	}
	if !l.Allow() || !s.all.Allow() {
		s.leftOut++
		return 0, false
	}
	leftOut, s.leftOut = s.leftOut, 0
	return leftOut, true
}

// WithAttrs implements [slog.Handler].
func (s *sparse) WithAttrs(attrs []slog.Attr) slog.Handler {
	return &sparse{s.Handler.WithAttrs(attrs), s.host, s.spared}
}

// WithGroup implements [slog.Handler].
func (s *sparse) WithGroup(name string) slog.Handler {
	return &sparse{s.Handler.WithGroup(name), s.host, s.spared}
}
