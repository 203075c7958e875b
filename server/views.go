package server

import (
	"github.com/isthmus-mesh/isthmus/plugin/shard"
	"github.com/isthmus-mesh/isthmus/server/config"
	"github.com/isthmus-mesh/isthmus/server/view"
)

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
