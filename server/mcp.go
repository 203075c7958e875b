package server

import (
	"context"

	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"

	"github.com/isthmus-mesh/isthmus/server/admin"
	mcpserver "github.com/isthmus-mesh/isthmus/server/mcp"
	"github.com/isthmus-mesh/isthmus/server/xds"
)

// serveMCP serves the legacy protocol on its own port.
func (s *Server) serveMCP(ctx context.Context) error {
	server := grpc.NewServer(xds.ServerOptions()...)
	s.mcp.Register(server)
	return serveGRPC(ctx, server, s.mcpListener, "mcp", s.mcp.Shutdown)
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

// mcpSinks shows the streams of the legacy protocol in the admin pages.
func (a source) mcpSinks() []admin.Sink {
	var out []admin.Sink
	for _, st := range a.s.mcp.Status() {
		sink := admin.Sink{
			Address: st.Address, Node: st.Node, Protocol: "mcp", Profile: st.Profile, Shape: st.Shape, Connected: st.Connected,
			StaleNonces: st.StaleNonces, Subscriptions: []admin.Subscription{},
		}
		if st.Reverse {
			sink.Protocol = "mcp reverse"
		}
		for _, sub := range st.Subscriptions {
			sink.Subscriptions = append(sink.Subscriptions, admin.Subscription{
				TypeURL: sub.Name, Collection: sub.Collection, State: sub.State, Sent: sub.Sent,
				SentVersion: sub.SentVersion, SentRevision: uint64(sub.SentRevision),
				AckedVersion: sub.AckedVersion, AckedRevision: uint64(sub.AckedRevision),
				Lag: sub.Lag, Nacks: sub.Nacks, LastNack: sub.LastNack, Resources: sub.Resources, Bytes: sub.Bytes,
				Incremental: sub.Incremental, Oversize: sub.Oversize, Waiting: sub.Waiting,
			})
		}
		out = append(out, sink)
	}
	return out
}
