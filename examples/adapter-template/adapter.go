package main

import (
	"context"
	"strings"
	"time"

	"github.com/isthmus-mesh/isthmus/plugin"
	"github.com/isthmus-mesh/isthmus/plugin/registry"
)

// maxDocument bounds an answer, in bytes.
const maxDocument = 64 << 20

type adapter struct {
	config  config
	client  *plugin.HTTPClient
	servers *plugin.Servers
}

// newAdapter starts nothing: it is called to check a configuration too.
func newAdapter(c config, _ plugin.Env) (plugin.Adapter, error) {
	client, err := c.HTTP.NewClient(maxDocument)
	if err != nil {
		return nil, err
	}
	return &adapter{c, client, plugin.NewServers(c.Servers)}, nil
}

// Run follows the registry until ctx ends. plugin.Poll does all of it but the
// request: intervals, back-off, what an error or an empty answer means, and
// every call to the catalog.
func (a *adapter) Run(ctx context.Context, catalog plugin.Catalog) error {
	defer a.client.Close()
	p := plugin.Poll{
		Fetch:       a.fetch,
		Interval:    time.Duration(a.config.Interval),
		RemoveGrace: time.Duration(a.config.RemoveGrace),
		MinShare:    0.5,
	}
	return p.Run(ctx, catalog)
}

// fetch asks the first server that answers for everything.
func (a *adapter) fetch(ctx context.Context) (plugin.Listing, error) {
	var doc document
	err := a.servers.Do(ctx, func(ctx context.Context, server string) error {
		doc = document{}
		return a.client.GetJSON(ctx, strings.TrimRight(server, "/")+"/services", &doc)
	})
	if err != nil {
		return plugin.Listing{}, err
	}
	return plugin.Listing{Complete: true, Services: doc.snapshots()}, nil
}

// document is what a server answers.
type document struct {
	Services []struct {
		Name  string   `json:"name"`
		Tags  []string `json:"tags"`
		Hosts []struct {
			ID       string            `json:"id"`
			Address  string            `json:"address"`
			Port     int               `json:"port"`
			Labels   map[string]string `json:"labels"`
			Healthy  *bool             `json:"healthy"`
			Draining bool              `json:"draining"`
		} `json:"hosts"`
	} `json:"services"`
}

// snapshots converts the document to neutral words. It passes on what the
// registry says, and nothing else: what cannot be used is for translate to
// list.
func (d *document) snapshots() []plugin.Snapshot {
	var all []plugin.Snapshot
	for _, s := range d.Services {
		snapshot := plugin.Snapshot{Service: registry.Service{Key: registry.Key{Name: s.Name}, Tags: s.Tags}}
		for _, h := range s.Hosts {
			in := registry.Instance{
				ID: h.ID, Address: h.Address, Ports: []registry.Port{{Number: h.Port}},
				Meta: h.Labels, Disabled: h.Draining,
			}
			if h.Healthy != nil {
				in.Health = registry.HealthCritical
				if *h.Healthy {
					in.Health = registry.HealthPassing
				}
			}
			snapshot.Instances = append(snapshot.Instances, in)
		}
		all = append(all, snapshot)
	}
	return all
}
