package stream

import (
	"context"
	"log/slog"
	"time"

	"github.com/isthmus-mesh/isthmus/internal/clip"
	"github.com/isthmus-mesh/isthmus/server/view"
)

// Subscription is one collection of a stream, in any protocol: what the sink
// lacks, which is the part of package view, and when it gets that.
type Subscription struct {
	*view.Subscription
	// Name is the sink's name of the collection: an xDS type URL or the name of
	// an MCP collection.
	Name string
	// Asked is how often the sink began it.
	Asked int
	// Profiled is set if nothing is sent before the profile is decided.
	Profiled bool
	// Paused is set while nothing is sent, whatever there is.
	Paused bool
	// NotBefore is when the first response may be sent, or the next full one.
	NotBefore time.Time
	// Retry is when a response that was refused is sent again, RetryAfter how
	// long after the NACK. They are zero for never; MCP only.
	Retry      time.Time
	RetryAfter time.Duration
	// Penalty identifies the sink when it comes back; MCP only.
	Penalty string
	// Wanted are the requested names of a sink that gets everything, nil for
	// all; SotW xDS only.
	Wanted map[string]struct{}
	wanted int // bytes
	// Stated is how many names with versions the sink stated, until the first
	// response.
	Stated int

	label    string // of the collection in metrics
	counters *counters
	began    time.Time     // of the newest response
	ackedAt  time.Time     // of the newest ACK
	size     int           // of the newest response, header included
	full     bool          // the newest response replaced the collection
	interval time.Duration // of responses of that size
	upTo     uint64        // the revision at which the sink had everything

	// after and revision bound the changes of the newest response.
	after, revision uint64
	kind            string // for acked
	acked           AckFunc
}

// AckFunc receives each response that a sink acknowledged after its first one:
// the kind of sink, the revisions whose changes the response has, after one and
// up to another, and when it was handed to gRPC and acknowledged. It does not
// receive those of a view of a part of the state, whose revisions are others.
type AckFunc func(kind string, after, upTo uint64, sent, acked time.Time)

// OnAck sets the function that receives acknowledged responses.
func (s *Subscription) OnAck(kind string, f AckFunc) { s.kind, s.acked = kind, f }

// Refusal is why a sink refused a response.
type Refusal struct {
	Code   int32
	Reason string
}

// maxReason bounds the stored reason of a refusal, in bytes.
const maxReason = 4096

// Clip bounds what a client can write into logs and pages.
func Clip(s string) string { return clip.Text(s, 256) }

// Answer handles the answer to the newest response: an ACK, in MCP with
// permission to send changes next, or a NACK. It reports false if no response
// with that nonce is in flight.
func (s *Subscription) Answer(nonce string, refusal *Refusal, incremental bool, now time.Time, log *slog.Logger) bool {
	if refusal != nil {
		reason := clip.Text(refusal.Reason, maxReason)
		if !s.Nack(nonce, reason) {
			return false
		}
		s.counters.nacks.Inc()
	} else {
		if !s.Ack(nonce, incremental) {
			return false
		}
		s.counters.acks.Inc()
		s.ackedAt = now
		if s.acked != nil && s.after > 0 && !s.Partial() {
			s.acked(s.kind, s.after, s.revision, s.began, now)
		}
		if log.Enabled(context.Background(), slog.LevelDebug) {
			log.Debug("acknowledged", slog.String("collection", Clip(s.Status().Collection)), slog.String("nonce", nonce), slog.Duration("took", now.Sub(s.began)))
		}
	}
	took := now.Sub(s.began)
	s.counters.duration.Observe(took.Seconds())
	s.NotBefore, s.Retry = now.Add(rest(s.interval, took)), time.Time{}
	return true
}

// rest returns how long a sink is left alone after it answered a full response:
// twice the time that it took, so that a sink which works on a response until
// its ACK does so for a third of the time at most. The interval of the size
// bounds it on both sides: a sink that acknowledges before it works is not
// flooded, and one that takes long for another reason is not starved.
func rest(interval, took time.Duration) time.Duration {
	return min(max(2*took, interval/4), 4*interval)
}

