package static

import (
	"context"

	"github.com/isthmus-mesh/isthmus/plugin"
	"github.com/isthmus-mesh/isthmus/plugin/registry"
)

// Adapter tells the services of its configuration. New makes one.
type Adapter struct {
	config Config
}

// New returns an adapter for a configuration that Validate accepts.
func New(c Config, _ plugin.Env) (plugin.Adapter, error) {
	if err := c.Validate(); err != nil {
		return nil, err
	}
	return &Adapter{config: c}, nil
}

// Run tells the services, and returns nil when ctx ends.
func (a *Adapter) Run(ctx context.Context, catalog plugin.Catalog) error {
	catalog.Detail("configured")
	catalog.Heard()
	plugin.Recall(catalog, a.recall)
	for _, s := range a.config.Services {
		catalog.Set(s.convert())
	}
	catalog.Synced()
	<-ctx.Done()
	return nil
}

// recall returns a service of the configuration.
func (a *Adapter) recall(key registry.Key) (plugin.Snapshot, bool) {
	for _, s := range a.config.Services {
		if svc, instances := s.convert(); svc.Key == key {
			return plugin.Snapshot{Service: svc, Instances: instances}, true
		}
	}
	return plugin.Snapshot{}, false
}
