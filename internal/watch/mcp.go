package watch

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"net"
	"slices"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	mcp "istio.io/api/mcp/v1alpha1"

	mcpv1 "github.com/isthmus-mesh/isthmus/server/mcp/proto/isthmus/mcp/v1"
	"github.com/isthmus-mesh/isthmus/verify"
)

// DefaultCollections are the collections requested over the legacy protocol if
// [Options] names none.
var DefaultCollections = []string{"istio/networking/v1alpha3/serviceentries"}

// Names of the legacy protocol on the wire.
const (
	sourceService = "istio.mcp.v1alpha1.ResourceSource"
	sinkService   = "istio.mcp.v1alpha1.ResourceSink"
	establish     = "EstablishResourceStream"
)

// legacyStream is either end of a stream of the legacy protocol.
type legacyStream interface {
	SendMsg(m any) error
	RecvMsg(m any) error
}

// mcp dials a source and prints its responses until the stream ends.
func (wa *watcher) mcp(ctx context.Context, conn *grpc.ClientConn) error {
	stream, err := conn.NewStream(ctx, &grpc.StreamDesc{StreamName: establish, ServerStreams: true, ClientStreams: true}, "/"+sourceService+"/"+establish)
	if err != nil {
		return err
	}
	return wa.legacy(stream)
}

// legacy runs the sink's side of a stream.
func (wa *watcher) legacy(stream legacyStream) (err error) {
	end, err := wa.recordOpen()
	if err != nil {
		return err
	}
	defer func() { err = end(err) }()
	send := func(req *mcpv1.RequestResources) error {
		if err := wa.record(&verify.Event{
			Kind: verify.Request, Type: req.GetCollection(), Nonce: req.GetResponseNonce(), Refused: req.GetErrorDetail().GetMessage(), Versions: req.GetInitialResourceVersions(),
		}); err != nil {
			return err
		}
		err := stream.SendMsg(req)
		for errors.Is(err, io.EOF) { // only receiving reports why the stream ended
			if e := stream.RecvMsg(new(mcpv1.Resources)); e != nil {
				return e
			}
		}
		return err
	}
	node := &mcpv1.SinkNode{}
	if wa.o.SinkID != nil {
		node.Id = *wa.o.SinkID
	} else {
		node.Id = wa.node().GetId()
	}
	for _, name := range wa.o.Types {
		req := &mcpv1.RequestResources{SinkNode: node, Collection: name, Incremental: wa.o.Incremental}
		if wa.o.Incremental {
			req.InitialResourceVersions = maps.Clone(wa.have[name])
		}
		if err := send(req); err != nil {
			return err
		}
	}
	if begun, ok := stream.(grpc.ClientStream); ok { // not in reverse mode
		wa.tellHeld(begun)
	}
	for {
		r := new(mcpv1.Resources)
		if err := stream.RecvMsg(r); err != nil {
			return err
		}
		now := time.Now()
		req := &mcpv1.RequestResources{SinkNode: node, Collection: r.GetCollection(), ResponseNonce: r.GetNonce()}
		if wa.have[r.GetCollection()] == nil { // for example the trigger of reverse mode
			req.ErrorDetail = &mcpv1.Status{Code: int32(codes.Unimplemented), Message: "unsupported collection " + r.GetCollection()}
		} else {
			wa.pushes++
			if err := wa.record(verify.Legacy(r.GetCollection(), r.GetNonce(), r.GetSystemVersionInfo(), r.GetIncremental(), r.GetResources(), r.GetRemovedResources())); err != nil {
				return err
			}
			switch err := wa.resources(now, r); {
			case err == nil:
				req.Incremental = wa.o.Incremental
			default:
				refusal, err := wa.refusal(r.GetCollection(), err)
				if err != nil {
					return err
				}
				req.ErrorDetail = &mcpv1.Status{Code: refusal.GetCode(), Message: refusal.GetMessage()}
			}
		}
		if err := send(req); err != nil {
			return err
		}
	}
}

