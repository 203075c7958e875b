package verify

import (
	"bytes"
	"fmt"
	"runtime"
	"testing"
	"time"
	"unsafe"

	"github.com/google/go-cmp/cmp"
)

const (
	seType = "networking.istio.io/v1/ServiceEntry"
	weType = "networking.istio.io/v1/WorkloadEntry"
	weColl = "networking.istio.io/WorkloadEntry"
)

// at is a second of a recording.
func at(second int) time.Time { return time.Unix(int64(second), 0).UTC() }

func res(name, version string, revision uint64) Resource {
	return Resource{Name: name, Version: version, Sum: "sum-" + version, Content: "content-" + version, Revision: revision}
}

func withEndpoints(r Resource, endpoints ...Endpoint) Resource {
	r.Endpoints = endpoints
	return r
}

func truth(name string, revision uint64, absent bool) Event {
	return Event{Kind: Truth, Collection: weColl, Name: name, Revision: revision, Absent: absent}
}

// delta is the begin of a stream with one subscription.
func delta(stream int) []Event {
	return []Event{{Kind: Open, Stream: stream, Protocol: "delta"}, {Kind: Request, Stream: stream, Type: weType}}
}

func sotw(stream int, url string) []Event {
	return []Event{{Kind: Open, Stream: stream, Protocol: "sotw"}, {Kind: Request, Stream: stream, Type: url}}
}

func some(nonce string, set []Resource, removed ...string) Event {
	return Event{Kind: Response, Stream: 1, Type: weType, Nonce: nonce, Incremental: true, Resources: set, Removed: removed}
}

func full(stream int, url, nonce, version string, set ...Resource) Event {
	return Event{Kind: Response, Stream: stream, Type: url, Nonce: nonce, Version: version, Resources: set}
}

func ack(stream int, url, nonce string) Event {
	return Event{Kind: Request, Stream: stream, Type: url, Nonce: nonce}
}

// named is delta for some names.
func named(names ...string) []Event {
	return []Event{{Kind: Open, Stream: 1, Protocol: "delta"}, {Kind: Request, Stream: 1, Type: weType, Names: names}}
}

// ofView is delta for a view of some namespaces.
func ofView(namespaces ...string) []Event {
	return []Event{{Kind: Open, Stream: 1, Protocol: "delta", Namespaces: namespaces}, {Kind: Request, Stream: 1, Type: weType}}
}

func join(parts ...any) (events []Event) {
	for _, p := range parts {
		switch p := p.(type) {
		case Event:
			events = append(events, p)
		case []Event:
			events = append(events, p...)
		}
	}
	return events
}

