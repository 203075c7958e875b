package static

import (
	"context"

	"github.com/isthmus-mesh/isthmus/plugin"
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
	for _, s := range a.config.Services {
		catalog.Set(s.convert())
	}
	catalog.Synced()
	<-ctx.Done()
	return nil
}
