package stream

import (
	"context"
	"log/slog"
	"time"

	"github.com/isthmus-mesh/isthmus/server/view"
)

// Subscription is one collection of a stream.
type Subscription struct {
	*view.Subscription
	// Name is what the sink calls the collection: an xDS type URL, or the name
	// of an MCP collection.
	Name string

	counters  *counters
	began     time.Time // of the newest response
	size      int       // of the newest response, header included
	full      bool      // the newest response was everything
	notBefore time.Time // of the next response of everything
	warned    bool      // of the size of a response
	upTo      uint64    // the state's revision at which the sink had everything
}

// Refusal is why a sink refused a response.
type Refusal struct {
	Code   int32
	Reason string
}

// maxReason is how much of a sink's reason is kept, in bytes.
const maxReason = 4096

// Clip bounds what a sink can write into logs and pages.
func Clip(s string) string { return clip(s, 256) }

// Answer takes an answer to the newest response: an ACK, with the permission of
// an MCP sink to send changes next, or a NACK. It reports false if no response
// of that nonce is under way.
func (s *Subscription) Answer(nonce string, refusal *Refusal, incremental bool, now time.Time, log *slog.Logger) bool {
	if refusal != nil {
		reason := clip(refusal.Reason, maxReason)
		if !s.Nack(nonce, reason) {
			return false
		}
		s.counters.nacks.Inc()
	} else {
		if !s.Ack(nonce, incremental) {
			return false
		}
		s.counters.acks.Inc()
		if log.Enabled(context.Background(), slog.LevelDebug) {
			log.Debug("acknowledged", slog.String("collection", Clip(s.Status().Collection)), slog.String("nonce", nonce), slog.Duration("took", now.Sub(s.began)))
		}
	}
	s.counters.duration.Observe(now.Sub(s.began).Seconds())
	return true
}

// LogRefusal logs a NACK.
func LogRefusal(log *slog.Logger, collection, nonce string, r *Refusal, attrs ...any) {
	log.Warn("sink refused a response", append([]any{
		slog.String("collection", Clip(collection)), slog.String("nonce", nonce), slog.String("err", clip(r.Reason, maxReason)),
	}, attrs...)...)
}

// Due returns when the next response may go out: the zero time for at once.
func (s *Subscription) Due(now time.Time) time.Time {
	if s.full && !s.Incremental() && now.Before(s.notBefore) {
		return s.notBefore
	}
	return time.Time{}
}

// Idle notes that the sink has everything up to a revision.
func (s *Subscription) Idle(revision uint64) {
	if s.State() == view.Current && !s.Refused() {
		s.upTo = revision
	}
}

// Respond returns the message of a response with the protocol's header.
func (s *Subscription) Respond(r *view.Response, header []byte, interval func(size int) time.Duration, now time.Time, log *slog.Logger) *Message {
	s.began, s.full, s.size = now, r.Full, len(header)+r.Size
	s.notBefore = now.Add(interval(s.size))
	s.counters.responses.Inc()
	s.counters.bytes.Add(float64(s.size))
	if log.Enabled(context.Background(), slog.LevelDebug) {
		log.Debug("push", slog.String("collection", Clip(s.Status().Collection)), slog.String("nonce", r.Nonce), slog.Uint64("revision", uint64(r.Revision)),
			slog.Int("resources", r.Resources), slog.Int("removed", len(r.Removed)), slog.Int("bytes", s.size))
	}
	return &Message{Header: header, Segments: r.Segments}
}

// Size returns the size of the newest response, in bytes, header included.
func (s *Subscription) Size() int { return s.size }

// Changes reports whether the newest response was changes.
func (s *Subscription) Changes() bool { return s.began != time.Time{} && !s.full }

// Oversize reports whether the newest response is larger than a limit, 0 for
// none.
func (s *Subscription) Oversize(limit int) bool { return limit > 0 && s.size > limit }

// Warn reports whether it is the first time that it is called.
func (s *Subscription) Warn() (first bool) {
	first, s.warned = !s.warned, true
	return first
}

// Reset forgets everything but the name and what was warned of.
func (s *Subscription) Reset() {
	if s.Subscription != nil {
		s.Close()
	}
	*s = Subscription{Name: s.Name, warned: s.warned}
}

// Lag returns how many revisions the sink has not confirmed.
func (s *Subscription) Lag(revision uint64) uint64 {
	if s.Narrowed() && s.State() == view.Current && !s.Refused() {
		return 0 // it is woken as soon as there is anything
	}
	confirmed := max(s.upTo, uint64(s.Status().AckedRevision))
	return revision - min(confirmed, revision)
}

// Status is one stream as people want to see it.
type Status struct {
	Address     string            `json:"address"`
	Node        string            `json:"node"`               // the sink's id; most Pilots have none
	Metadata    map[string]string `json:"metadata,omitempty"` // of the node, its strings only
	Version     string            `json:"version,omitempty"`  // what the node says of itself; every istiod says 65536.65536.65536
	Protocol    string            `json:"protocol"`           // sotw, delta, mcp or mcp reverse
	Profile     string            `json:"profile"`            // "" until it is decided
	Shape       string            `json:"shape"`              // the same
	Connected   time.Time         `json:"connected"`
	StaleNonces uint64            `json:"stale_nonces,omitempty"` // requests that were ignored; of mcp only
	// Subscriptions are in the order in which they are served.
	Subscriptions []SubscriptionStatus `json:"subscriptions"`
}

// SubscriptionStatus is one collection of a stream.
type SubscriptionStatus struct {
	TypeURL string `json:"type_url"` // as the sink calls the collection
	view.Status
	// Lag is how many revisions of the state the sink has not confirmed.
	// Changes of other collections count too while a response is under way.
	Lag uint64 `json:"lag"`
	// Incremental says that the newest response was changes; of mcp only.
	Incremental bool `json:"incremental,omitempty"`
	// Oversize says that the newest response is larger than the sink accepts
	// unless it is told to; of mcp only.
	Oversize bool `json:"oversize,omitempty"`
	// Waiting says what one that is held waits for besides its registries; of
	// mcp only: "profile", the collection that has to be acknowledged first, or
	// "penalty", the time that a sink has to wait that went away over a response
	// of more than 4 MiB.
	Waiting string `json:"waiting,omitempty"`
}
