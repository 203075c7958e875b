package server

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/isthmus-mesh/isthmus/plugin/collection"
	"github.com/isthmus-mesh/isthmus/server/state/status"
	"github.com/isthmus-mesh/isthmus/server/stream"
	"github.com/isthmus-mesh/isthmus/server/view"
)

// Hosts that resemble one that nobody has are suggested, the most similar
// first.
func TestSimilar(t *testing.T) {
	all := []string{"web.example.org", "web-v2.example.org", "orders.example.org", "billing.example.net"}
	for asked, want := range map[string][]string{
		"wep.example.org":    {"web.example.org"},
		"web":                {"web.example.org", "web-v2.example.org"},
		"web.example.com":    {"web.example.org", "web-v2.example.org"},
		"order.example.org":  {"orders.example.org"},
		"nothing.like.these": {},
		"":                   {},
	} {
		got := similar(all, asked, 3)
		if asked == "wep.example.org" || asked == "order.example.org" {
			got = got[:min(1, len(got))]
		}
		if d := cmp.Diff(want, got); d != "" {
			t.Errorf("similar to %q (-want +got):\n%s", asked, d)
		}
	}
}

// What a sink has of a host follows from the revisions that it was sent and
// has acknowledged, and with a view of its own from its lag.
func TestExplainSink(t *testing.T) {
	claims := []status.Claim{{Name: "ns/web", Outcome: "served", Inline: 7, Workload: 9}}
	sees := func(_ view.Kind, name string) bool { return name == "ns/web" }
	blind := func(view.Kind, string) bool { return false }
	for _, tt := range []struct {
		want  string
		shape string
		shows func(view.Kind, string) bool
		sub   stream.SubscriptionStatus
	}{
		{"acknowledged", "inline", nil, stream.SubscriptionStatus{Status: view.Status{State: "current", SentRevision: 7, AckedRevision: 7}, Lag: 2}},
		{"sent", "inline", nil, stream.SubscriptionStatus{Status: view.Status{State: "sent", SentRevision: 8, AckedRevision: 6}}},
		{"not sent", "workload", nil, stream.SubscriptionStatus{Status: view.Status{State: "sent", SentRevision: 8, AckedRevision: 8}}},
		{"refused", "inline", nil, stream.SubscriptionStatus{Status: view.Status{State: "current", SentRevision: 7, AckedRevision: 6}}},
		{"waiting", "inline", nil, stream.SubscriptionStatus{Status: view.Status{State: "waiting"}}},
		{"by name", "inline", nil, stream.SubscriptionStatus{Status: view.Status{State: "current", Names: 1}}},
		{"not in its view", "inline", blind, stream.SubscriptionStatus{Status: view.Status{State: "current", SentRevision: 7, AckedRevision: 7}}},
		{"acknowledged", "inline", sees, stream.SubscriptionStatus{Status: view.Status{State: "current", SentRevision: 2, AckedRevision: 2}}},
		{"sent", "inline", sees, stream.SubscriptionStatus{Status: view.Status{State: "sent", SentRevision: 2, AckedRevision: 1}, Lag: 1}},
	} {
		tt.sub.Collection = collection.ServiceEntry
		got := explainSink(&stream.Status{Shape: tt.shape, Shows: tt.shows, Subscriptions: []stream.SubscriptionStatus{tt.sub}}, claims)
		if got.State != tt.want {
			t.Errorf("%+v: %s, want %s", tt.sub, got.State, tt.want)
		}
	}
	if got := explainSink(&stream.Status{}, claims); got.State != "not asked" {
		t.Errorf("without a subscription: %s", got.State)
	}
}
