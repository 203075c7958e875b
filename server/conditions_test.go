package server

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/isthmus-mesh/isthmus/server/conditions"
	"github.com/isthmus-mesh/isthmus/server/stream"
	"github.com/isthmus-mesh/isthmus/server/supervisor"
	"github.com/isthmus-mesh/isthmus/server/view"
)

// A certificate is reported from 14 days before its end, or in its last quarter
// if it lives shorter.
func TestJudgeCertificate(t *testing.T) {
	now := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	const day = 24 * time.Hour
	for _, tt := range []struct {
		name        string
		from, until time.Duration
		want        conditions.Kind
	}{
		{"right", -day, 89 * day, ""},
		{"fifteen days", -75 * day, 15 * day, ""},
		{"thirteen days", -77 * day, 13 * day, conditions.CertificateExpires},
		{"an hour, half of it over", -30 * time.Minute, 30 * time.Minute, ""},
		{"an hour, most of it over", -50 * time.Minute, 10 * time.Minute, conditions.CertificateExpires},
		{"over", -90 * day, -time.Second, conditions.CertificateInvalid},
		{"not yet", time.Second, 90 * day, conditions.CertificateInvalid},
	} {
		var got conditions.Kind
		if found := judgeCertificate(now, "x", now.Add(tt.from), now.Add(tt.until)); len(found) > 0 {
			got = found[0].Kind
		}
		if got != tt.want {
			t.Errorf("%s: %q, want %q", tt.name, got, tt.want)
		}
	}
}

// Of a sink the worst is reported, and a response that is under way is no lag.
func TestJudgeSink(t *testing.T) {
	now := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	sub := func(state view.State, age time.Duration) stream.SubscriptionStatus {
		s := stream.SubscriptionStatus{TypeURL: "networking.istio.io/v1/ServiceEntry", SentAt: now.Add(-age)}
		s.State = state.String()
		return s
	}
	refused := sub(view.Current, time.Hour)
	refused.SentRevision, refused.LastNack = 7, "no such field"
	large := sub(view.Sent, time.Second)
	large.Oversize = true
	for _, tt := range []struct {
		want conditions.Kind
		subs []stream.SubscriptionStatus
	}{
		{"", nil},
		{"", []stream.SubscriptionStatus{sub(view.Sent, 59*time.Second), sub(view.Current, time.Hour)}},
		{conditions.SinkLags, []stream.SubscriptionStatus{sub(view.Current, time.Hour), sub(view.Sent, 61*time.Second)}},
		{conditions.SinkRefuses, []stream.SubscriptionStatus{refused}},
		{conditions.SinkLags, []stream.SubscriptionStatus{refused, sub(view.Sent, time.Hour)}},
		{conditions.ResponseTooLarge, []stream.SubscriptionStatus{large, refused}},
	} {
		if kind, since, _ := judgeSink(now, &stream.Status{Subscriptions: tt.subs}); kind != tt.want || (kind != "") == since.IsZero() {
			t.Errorf("%v: %q since %v, want %q", tt.subs, kind, since, tt.want)
		}
	}
}

// A clock that is set is reported for an hour, and one that drifts is not.
func TestClock(t *testing.T) {
	start := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	c := clock{start: start}
	for i := range 100 { // 40 ms a second
		elapsed := time.Duration(i) * time.Second
		c.look(start.Add(elapsed+elapsed/25), elapsed)
	}
	if c.step != 0 {
		t.Errorf("a drift is a step of %s", c.step)
	}
	c.look(start.Add(100*time.Second-time.Hour), 100*time.Second)
	if c.step > -59*time.Minute {
		t.Errorf("a step of an hour back is %s", c.step)
	}
}

// Restarts count for ten minutes, and those of the time before do not.
func TestRestarted(t *testing.T) {
	a := &assessor{restarts: make(map[string]*restarts)}
	now := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	for _, step := range []struct {
		after    time.Duration
		restarts int
		want     int
	}{{0, 0, 0}, {time.Minute, 3, 3}, {5 * time.Minute, 4, 4}, {6 * time.Minute, 4, 1}, {time.Minute, 1, 1}} {
		now = now.Add(step.after)
		if got := a.restarted(now, &supervisor.Status{Registry: "dc1", Restarts: step.restarts}); got != step.want {
			t.Errorf("%d restarts lately after %s, want %d", got, step.after, step.want)
		}
	}
}

// What is near a limit is named with the field to change.
func TestNearLimits(t *testing.T) {
	s := problematic(t)
	status := s.db.Registries()
	status[0].Services, status[0].Bytes = uint64(s.limits.ServicesPerRegistry*8/10), s.limits.BytesPerRegistry*7/10 //nolint:gosec // positive
	s.crowd.open.Store(int64(s.limits.Streams))
	var got []string
	for _, c := range s.nearLimits(status) {
		field, _, _ := strings.Cut(c.Cure, ":")
		got = append(got, c.Subject+" "+field)
	}
	if want := "[registry load limits.services_per_registry listeners limits.streams]"; fmt.Sprint(got) != want {
		t.Errorf("near limits %v, want %s", got, want)
	}
}
