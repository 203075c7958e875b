package server

import (
	"context"
	"net"

	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"

	mcpserver "github.com/isthmus-mesh/isthmus/server/mcp"
	"github.com/isthmus-mesh/isthmus/server/xds"
)

// serveMCP serves the legacy protocol on its own port.
func (s *Server) serveMCP(ctx context.Context) error {
	server := grpc.NewServer(xds.ServerOptions()...)
	s.mcp.Register(server)
	return serveGRPC(ctx, server, []net.Listener{s.mcpListener}, "mcp", s.mcp.Shutdown)
}

// dialSinks serves the sinks of the configuration in reverse mode, each until ctx ends.
func (s *Server) dialSinks(ctx context.Context, group *errgroup.Group) {
	for _, c := range s.cfg.Sinks {
		sink := mcpserver.Sink{Address: c.Address, Metadata: c.Metadata}
		if t := c.TLS; t.Enabled {
			sink.TLS = &mcpserver.TLS{CA: t.CAFile, Certificate: t.CertFile, Key: t.KeyFile, ServerName: t.ServerName}
		}
		group.Go(func() error {
			err := s.mcp.Dial(ctx, sink)
			if ctx.Err() != nil {
				return nil //nolint:nilerr // the end of ctx is why it ended
			}
			return err
		})
	}
}