// LogRefusal logs a NACK.
func LogRefusal(log *slog.Logger, collection, nonce string, r *Refusal, attrs ...any) {
	log.Warn("sink refused a response", append([]any{
		slog.String("collection", Clip(collection)), slog.String("nonce", nonce), slog.String("err", clip.Text(r.Reason, maxReason)),
	}, attrs...)...)
}

// Due returns the earliest time of the next response, the zero time if there is
// no limit.
func (s *Subscription) Due(now time.Time) time.Time {
	if now.Before(s.NotBefore) && (s.began.IsZero() || s.full && !s.Incremental()) {
		return s.NotBefore
	}
	return time.Time{}
}

// SetView continues the subscription with another view.
func (s *Subscription) SetView(v *view.View) {
	s.Subscription.SetView(v)
	s.upTo, s.after = 0, 0
}

// subscriptionCost is what a subscription takes besides its names, in bytes,
// and wantedCost one of [Subscription.Wanted] besides its length.
const subscriptionCost, wantedCost = 1 << 10, 50

// Retained returns what the subscription takes, in bytes.
func (s *Subscription) Retained() int {
	return subscriptionCost + len(s.Name) + s.wanted + s.Subscription.Retained()
}

// Want sets the requested names of a sink that gets everything. A name that is
// new has it sent again; none after some pauses the subscription, and none from
// the first on are all (xDS protocol, "Unsubscribing From Resources").
func (s *Subscription) Want(names []string) {
	s.wanted = 0
	if len(names) == 0 {
		if s.Wanted != nil {
			s.Wanted, s.Paused = map[string]struct{}{}, true
		}
		return
	}
	wanted, more := make(map[string]struct{}, len(names)), s.Paused
	for _, n := range names {
		_, had := s.Wanted[n]
		more = more || !had && s.Wanted != nil
		wanted[n] = struct{}{}
		s.wanted += wantedCost + len(n)
	}
	if more {
		s.Again()
	}
	s.Wanted, s.Paused = wanted, false
}

// Named returns how many names are requested or stated.
func (s *Subscription) Named() int { return len(s.Wanted) + s.Names() + s.Stated }

// Idle records that the sink is current at a revision.
func (s *Subscription) Idle(revision uint64) {
	if s.State() == view.Current && !s.Refused() {
		s.upTo = revision
	}
}

// Respond returns the message of a response, with the protocol's header.
func (s *Subscription) Respond(r *view.Response, header []byte, interval func(size int) time.Duration, now time.Time, log *slog.Logger) *Message {
	s.after, s.revision = s.confirmed(), uint64(r.Revision)
	s.began, s.full, s.size = now, r.Full, len(header)+r.Size
	s.Retry, s.Stated = time.Time{}, 0
	s.interval = interval(s.size)
	s.counters.responses.Inc()
	s.counters.bytes.Add(float64(s.size))
	if log.Enabled(context.Background(), slog.LevelDebug) {
		log.Debug("push", slog.String("collection", Clip(s.Status().Collection)), slog.String("nonce", r.Nonce), slog.Uint64("revision", uint64(r.Revision)),
			slog.Int("resources", r.Resources), slog.Int("removed", len(r.Removed)), slog.Int("bytes", s.size))
	}
	return &Message{Header: header, Segments: r.Segments, Size: s.size, Shared: r.Full}
}

// Times returns when the newest response was sent, and when the sink
// acknowledged last. A zero time means not yet.
func (s *Subscription) Times() (sent, acked time.Time) { return s.began, s.ackedAt }

// Size returns the size of the newest response, in bytes, header included.
func (s *Subscription) Size() int { return s.size }

// Changes reports whether the newest response was incremental.
func (s *Subscription) Changes() bool { return s.began != time.Time{} && !s.full }

