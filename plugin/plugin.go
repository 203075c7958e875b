package plugin

import (
	"context"
	"log/slog"

	mcp "istio.io/api/mcp/v1alpha1"

	"github.com/isthmus-mesh/isthmus/plugin/registry"
)

// Adapter follows one registry.
type Adapter interface {
	// Run keeps catalog equal to the registry until ctx ends. Any earlier return is a failure: the bridge keeps
	// what it has and restarts the adapter. Run must not return before every goroutine that it started has ended.
	Run(ctx context.Context, catalog Catalog) error
}

// Catalog is what an adapter believes the registry holds. No method blocks, each may be called from any goroutine, and a call
// that changes nothing costs nothing downstream. The catalog keeps nothing of what it is handed: the caller may reuse slices and
// maps once the call returns.
type Catalog interface {
	// Set replaces everything known about svc.Key. A service without instances is kept as an empty service; what that
	// becomes in the mesh is up to translate.
	Set(svc registry.Service, instances []registry.Instance)
	// Remove forgets the service. Removing what is not there does nothing.
	Remove(key registry.Key)
	// Publish sets one resource that is in Istio's words already, for sources that speak Istio (files, CRDs). Its
	// metadata.name is "namespace/name"; version is ignored. One that is invalid
	// is listed as a problem, and the bridge keeps the last good one, after a
	// restart of the adapter too.
	Publish(res *mcp.Resource)
	// Withdraw forgets a published resource: the collection as in package collection, the name as "namespace/name".
	Withdraw(collection, name string)
	// Synced says that the first full listing is in. Only then does the bridge remove what an earlier run of the
	// adapter knew and this one did not mention, and open the collections that it held back. Further calls do nothing.
	Synced()
	// Degraded says that the registry cannot be followed at the moment, and why; everything known stays as it is. Nil says
	// that it is followed again.
	Degraded(err error)
	// Problem lists something in the registry that cannot be used as it is, under an id of the adapter's own choice, with the
	// reason and the cure in words. An empty reason takes it off the list. translate's own findings are listed by
	// the SDK; this is for what only the adapter can see.
	Problem(id, reason string)
	// Heard says that the registry itself answered or sent something just now, whether anything changed or not. The SDK shows that
	// the process lives; only the adapter knows that its registry does. It is cheap: call it with every answer.
	Heard()
}

// Detailer is a [Catalog] that also takes how the registry is followed. The one that [Main] hands to an adapter is; an adapter asks by a type
// assertion.
type Detailer interface {
	// Detail says how the registry is followed, for people, if that is worth telling: "polling". An empty text takes it back.
	Detail(text string)
}

// Env is what the bridge gives to a new adapter besides its configuration.
type Env struct {
	// Registry is the configured name of the registry.
	Registry string
	// Log is bound to the registry; its records appear in the bridge's own log.
	Log *slog.Logger
}
