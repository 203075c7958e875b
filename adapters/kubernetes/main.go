package kubernetes

import (
	"os"
	"slices"

	"github.com/isthmus-mesh/isthmus/plugin"
	"github.com/isthmus-mesh/isthmus/plugin/collection"
)

// hostTemplate is the host of a service: the name that Kubernetes itself has
// for a service of several clusters (KEP-1645).
const hostTemplate = `{{.Name}}.{{.Namespace}}.svc.clusterset.local`

// Main runs the adapter as a plugin, as plugin.Main does, and does not return.
// version is the version of the program that contains the adapter.
func Main(version string) {
	if os.Getenv(loginKey) != "" {
		help(os.Stdin, os.Stdout)
		os.Exit(0)
	}
	plugin.Main("kubernetes", New, plugin.WithVersion(version), plugin.WithSummary("Follows Services, or Istio's resources, of a Kubernetes cluster."), plugin.WithDefaults(DefaultConfig), plugin.WithAccess(Config.access), plugin.WithTranslate(plugin.Translate{Host: hostTemplate}), plugin.WithCollections(slices.Sorted(slices.Values(collection.All()))...))
}
