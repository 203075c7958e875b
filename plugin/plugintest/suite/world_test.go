package suite

import (
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/timestamppb"
	mcp "istio.io/api/mcp/v1alpha1"

	"github.com/isthmus-mesh/isthmus/plugin/collection"
	pluginv1 "github.com/isthmus-mesh/isthmus/plugin/proto/isthmus/plugin/v1"
)

// Nothing that a plugin sends makes the checks panic.
func FuzzWorld(f *testing.F) {
	res, err := proto.Marshal(&mcp.Resource{
		Metadata: &mcp.Metadata{Name: "ns/web", CreateTime: timestamppb.New(time.Unix(1e9, 0))},
		Body:     &anypb.Any{TypeUrl: "type.googleapis.com/istio.networking.v1alpha3.ServiceEntry"},
	})
	if err != nil {
		f.Fatal(err)
	}
	for _, m := range []*pluginv1.WatchResponse{
		{},
		{Upserts: []*pluginv1.Upsert{{Resource: res}, {Resource: res, Service: "ns/web"}, nil}, Synced: true},
		{Removals: []*pluginv1.Removal{{Collection: collection.ServiceEntry, Name: "ns/web"}}, Problems: []*pluginv1.Problem{{Id: "a", Reason: "b"}}},
		{Metrics: []*pluginv1.Metric{{Name: "asked_total", Kind: pluginv1.MetricKind_METRIC_KIND_COUNTER, Value: 1}, {Name: "x y"}, nil}},
		{Kept: []*pluginv1.Kept{{Collection: collection.ServiceEntry, Name: "ns/web"}, {}, nil}, Relisted: []string{"ns/web"}},
	} {
		raw, err := proto.Marshal(m)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(raw)
	}
	f.Fuzz(func(t *testing.T, raw []byte) {
		var m pluginv1.WatchResponse
		if proto.Unmarshal(raw, &m) != nil {
			return
		}
		w := newWorld(collection.All())
		first := w.apply(&m)
		if again := w.apply(&m); (first == nil) != (again == nil) && !m.GetSynced() && len(m.GetMetrics()) == 0 { // counters never fall
			t.Errorf("first %v, then %v", first, again)
		}
	})
}

// A message names a resource once.
func TestWorldNamesOnce(t *testing.T) {
	w := newWorld([]string{collection.ServiceEntry})
	web := &pluginv1.Removal{Collection: collection.ServiceEntry, Name: "ns/web"}
	if err := w.apply(&pluginv1.WatchResponse{Removals: []*pluginv1.Removal{web}}); err != nil {
		t.Error(err)
	}
	for _, m := range []*pluginv1.WatchResponse{
		{Removals: []*pluginv1.Removal{web, web}},
		{Removals: []*pluginv1.Removal{web}, Kept: []*pluginv1.Kept{{Collection: web.GetCollection(), Name: web.GetName()}}},
	} {
		if err := w.apply(m); err == nil || !strings.Contains(err.Error(), `"ns/web" is in one message twice`) {
			t.Errorf("%v: %v", m, err)
		}
	}
}

// A world knows what a stream says to keep, until it is sent or removed.
func TestWorldKeeps(t *testing.T) {
	w := newWorld([]string{collection.ServiceEntry})
	kept := &pluginv1.WatchResponse{Kept: []*pluginv1.Kept{{Collection: collection.ServiceEntry, Name: "ns/web"}, {Name: "ns/any"}, {}}}
	if err := w.apply(kept); err != nil || !w.Keeps(collection.ServiceEntry, "ns/web") || w.Keeps(collection.ServiceEntry, "ns/any") {
		t.Errorf("%v, kept %v", err, w.kept)
	}
	gone := &pluginv1.WatchResponse{Removals: []*pluginv1.Removal{{Collection: collection.ServiceEntry, Name: "ns/web"}}}
	if err := w.apply(gone); err != nil || w.Keeps(collection.ServiceEntry, "ns/web") {
		t.Errorf("%v, kept %v", err, w.kept)
	}
}

// A world knows the adapter's own metrics, and finds fault with those that a
// bridge would ignore.
func TestWorldMetrics(t *testing.T) {
	const counter, gauge = pluginv1.MetricKind_METRIC_KIND_COUNTER, pluginv1.MetricKind_METRIC_KIND_GAUGE
	w := newWorld(nil)
	for _, tt := range []struct {
		m  *pluginv1.Metric
		ok bool
	}{
		{&pluginv1.Metric{Name: "asked_total", Kind: counter, Value: 2}, true},
		{&pluginv1.Metric{Name: "asked_total", Kind: counter, Value: 1}, false},
		{&pluginv1.Metric{Name: "held", Kind: gauge, Value: -1}, true},
		{&pluginv1.Metric{Name: "held", Value: 1}, false},
		{&pluginv1.Metric{Name: "held", Kind: counter, Value: 1}, false},
		{&pluginv1.Metric{Name: "held_total", Kind: gauge, Value: 1}, false},
		{&pluginv1.Metric{Name: "Held", Kind: gauge, Value: 1}, false},
	} {
		if err := w.apply(&pluginv1.WatchResponse{Metrics: []*pluginv1.Metric{tt.m}}); (err == nil) != tt.ok {
			t.Errorf("%v: %v", tt.m, err)
		}
	}
	asked, _ := w.Metric("asked_total")
	held, ok := w.Metric("held")
	if asked != 2 || held != -1 || !ok {
		t.Errorf("asked %v, held %v", asked, held)
	}
}
