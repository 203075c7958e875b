package supervisor_test

import (
	"context"
	"errors"
	"log/slog"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"

	pluginv1 "github.com/isthmus-mesh/isthmus/plugin/proto/isthmus/plugin/v1"
	"github.com/isthmus-mesh/isthmus/server/supervisor"
)

// endless is a plugin that always has a message: a listing, then changes.
type endless struct {
	pluginv1.AdapterServiceClient
	grpc.ClientStream
	ctx    context.Context
	listed int // messages of the listing; negative: it never ends
	n      int
}

func (e *endless) Describe(context.Context, *pluginv1.DescribeRequest, ...grpc.CallOption) (*pluginv1.DescribeResponse, error) {
	return &pluginv1.DescribeResponse{Name: "endless", Version: "1", ConfigSchema: []byte("{}"), Collections: []string{"networking.istio.io/ServiceEntry"}}, nil
}

func (e *endless) Configure(context.Context, *pluginv1.ConfigureRequest, ...grpc.CallOption) (*pluginv1.ConfigureResponse, error) {
	return &pluginv1.ConfigureResponse{}, nil
}

func (e *endless) Watch(ctx context.Context, _ *pluginv1.WatchRequest, _ ...grpc.CallOption) (grpc.ServerStreamingClient[pluginv1.WatchResponse], error) {
	e.ctx = ctx
	return e, nil
}

func (e *endless) Recv() (*pluginv1.WatchResponse, error) {
	if e.ctx.Err() != nil {
		return nil, errors.New("ended")
	}
	e.n++
	return &pluginv1.WatchResponse{Upserts: make([]*pluginv1.Upsert, 100), Synced: e.n == e.listed}, nil
}

// busy is a sink that is busy for 10 ms with each message.
type busy struct{ messages int }

func (b *busy) Begin(supervisor.Description) {}
func (b *busy) Down(error)                   {}
func (b *busy) Apply(*pluginv1.WatchResponse) error {
	time.Sleep(10 * time.Millisecond)
	b.messages++
	return nil
}

// A registry that changes without end occupies the bridge for a third of the
// time. Its listing does so for all of it, unless it lists more than it may.
func TestPace(t *testing.T) {
	for name, tt := range map[string]struct {
		listed, pace, want int
	}{
		"changes": {1, 0, 100}, "no pace": {1, -1, 300}, "a listing": {100, 0, 166}, "a listing without end": {-1, 0, 166},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				host, err := supervisor.NewHost("", slog.New(slog.DiscardHandler))
				if err != nil {
					t.Fatal(err)
				}
				plugin, sink := &endless{listed: tt.listed}, &busy{}
				s, err := supervisor.New(host, supervisor.Spec{
					Registry: "r", Resources: 10_000, Pace: tt.pace,
					Open: func(context.Context) (pluginv1.AdapterServiceClient, error) { return plugin, nil },
				}, sink, slog.New(slog.DiscardHandler), nil)
				if err != nil {
					t.Fatal(err)
				}
				ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
				defer cancel()
				if err := s.Run(ctx); err != nil {
					t.Error(err)
				}
				if err := host.Close(); err != nil {
					t.Error(err)
				}
				if d := sink.messages - tt.want; d < -2 || d > 2 {
					t.Errorf("%d messages in 3 s, want %d", sink.messages, tt.want)
				}
			})
		})
	}
}
