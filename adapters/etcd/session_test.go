package etcd

import (
	"context"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/isthmus-mesh/isthmus/internal/testenv"
	"github.com/isthmus-mesh/isthmus/plugin"
	"github.com/isthmus-mesh/isthmus/plugin/plugintest"
)

// fake is a server that speaks etcd's protocol and answers as a test wants.
type fake struct {
	pb.UnimplementedKVServer
	pb.UnimplementedWatchServer

	mu sync.Mutex // guards everything below
	// keys are the keys of the listing, of service web; revision and cluster
	// are those of all answers.
	keys     []string
	revision int64
	cluster  uint64
	// most is how many keys fit into a page; 0 is any number.
	most int64
	// first is the first message of a watch; nil is the right one.
	first *pb.WatchResponse
	// then are sent to the open watch.
	then chan *pb.WatchResponse
	// end ends the open watch.
	end chan error
}

// header is the header of an answer.
func (f *fake) header() *pb.ResponseHeader {
	return &pb.ResponseHeader{ClusterId: f.cluster, Revision: f.revision}
}

// Range implements pb.KVServer.
func (f *fake) Range(_ context.Context, req *pb.RangeRequest) (*pb.RangeResponse, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.most > 0 && req.Limit > f.most {
		return nil, status.Error(codes.ResourceExhausted, "grpc: received message larger than max")
	}
	res := &pb.RangeResponse{Header: f.header()}
	for _, key := range f.keys {
		if key < string(req.Key) && !strings.HasPrefix(key, "!") {
			continue
		}
		if int64(len(res.Kvs)) == req.Limit {
			res.More = true
			break
		}
		res.Kvs = append(res.Kvs, &mvccpb.KeyValue{Key: []byte(strings.TrimPrefix(key, "!")), Value: []byte(`{"address":"10.0.0.1","port":80}`)})
	}
	return res, nil
}

// Watch implements pb.WatchServer.
func (f *fake) Watch(stream grpc.BidiStreamingServer[pb.WatchRequest, pb.WatchResponse]) error {
	if _, err := stream.Recv(); err != nil {
		return err
	}
	f.mu.Lock()
	first := f.first
	if first == nil {
		first = &pb.WatchResponse{Header: f.header(), Created: true}
	}
	f.mu.Unlock()
	if err := stream.Send(first); err != nil {
		return err
	}
	for {
		select {
		case m := <-f.then:
			if err := stream.Send(m); err != nil {
				return err
			}
		case err := <-f.end:
			return err
		case <-stream.Context().Done():
			return stream.Context().Err()
		}
	}
}

// set changes what the fake answers.
func (f *fake) set(change func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	change()
}

// serveFake starts a fake with three instances of web, and returns an adapter
// that is to follow it.
func serveFake(t *testing.T) (*fake, plugin.Adapter) {
	t.Helper()
	f := &fake{
		keys:     []string{"/services/web/1", "/services/web/2", "/services/web/3"},
		revision: 10, cluster: 1, then: make(chan *pb.WatchResponse), end: make(chan error),
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	server := grpc.NewServer()
	pb.RegisterKVServer(server, f)
	pb.RegisterWatchServer(server, f)
	served := make(chan error, 1)
	go func() { served <- server.Serve(l) }()
	t.Cleanup(func() {
		server.Stop()
		<-served
	})
	c := DefaultConfig
	// The fake sends no progress.
	c.Endpoints, c.Timeout, c.RemoveGrace = []string{"http://" + l.Addr().String()}, plugin.Duration(10*time.Minute), plugin.Duration(time.Hour)
	a, err := New(c, plugin.Env{})
	if err != nil {
		t.Fatal(err)
	}
	return f, a
}

// startFake is serveFake, and runs the adapter, which has seen the instances.
func startFake(t *testing.T) (*fake, *plugintest.Catalog) {
	t.Helper()
	f, a := serveFake(t)
	catalog := plugintest.NewCatalog()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- a.Run(ctx, catalog) }()
	t.Cleanup(func() {
		cancel()
		<-done
	})
	await(t, catalog, "the first listing", "1 2 3", "")
	return f, catalog
}

// await waits until web has these instances, and the catalog is told a reason
// with text in it; "" is for followed.
func await(t *testing.T, c *plugintest.Catalog, what, ids, text string) {
	t.Helper()
	c.Await(t, testenv.Patience, what, func(h *plugintest.Held) bool {
		return h.IDs("web") == ids && (h.Degraded == "") == (text == "") && strings.Contains(h.Degraded, text)
	})
}

