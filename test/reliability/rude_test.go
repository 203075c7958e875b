package reliability

import (
	"context"
	"sync"
	"time"

	discovery "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	statuspb "google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/isthmus-mesh/isthmus/verify"
)

// manners are what a sink does with responses.
type manners int

const (
	silent   manners = iota // it answers nothing
	refusing                // it refuses everything
	restless                // it goes after the first response, and comes back
)

// beside makes changes while sinks without manners are connected, half of them
// of each protocol. They are judged like any other.
func (w *world) beside(m manners) {
	const sinks = 10
	ctx, cancel := context.WithCancel(w.t.Context())
	var group sync.WaitGroup
	for n := range sinks {
		group.Go(func() { // ends with cancel
			for ctx.Err() == nil {
				w.rude(ctx, m, n%2 == 0)
				wait := time.NewTimer(20 * time.Millisecond)
				select {
				case <-wait.C:
				case <-ctx.Done():
				}
			}
		})
	}
	w.churn(10)
	w.pass(*lasts)
	w.churn(10)
	cancel()
	group.Wait()
}

// rude is one stream of such a sink.
func (w *world) rude(ctx context.Context, m manners, delta bool) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	conn, err := grpc.NewClient(w.bridge.Views[0], grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(64<<20)))
	if err != nil {
		w.t.Error(err)
		return
	}
	defer conn.Close()
	w.mu.Lock()
	w.streams++
	id := firstExtra + w.streams
	w.mu.Unlock()
	open := func(protocol string) {
		w.add(&verify.Event{Kind: verify.Open, Stream: id, Protocol: protocol, Form: "rude"})
	}
	add := func(e *verify.Event) {
		e.Stream = id
		w.add(e)
	}
	defer add(&verify.Event{Kind: verify.End})
	client := discovery.NewAggregatedDiscoveryServiceClient(conn)
	var refusal *statuspb.Status
	if m == refusing {
		refusal = &statuspb.Status{Code: int32(codes.InvalidArgument), Message: "no"}
	}
	if delta {
		stream, err := client.DeltaAggregatedResources(ctx)
		if err != nil {
			return
		}
		open("delta")
		request := &discovery.DeltaDiscoveryRequest{TypeUrl: entryType}
		for {
			add(verify.DeltaRequest(request))
			if stream.Send(request) != nil {
				return
			}
			r, err := stream.Recv()
			for ; err == nil; r, err = stream.Recv() {
				if add(verify.Delta(r)); m != silent {
					break
				}
			}
			if err != nil || m == restless {
				return
			}
			request = &discovery.DeltaDiscoveryRequest{TypeUrl: entryType, ResponseNonce: r.GetNonce(), ErrorDetail: refusal}
		}
	}
	stream, err := client.StreamAggregatedResources(ctx)
	if err != nil {
		return
	}
	open("sotw")
	request := &discovery.DiscoveryRequest{TypeUrl: entryType}
	for {
		add(verify.SotWRequest(request))
		if stream.Send(request) != nil {
			return
		}
		r, err := stream.Recv()
		for ; err == nil; r, err = stream.Recv() {
			if add(verify.SotW(r)); m != silent {
				break
			}
		}
		if err != nil || m == restless {
			return
		}
		request = &discovery.DiscoveryRequest{TypeUrl: entryType, ResponseNonce: r.GetNonce(), ErrorDetail: refusal}
	}
}
