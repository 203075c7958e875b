package server

import (
	"context"
	"errors"
	"reflect"

	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"

	"github.com/isthmus-mesh/isthmus/server/config"
	mcpserver "github.com/isthmus-mesh/isthmus/server/mcp"
	"github.com/isthmus-mesh/isthmus/server/stream"
)

// dial is a configured sink that is served in reverse mode.
type dial struct {
	sink  config.Sink
	end   context.CancelFunc
	ended chan struct{} // closed when the stream has ended
}

// dialSinks serves the sinks of a configuration in reverse mode, each until ctx
// ends. Sinks that are already served continue; those that are no longer
// configured end.
func (s *Server) dialSinks(ctx context.Context, group *errgroup.Group, sinks []config.Sink) {
	s.mu.Lock()
	defer s.mu.Unlock()
	before := s.dials
	s.dials = nil
next:
	for _, c := range sinks {
		for i, d := range before {
			if d != nil && reflect.DeepEqual(d.sink, c) {
				s.dials, before[i] = append(s.dials, d), nil
				continue next
			}
		}
		own, end := context.WithCancel(ctx)
		d := &dial{c, end, make(chan struct{})}
		s.dials = append(s.dials, d)
		group.Go(func() error {
			defer close(d.ended)
			defer end()
			return s.dialSink(own, c)
		})
	}
	for _, d := range before {
		if d != nil {
			d.end()
		}
	}
}

func (s *Server) dialSink(ctx context.Context, c config.Sink) error {
	sink := mcpserver.Sink{Address: c.Address, Metadata: c.Metadata, Headers: s.waitingHeaders}
	if t := c.TLS; t.Enabled {
		sink.TLS = &mcpserver.TLS{CA: t.CAFile, Certificate: t.CertFile, Key: t.KeyFile, ServerName: t.ServerName}
	}
	err := s.mcp.Dial(ctx, sink, grpc.WithStreamInterceptor(s.crowd.dialed))
	if ctx.Err() != nil || errors.Is(err, stream.ErrShutdown) {
		return nil //nolint:nilerr // the end of ctx or of the bridge is why it ended
	}
	return err
}
