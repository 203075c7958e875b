package plugin

import (
	"context"
	"log/slog"

	mcp "istio.io/api/mcp/v1alpha1"

	"github.com/isthmus-mesh/isthmus/plugin/registry"
)

// Adapter follows one registry.
type Adapter interface {
	// Run keeps catalog equal to the registry until ctx ends. An earlier return
	// is a failure: the bridge retains its state and restarts the adapter. All
	// goroutines started by Run must end before it returns.
	Run(ctx context.Context, catalog Catalog) error
}

// Catalog receives the state of the registry. Its methods do not block and are
// safe for concurrent use; no-op calls have no effect downstream. The catalog
// does not retain its arguments: the caller may reuse slices and maps once a
// call returns.
type Catalog interface {
	// Set replaces the service and all its instances. A service without
	// instances is kept as an empty service; package translate decides what it
	// becomes in the mesh.
	Set(svc registry.Service, instances []registry.Instance)
	// Remove removes the service, if it exists.
	Remove(key registry.Key)
	// Synced marks the end of the first full listing. Only then does the bridge
	// remove resources of an earlier run that this one did not report, and open
	// the collections that waited for it. Further calls do nothing.
	Synced()
	// Degraded reports why the registry cannot be followed at the moment; the
	// known state is retained. Nil reports recovery.
	Degraded(err error)
	// Detail reports how the registry is followed, for display: "polling". An
	// empty text clears it.
	Detail(text string)
	// Problem lists something in the registry that cannot be used unchanged,
	// under an id chosen by the adapter, with the reason and the remedy. An
	// empty reason clears it. The SDK lists the findings of package translate;
	// use Problem only for what the adapter alone can detect.
	Problem(id, reason string)
	// LeftOut lists something that is not followed although nothing is wrong
	// with it, as the configuration intends, under an id of its own: the reason
	// names the field ("config.services.exclude"). An empty reason clears it.
	// For names that a [Selection] leaves out there is [Unselected].
	LeftOut(id, reason string)
	// Heard reports that the registry answered or sent something just now,
	// changed or not. The SDK reports the health of the process, and only the
	// adapter knows that of the registry. It is cheap: call it with every
	// answer.
	Heard()
}

// Publisher is a [Catalog] that also accepts Istio resources, for sources that
// hold these (files, CRDs). The catalog of an adapter with [WithCollections]
// implements it; use a type assertion.
type Publisher interface {
	Catalog
	// Publish sets one resource. Its metadata.name is "namespace/name"; version
	// is ignored. An invalid resource is listed as a problem, and the bridge
	// retains the last good one, even across restarts of the adapter.
	Publish(res *mcp.Resource)
	// Withdraw removes a published resource: a collection of package collection
	// and a name "namespace/name".
	Withdraw(collection, name string)
}

// Env is what a new adapter receives besides its configuration.
type Env struct {
	// Registry is the configured name of the registry.
	Registry string
	// Log is bound to the registry; its records appear in the bridge's log.
	Log *slog.Logger
	// Metrics are the adapter's own, shown on the bridge's /metrics.
	Metrics *Metrics
	// Only reports whether the bridge may want a service, as far as its key
	// says; nil means every service. Use [Env.Wants].
	Only func(key registry.Key) bool
}

// Wants reports whether the bridge may want a service. One that follows a part
// of the hosts only does not want the others: an adapter that does not read
// them saves the registry the work. The answer for a key never changes. What an
// adapter sets nevertheless is left out by its catalog.
func (e Env) Wants(key registry.Key) bool { return e.Only == nil || e.Only(key) }