// TestNoGoodAnswer shows that an answer that cannot be right removes nothing,
// is told, and that the end of it is noticed.
func TestNoGoodAnswer(t *testing.T) {
	for _, c := range []struct {
		name, want string
		// wrong makes answers wrong; what it sends goes to the open watch,
		// which ends by itself with nil.
		wrong func(f *fake) *pb.WatchResponse
	}{
		{"a key that was not asked for", "was not asked for", func(f *fake) *pb.WatchResponse { f.keys = []string{"!/other/web/1"}; return nil }},
		{"keys that go back", "was not asked for", func(f *fake) *pb.WatchResponse {
			f.keys = []string{"/services/web/1", "!/services/web/0"}
			return nil
		}},
		{"a first message that is none", "none of a new watch", func(f *fake) *pb.WatchResponse { f.first = &pb.WatchResponse{Header: f.header()}; return nil }},
		{"a watch that is refused", "why not", func(f *fake) *pb.WatchResponse {
			f.first = &pb.WatchResponse{Header: f.header(), Created: true, Canceled: true, CancelReason: "why not"}
			return nil
		}},
		{"a watch of another cluster", "a server of cluster 2 answers", func(f *fake) *pb.WatchResponse {
			f.first = &pb.WatchResponse{Header: &pb.ResponseHeader{ClusterId: 2, Revision: 10}, Created: true}
			return nil
		}},
		{"a watch that is behind", "went back", func(f *fake) *pb.WatchResponse {
			f.first = &pb.WatchResponse{Header: &pb.ResponseHeader{ClusterId: 1, Revision: 9}, Created: true}
			return nil
		}},
		{"progress that goes back", "", func(*fake) *pb.WatchResponse {
			return &pb.WatchResponse{Header: &pb.ResponseHeader{ClusterId: 1, Revision: 9}}
		}},
		{"an end with a reason", "", func(f *fake) *pb.WatchResponse {
			return &pb.WatchResponse{Header: f.header(), Canceled: true, CancelReason: "why not"}
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			f, catalog := startFake(t)
			var m *pb.WatchResponse
			f.set(func() { m = c.wrong(f) })
			if m != nil {
				f.then <- m
			} else {
				f.end <- status.Error(codes.Unavailable, "on purpose")
			}
			if c.want != "" {
				await(t, catalog, "wrong", "1 2 3", c.want)
			} else {
				catalog.Await(t, testenv.Patience, "wrong", func(h *plugintest.Held) bool { return len(h.Reasons) > 0 })
			}
			f.set(func() {
				f.first, f.keys, f.revision = nil, []string{"/services/web/1", "/services/web/2", "/services/web/3", "/services/web/4"}, 11
			})
			if c.want == "" {
				f.end <- status.Error(codes.Unavailable, "on purpose")
			}
			await(t, catalog, "right again", "1 2 3 4", "")
			catalog.Look(func(h *plugintest.Held) {
				if h.Least["web"] != 3 || h.Removes != 0 {
					t.Errorf("least %d, removed %d", h.Least["web"], h.Removes)
				}
			})
		})
	}
}

// TestCompactedWatch shows that a watch that ends for compaction is an outage
// only if what is listed then is less than min_share.
func TestCompactedWatch(t *testing.T) {
	f, catalog := startFake(t)
	f.set(func() { f.keys, f.revision = f.keys[:2], 20 })
	f.then <- &pb.WatchResponse{Header: f.header(), Canceled: true, CompactRevision: 19}
	await(t, catalog, "listed again", "1 2", "")
	catalog.Look(func(h *plugintest.Held) {
		if len(h.Reasons) != 0 {
			t.Errorf("degraded: %q", h.Reasons)
		}
	})
	f.set(func() { f.keys, f.revision = append(f.keys, "/services/web/3", "/services/web/4"), 30 })
	f.then <- &pb.WatchResponse{Header: f.header(), CompactRevision: 29}
	await(t, catalog, "listed again", "1 2 3 4", "")
	f.set(func() { f.keys, f.revision = f.keys[:1], 40 })
	f.then <- &pb.WatchResponse{Header: f.header(), CompactRevision: 39}
	await(t, catalog, "a sudden loss", "1 2 3 4", "remove_grace")
}

// TestAnotherEtcd shows that what another cluster lacks is kept, and why.
func TestAnotherEtcd(t *testing.T) {
	f, catalog := startFake(t)
	f.set(func() { f.cluster, f.revision, f.keys = 2, 100, f.keys[:2] })
	f.end <- status.Error(codes.Unavailable, "on purpose")
	await(t, catalog, "another cluster", "1 2 3", "another cluster answers (2, was 1)")
}

// TestLargePages shows that a page that is too large is asked for in smaller
// ones.
func TestLargePages(t *testing.T) {
	f, catalog := startFake(t)
	f.set(func() {
		f.most, f.revision = 1, 11
		f.keys = append(f.keys, "/services/web/4")
	})
	f.end <- status.Error(codes.Unavailable, "on purpose")
	await(t, catalog, "in small pages", "1 2 3 4", "")
}

// endsAtSync ends the adapter at the end of its first listing.
type endsAtSync struct {
	*plugintest.Catalog
	end context.CancelFunc
}

// Synced implements plugin.Catalog.
func (e endsAtSync) Synced() { e.end() }

// TestEndsWhileOpening shows that an adapter that ends while it opens a session
// leaves no connection: goleak would find its goroutines.
func TestEndsWhileOpening(t *testing.T) {
	_, a := serveFake(t)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	if err := a.Run(ctx, endsAtSync{plugintest.NewCatalog(), cancel}); err != nil {
		t.Error(err)
	}
}
