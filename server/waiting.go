package server

import (
	"fmt"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"

	"github.com/isthmus-mesh/isthmus/plugin/collection"
	"github.com/isthmus-mesh/isthmus/server/config"
	"github.com/isthmus-mesh/isthmus/server/owns"
	"github.com/isthmus-mesh/isthmus/server/state"
)

// waitingHeader is sent at the start of each stream while collections wait,
// with one value for each collection and registry: "COLLECTION REGISTRY SINCE",
// the time in RFC 3339. istiod ignores it; `isthmus watch` shows it.
const waitingHeader = "isthmus-held"

// tellWaiting sends waitingHeader.
func (s *Server) tellWaiting(srv any, stream grpc.ServerStream, _ *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
	if md := s.waitingHeaders(); len(md) > 0 {
		if err := stream.SendHeader(md); err != nil {
			return err
		}
	}
	return handler(srv, stream)
}

// waitingHeaders returns waitingHeader, or nothing while no collection waits.
func (s *Server) waitingHeaders() metadata.MD {
	md := metadata.MD{}
	for _, h := range s.db.Waits() {
		for _, coll := range h.Collections {
			md.Append(waitingHeader, coll+" "+h.Registry+" "+h.Since.UTC().Format(time.RFC3339))
		}
	}
	return md
}

// registryOptions returns the options of each registry in the state.
func registryOptions(cfg *config.Config) map[string]state.RegistryOptions {
	registries := cfg.Registries
	out := make(map[string]state.RegistryOptions, len(registries))
	for i := range registries {
		r := &registries[i]
		p := &r.Protect
		out[r.Name] = state.RegistryOptions{
			Owns:     owns.New(r, cfg.Mesh),
			Optional: !r.Required, SyncTimeout: time.Duration(r.SyncTimeout),
			Protect: state.Protect{
				MinShare: p.MinShare, MinServices: p.MinServices, Hold: time.Duration(p.Hold),
				Service: state.ProtectService{MinShare: p.Service.MinShare, MinEndpoints: p.Service.MinEndpoints},
			},
		}
	}
	return out
}

// waitingWords describes which collections wait for a registry, and since when.
func waitingWords(st state.Status) string {
	what := strings.Join(st.Waits, ", ")
	if len(st.Waits) == len(collection.All()) {
		what = "every type"
	}
	return fmt.Sprintf("waiting for it: %s, since %s", what, st.WaitingSince.UTC().Format(time.RFC3339))
}