// Oversize reports whether the newest response exceeds a limit in bytes; 0 is
// no limit.
func (s *Subscription) Oversize(limit int) bool { return limit > 0 && s.size > limit }

// Patience is how long a sink may take to acknowledge a response.
const Patience = time.Minute

// Troubled returns from when on the sink is in trouble with the newest
// response, the zero time for never: at once if it refused it, or if it is
// larger than the limit, and otherwise [Patience] after it was sent, unless the
// sink answers.
func (s *Subscription) Troubled(limit int) time.Time {
	sent := s.State() == view.Sent
	switch {
	case sent && s.Oversize(limit), s.Refused():
		return s.began
	case sent:
		return s.began.Add(Patience)
	}
	return time.Time{}
}

// Earlier returns the earlier of two times, of which a zero one is never.
func Earlier(a, b time.Time) time.Time {
	if a.IsZero() || !b.IsZero() && b.Before(a) {
		return b
	}
	return a
}

// Reopen begins the subscription anew. Nothing stays but the name and a pause.
func (s *Subscription) Reopen(v *view.Subscription) {
	if s.Subscription != nil {
		s.Close()
	}
	*s = Subscription{Subscription: v, Name: s.Name, Asked: s.Asked + 1, Paused: s.Paused}
}

// confirmed returns the revision up to which the sink has everything.
func (s *Subscription) confirmed() uint64 {
	return max(s.upTo, uint64(s.Status().AckedRevision))
}

// Lag returns the number of revisions that the sink has not acknowledged.
func (s *Subscription) Lag(revision uint64) uint64 {
	if s.Narrowed() && s.State() == view.Current && !s.Refused() {
		return 0 // changes of other names do not concern it
	}
	confirmed := s.confirmed()
	return revision - min(confirmed, revision)
}

// Status is the status of one stream for pages and the API.
type Status struct {
	Address     string            `json:"address"`
	Identity    string            `json:"identity,omitempty"` // who it is, as its certificate or token verified; all below is what it says
	Node        string            `json:"node"`               // the sink's id; most Pilots send none
	Metadata    map[string]string `json:"metadata,omitempty"` // string values of the node's metadata
	Version     string            `json:"version,omitempty"`  // as stated by the node; every istiod says 65536.65536.65536
	Protocol    string            `json:"protocol"`           // sotw, delta, mcp or mcp reverse
	Profile     string            `json:"profile"`            // "" until it is decided
	Shape       string            `json:"shape"`              // inline or workload
	Connected   time.Time         `json:"connected"`
	StaleNonces uint64            `json:"stale_nonces,omitempty"` // ignored requests; MCP only
	// Shows reports whether the sink may see a resource; nil if it may see all.
	// Revisions of a sink with Shows are those of its view.
	Shows func(k view.Kind, name string) bool `json:"-"`
	// Subscriptions are in the order of service.
	Subscriptions []SubscriptionStatus `json:"subscriptions"`
}

// SubscriptionStatus is the status of one subscription.
type SubscriptionStatus struct {
	TypeURL string `json:"type_url"` // the sink's name of the collection
	view.Status
	SentAt  time.Time `json:"sent_at,omitzero"`  // of the newest response
	AckedAt time.Time `json:"acked_at,omitzero"` // of the newest ACK
	// Lag is the number of revisions of the state that the sink has not
	// acknowledged. While a response is in flight it includes changes of other
	// collections.
	Lag uint64 `json:"lag"`
	// Incremental is set if the newest response was incremental; MCP only.
	Incremental bool `json:"incremental,omitempty"`
	// Oversize is set if the newest response exceeds the message size that the
	// sink accepts by default.
	Oversize bool `json:"oversize,omitempty"`
	// Waiting is what a held subscription waits for besides its registries; MCP
	// only: "profile", the collection that has to be acknowledged first, or
	// "penalty", the delay after a sink disconnected over a response of more
	// than 4 MiB.
	Waiting string `json:"waiting,omitempty"`
}
