package plugin

import (
	"github.com/isthmus-mesh/isthmus/plugin/registry"
	"github.com/isthmus-mesh/isthmus/plugin/shard"
	"github.com/isthmus-mesh/isthmus/translate"
)

// sharded is a catalog of the services whose host is in some shards. It leaves
// out what adapters report of others.
type sharded struct {
	*catalog
	translator *translate.Translator
	shards     shard.Set
}

var _ Publisher = (*sharded)(nil)

// Set implements [Catalog].
func (s *sharded) Set(svc registry.Service, instances []registry.Instance) {
	if host := s.translator.Host(svc, instances); host != "" && !s.shards.Has(host) {
		s.Remove(svc.Key) // its host may have been another one before
		return
	}
	s.catalog.Set(svc, instances)
}
