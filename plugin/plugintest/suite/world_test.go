package suite

import (
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
		if again := w.apply(&m); (first == nil) != (again == nil) && !m.GetSynced() {
			t.Errorf("first %v, then %v", first, again)
		}
	})
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
