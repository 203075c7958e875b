package server

import (
	"context"

	"google.golang.org/grpc"

	"github.com/isthmus-mesh/isthmus/plugin/shard"
	"github.com/isthmus-mesh/isthmus/server/access"
	"github.com/isthmus-mesh/isthmus/server/config"
	"github.com/isthmus-mesh/isthmus/server/stream"
	"github.com/isthmus-mesh/isthmus/server/view"
)

// grantView is an interceptor that restricts a stream to the views of its
// listener and of the rule that lets it in.
func grantView(srv any, ss grpc.ServerStream, _ *grpc.StreamServerInfo, next grpc.StreamHandler) error {
	g := access.GrantOf(ss.Context())
	return next(srv, &viewing{ss, stream.WithGrant(stream.WithIdentity(ss.Context(), g.Identity), func() ([]view.Filter, <-chan struct{}) {
		views, changed := g.Views()
		return filtersOf(views), changed
	})})
}

type viewing struct {
	grpc.ServerStream
	ctx context.Context //nolint:containedctx // that of the stream
}

// Context implements grpc.ServerStream.
func (v *viewing) Context() context.Context { return v.ctx }

func filtersOf(views []config.View) (filters []view.Filter) {
	for _, v := range views {
		filters = append(filters, view.Filter{
			Registries: v.Registries, Namespaces: v.Namespaces, Hosts: v.Hosts, Collections: v.Collections, Shards: v.Shards(),
		})
	}
	return filters
}

// filterOfShards returns the filter of a process that has some shards.
func filterOfShards(s shard.Set) []view.Filter {
	if s.All() {
		return nil
	}
	return []view.Filter{{Shards: s}}
}

// warnOfGaps warns of shards that no listener serves.
func (s *Server) warnOfGaps(cfg *config.Config) {
	for _, gap := range cfg.Gaps(s.options.Shards) {
		s.log.Warn("the views of the listeners leave a gap", "err", gap)
	}
}