// Each broken guarantee is found, by its number and at its event; what a
// correct server does is not.
func TestJudge(t *testing.T) {
	a1, a2 := res("dc1/a", "v1", 1), res("dc1/a", "v2", 2)
	type finding struct {
		Guarantee Guarantee
		Event     int
	}
	entry := func(version string, revision uint64) Resource { return res("dc1/web", version, revision) }
	for _, tt := range []struct {
		name   string
		events []Event
		want   []finding
	}{
		{"a change, a removal and a return", join(
			truth("dc1/a", 1, false), delta(1), some("1", []Resource{a1}), ack(1, weType, "1"),
			truth("dc1/a", 2, false), some("2", []Resource{a2}), ack(1, weType, "2"),
			truth("dc1/a", 3, true), some("3", nil, "dc1/a"), ack(1, weType, "3"),
			truth("dc1/a", 4, false), some("4", []Resource{res("dc1/a", "v4", 4)}), ack(1, weType, "4"), Event{Kind: Settled},
		), nil},
		{
			"a removal without cause", join(truth("dc1/a", 1, false), delta(1), some("1", []Resource{a1}), ack(1, weType, "1"), some("2", nil, "dc1/a")),
			[]finding{{NoRemovalWithoutCause, 6}},
		},
		{"a removal whose cause is older than what the sink has", join(
			truth("dc1/a", 1, false), truth("dc1/a", 2, true), truth("dc1/a", 3, false), delta(1), some("1", []Resource{res("dc1/a", "v3", 3)}), ack(1, weType, "1"), some("2", nil, "dc1/a"),
		), []finding{{NoRemovalWithoutCause, 8}}},
		{"a removal of what came again although it is gone", join(
			truth("dc1/a", 1, false), truth("dc1/a", 2, true), delta(1), some("1", []Resource{res("dc1/a", "v", 0)}), ack(1, weType, "1"), some("2", nil, "dc1/a"), ack(1, weType, "2"),
			some("3", []Resource{res("dc1/a", "v", 0)}), ack(1, weType, "3"), some("4", nil, "dc1/a"),
		), nil},
		{"a full response without a resource", join(
			Event{Kind: Truth, Collection: serviceEntry, Name: "dc1/web", Revision: 1}, Event{Kind: Truth, Collection: serviceEntry, Name: "dc1/api", Revision: 2},
			sotw(1, seType), full(1, seType, "1", "A", entry("v1", 1), res("dc1/api", "w1", 2)), ack(1, seType, "1"), full(1, seType, "2", "B", entry("v1", 1)),
		), []finding{{NoRemovalWithoutCause, 7}}},
		{"an endpoint that goes without cause", join(
			Event{Kind: Truth, Collection: serviceEntry, Name: "dc1/web", Revision: 1}, Event{Kind: Truth, Collection: weColl, Name: "dc1/a", Service: "dc1/web", Address: "10.0.0.1", Revision: 2},
			sotw(1, seType), full(1, seType, "1", "A", withEndpoints(entry("v1", 1), Endpoint{"10.0.0.1", 2})), ack(1, seType, "1"), full(1, seType, "2", "B", entry("v2", 1)),
		), []finding{{NoRemovalWithoutCause, 7}}},
		{
			"an older revision", join(truth("dc1/a", 1, false), truth("dc1/a", 2, false), delta(1), some("1", []Resource{a2}), ack(1, weType, "1"), some("2", []Resource{a1})),
			[]finding{{NoStaleOverwrite, 7}},
		},
		{
			"a name that no registry had", join(truth("dc1/a", 1, false), delta(1), some("1", []Resource{a1, res("dc1/b", "v9", 0)})),
			[]finding{{NothingInvented, 4}},
		},
		{
			"a revision that no registry had", join(truth("dc1/a", 1, false), delta(1), some("1", []Resource{res("dc1/a", "v9", 9)})),
			[]finding{{NothingInvented, 4}},
		},
		{
			"a sink that is behind", join(truth("dc1/a", 1, false), delta(1), some("1", []Resource{a1}), ack(1, weType, "1"), truth("dc1/a", 2, false), Event{Kind: Settled}),
			[]finding{{Convergence, 7}},
		},
		{"a return without a revision", join(
			truth("dc1/a", 1, false), delta(1), some("1", []Resource{res("dc1/a", "v1", 0)}), ack(1, weType, "1"), truth("dc1/a", 2, true), some("2", nil, "dc1/a"), ack(1, weType, "2"),
			truth("dc1/a", 3, false), some("3", []Resource{res("dc1/a", "v3", 0)}), ack(1, weType, "3"), Event{Kind: Settled},
		), nil},
		{"a sink that was never answered", join(delta(1), Event{Kind: Settled}), []finding{{Convergence, 3}}},
		{"two sinks that differ", join(
			sotw(1, seType), sotw(2, seType), full(1, seType, "1", "A", entry("v1", 0)), full(2, seType, "1", "B", entry("v2", 0)), Event{Kind: Settled},
		), []finding{{Convergence, 7}}},
		{"one version, two contents", join(
			sotw(1, seType), sotw(2, seType), full(1, seType, "1", "A", entry("v1", 0)), full(2, seType, "1", "B", Resource{Name: "dc1/web", Version: "v1", Sum: "other", Content: "other"}),
		), []finding{{EqualVersionsEqualBytes, 6}}},
		{"one content, two versions", join(
			sotw(1, seType), sotw(2, seType), full(1, seType, "1", "A", entry("v1", 0)), full(2, seType, "1", "B", Resource{Name: "dc1/web", Version: "v2", Sum: "other", Content: "content-v1"}),
		), []finding{{EqualVersionsEqualBytes, 6}}},
		{"one content of another instance", join(
			sotw(1, seType), full(1, seType, "1", "A", withEndpoints(res("dc1/web", "v1", 0), Endpoint{"10.0.0.1:80", 0})), ack(1, seType, "1"),
			full(1, seType, "2", "B", withEndpoints(Resource{Name: "dc1/web", Version: "v2", Sum: "other", Content: "content-v1"}, Endpoint{"10.0.0.1:80", 0})),
		), nil},
		{
			"one version of two collections", join(sotw(1, seType), sotw(2, seType), full(1, seType, "1", "A", entry("v1", 0)), full(2, seType, "1", "A", entry("v2", 0))),
			[]finding{{EqualVersionsEqualBytes, 6}},
		},
		{"an empty first response", join(truth("dc1/a", 1, false), Event{Kind: Start}, delta(1), some("1", nil)), []finding{{HoldBeforeFirstListing, 5}}},
		{"a first response without what came later", join(Event{Kind: Start}, truth("dc1/a", 1, false), sotw(1, weType), full(1, weType, "1", "A")), nil},
		{
			"two responses in flight", join(truth("dc1/a", 1, false), truth("dc1/a", 2, false), delta(1), some("1", []Resource{a1}), some("2", []Resource{a2})),
			[]finding{{OneInFlight, 6}},
		},
		{
			"a nonce that was used before", join(truth("dc1/a", 1, false), truth("dc1/a", 2, false), delta(1), some("1", []Resource{a1}), ack(1, weType, "1"), some("1", []Resource{a2})),
			[]finding{{Nonces, 7}},
		},
		{"a type that was not asked for", join(sotw(1, seType), full(1, weType, "1", "A")), []finding{{Nonces, 3}}},
		{"a name twice", join(truth("dc1/a", 1, false), delta(1), some("1", []Resource{a1, a1})), []finding{{WellFormed, 4}}},
		{"set and removed", join(truth("dc1/a", 1, false), truth("dc1/a", 2, true), delta(1), some("1", []Resource{a1}, "dc1/a")), []finding{{WellFormed, 5}}},
		{"a name without a namespace", join(delta(1), some("1", []Resource{res("a", "v1", 0)})), []finding{{WellFormed, 3}}},
		{"sent again as it is", join(truth("dc1/a", 1, false), delta(1), some("1", []Resource{a1}), ack(1, weType, "1"), some("2", []Resource{a1})), []finding{{NoNoise, 6}}},
		{"an empty change", join(delta(1), some("1", nil), ack(1, weType, "1"), some("2", nil)), []finding{{NoNoise, 5}}},
		{"a full response that repeats the one before", join(sotw(1, seType), full(1, seType, "1", "A"), ack(1, seType, "1"), full(1, seType, "2", "A")), []finding{{NoNoise, 5}}},
		{"what the sink said it has", join(
			Event{Kind: Open, Stream: 1, Protocol: "delta"}, Event{Kind: Request, Stream: 1, Type: weType, Versions: map[string]string{"dc1/a": "v1"}}, some("1", []Resource{a1}),
		), []finding{{OnlyWhatIsLacking, 3}}},
		{"a restarted bridge whose last good state is older than what the sink has", join(
			truth("dc1/a", 1, false), delta(1), some("1", []Resource{a1}), ack(1, weType, "1"), truth("dc1/a", 2, false), Event{Kind: Start, Since: at(0).Add(time.Second / 2)}, some("2", []Resource{a2}), Event{Kind: End, Stream: 1},
			Event{Kind: Open, Stream: 1, Protocol: "delta"}, Event{Kind: Request, Stream: 1, Type: weType, Versions: map[string]string{"dc1/a": "v2"}}, some("1", []Resource{a1}), ack(1, weType, "1"), some("2", []Resource{a2}),
		), nil},
		{"a resumed sink that loses what it reported", join(
			truth("dc1/a", 1, false), truth("dc1/a", 2, true), truth("dc1/a", 3, false), delta(1), some("1", []Resource{res("dc1/a", "v3", 3)}), Event{Kind: End, Stream: 1},
			Event{Kind: Open, Stream: 1, Protocol: "delta"}, Event{Kind: Request, Stream: 1, Type: weType, Versions: map[string]string{"dc1/a": "v3"}}, some("1", nil, "dc1/a"),
		), []finding{{NoRemovalWithoutCause, 10}}},
		{"names that are asked for, dropped and asked for again", join(
			truth("dc1/a", 1, false), truth("dc1/b", 2, false), named("dc1/a", "dc1/c"), some("1", []Resource{a1}, "dc1/c"), ack(1, weType, "1"),
			Event{Kind: Request, Stream: 1, Type: weType, Dropped: []string{"dc1/a"}}, truth("dc1/a", 3, false), Event{Kind: Settled},
			Event{Kind: Request, Stream: 1, Type: weType, Names: []string{"dc1/a"}}, some("2", []Resource{res("dc1/a", "v3", 3)}), ack(1, weType, "2"), Event{Kind: Settled},
		), nil},
		{"a name that was asked for, and does not come", join(
			truth("dc1/a", 1, false), truth("dc1/b", 2, false), named("dc1/a", "dc1/b"), some("1", []Resource{a1}), ack(1, weType, "1"), Event{Kind: Settled},
		), []finding{{Convergence, 7}}},
		{"a name that was not asked for", join(
			truth("dc1/a", 1, false), truth("dc1/b", 2, false), named("dc1/b"), some("1", []Resource{a1}),
		), []finding{{Nonces, 5}}},
		{"a name that is answered as missing", join(
			truth("dc1/a", 1, false), Event{Kind: Start}, named("dc1/a"), some("1", nil, "dc1/a"),
		), []finding{{HoldBeforeFirstListing, 5}}},
		{"a name that goes without cause", join(
			truth("dc1/a", 1, false), named("dc1/a"), some("1", []Resource{a1}), ack(1, weType, "1"), some("2", nil, "dc1/a"),
		), []finding{{NoRemovalWithoutCause, 6}}},
		{"a view without what it does not select", join(
			truth("dc1/a", 1, false), truth("dc2/b", 2, false), Event{Kind: Start}, ofView("dc1"), some("1", []Resource{a1}), ack(1, weType, "1"), Event{Kind: Settled},
		), nil},
		{"a view with what it does not select", join(
			truth("dc1/a", 1, false), truth("dc2/b", 2, false), ofView("dc1"), some("1", []Resource{a1, res("dc2/b", "w2", 2)}),
		), []finding{{NothingInvented, 5}}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var recording []byte
			for i := range tt.events {
				tt.events[i].Time = at(i)
				var err error
				if recording, err = tt.events[i].Append(recording); err != nil {
					t.Fatal(err)
				}
			}
			j := New()
			var got []finding
			if err := Read(bytes.NewReader(recording), func(n int, e *Event) error {
				for _, v := range j.Add(e) {
					t.Log(v)
					got = append(got, finding{v.Guarantee, v.Event})
				}
				return nil
			}); err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

// A judge of a stream that goes on for days keeps what it compares with, and
// not the responses that it came in.
func TestJudgeForgetsResponses(t *testing.T) {
	const names, responses = 2000, 200
	j := New()
	for _, e := range sotw(1, seType) {
		j.Add(&e)
	}
	heap := func() uint64 {
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return m.HeapAlloc
	}
	var before uint64
	for n := range responses {
		set := make([]Resource, names)
		for i := range set {
			set[i] = res(fmt.Sprintf("load/s%d", i), "1", 0)
		}
		set[n] = res(set[n].Name, "2", 0) // one differs each time
		e := full(1, seType, fmt.Sprint(n), fmt.Sprintf("v%d", n), set...)
		j.Add(&e)
		if n == 0 {
			before = heap()
		}
	}
	one := names * uint64(unsafe.Sizeof(Resource{}))
	if grown := heap() - before; int64(grown) > int64(20*one) { //nolint:gosec // far from the limits
		t.Errorf("the heap grew by %d bytes over %d responses of %d each", int64(grown), responses, one) //nolint:gosec // likewise
	}
	runtime.KeepAlive(j)
}