// resources handles a response. One that does not decode changes nothing.
func (wa *watcher) resources(now time.Time, r *mcpv1.Resources) error {
	had := wa.have[r.GetCollection()]
	have := make(map[string]string, len(r.GetResources()))
	if r.GetIncremental() {
		maps.Copy(have, had)
	}
	var changed []change
	for i, raw := range r.GetResources() {
		res := &mcp.Resource{}
		if err := proto.Unmarshal(raw, res); err != nil {
			return fmt.Errorf("resource %d: %w", i, err)
		}
		c := change{name: res.GetMetadata().GetName(), version: res.GetMetadata().GetVersion(), key: res.GetMetadata().GetVersion(), res: res}
		if c.name == "" || res.GetBody() == nil {
			return fmt.Errorf("resource %d (%q): a Pilot would panic over it: it has no metadata or no body", i, c.name)
		}
		if version, known := had[c.name]; !known || version != c.key {
			changed = append(changed, c)
		}
		have[c.name] = c.key
	}
	for _, name := range r.GetRemovedResources() {
		delete(have, name)
	}
	var removed []string
	for name := range had {
		if _, still := have[name]; !still {
			removed = append(removed, name)
		}
	}
	slices.Sort(removed)
	slices.SortFunc(changed, func(a, b change) int { return strings.Compare(a.name, b.name) })
	wa.have[r.GetCollection()] = have
	return wa.print(now, r.GetCollection(), changed, removed)
}

// listener is a sink that accepts calls, one source at a time.
type listener struct {
	wa   *watcher
	busy sync.Mutex
	fail chan error // receives the error of writing, which ends the watch
}

// dialled is the handler type of the gRPC service.
type dialled interface {
	establish(stream grpc.ServerStream) error
}

func (l *listener) establish(stream grpc.ServerStream) error {
	if !l.busy.TryLock() {
		return status.Error(codes.Unavailable, "another source is connected")
	}
	defer l.busy.Unlock()
	if md, ok := metadata.FromIncomingContext(stream.Context()); ok {
		l.wa.printHeld(md)
	}
	err := l.wa.legacy(stream)
	if e, ok := errors.AsType[*writeError](err); ok {
		select {
		case l.fail <- e:
		default:
		}
	}
	if errors.Is(err, io.EOF) {
		return nil
	}
	fmt.Fprintf(l.wa.o.Stderr, "the source's stream ended: %v; waiting for another\n", err)
	return err
}

// listen accepts calls (reverse mode) until ctx ends.
func (wa *watcher) listen(ctx context.Context) error {
	socket, err := (&net.ListenConfig{}).Listen(ctx, "tcp", wa.o.Listen)
	if err != nil {
		return err
	}
	fmt.Fprintf(wa.o.Stderr, "listening at %s\n", socket.Addr())
	server := grpc.NewServer(grpc.MaxRecvMsgSize(math.MaxInt32), grpc.InitialWindowSize(8<<20), grpc.InitialConnWindowSize(8<<20),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: 5 * time.Second, PermitWithoutStream: true}))
	l := &listener{wa: wa, fail: make(chan error, 1)}
	server.RegisterService(&grpc.ServiceDesc{
		ServiceName: sinkService,
		HandlerType: (*dialled)(nil),
		Streams: []grpc.StreamDesc{{
			StreamName: establish, ServerStreams: true, ClientStreams: true,
			Handler: func(srv any, stream grpc.ServerStream) error { return srv.(dialled).establish(stream) },
		}},
	}, l)
	served := make(chan error, 1)
	// Owned by listen; ends with Stop below.
	go func() { served <- server.Serve(socket) }()
	select {
	case err = <-served:
		return err
	case err = <-l.fail:
	case <-ctx.Done():
	}
	server.Stop()
	return errors.Join(err, <-served)
}
