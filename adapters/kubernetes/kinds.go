package kubernetes

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/isthmus-mesh/isthmus/plugin"
	"github.com/isthmus-mesh/isthmus/plugin/collection"
)

// versions are those that a kind of others may be served in, best first. What
// is read of an object is the same in all.
var versions = []string{"v1", "v1beta1", "v1alpha3", "v1alpha1"}

// mcsGroup has the kinds of services of several clusters (KEP-1645).
const mcsGroup = "multicluster.x-k8s.io"

// Paths of Kubernetes' own resources, with %s for the namespace.
const (
	pathServices = "/api/v1%s/services"
	pathPods     = "/api/v1%s/pods"
	pathSlices   = "/apis/discovery.k8s.io/v1%s/endpointslices"
)

// discover returns what is to be listed and watched, of the kinds that the
// server has now: nothing without one that is needed.
func (a *Adapter) discover(ctx context.Context, c *client) ([]source, error) {
	var kinds []source
	switch a.config.Follow {
	case followIstio:
		paths := map[string]string{} // by collection
		groups := map[string]bool{}
		for _, name := range collection.All() {
			group, _, _ := strings.Cut(name, "/")
			groups[group] = true
		}
		for _, group := range slices.Sorted(maps.Keys(groups)) {
			err := c.served(ctx, group, paths, func(version, kind string) string {
				name, _ := collection.OfKind(group+"/"+version, kind)
				return name
			})
			if err != nil {
				return nil, err
			}
		}
		for _, name := range slices.Sorted(maps.Keys(paths)) {
			kinds = append(kinds, source{path: paths[name], labels: a.config.Labels, kind: name})
		}
	case followExports, followImports:
		paths := map[string]string{} // by kind
		err := c.served(ctx, mcsGroup, paths, func(_, kind string) string { return kind })
		if err != nil {
			return nil, err
		}
		if path := paths["ServiceImport"]; path != "" && a.config.Follow == followImports {
			kinds = []source{{path: path, labels: a.config.Labels, kind: "ServiceImport"}, {path: pathSlices, labels: ofImport, kind: "EndpointSlice"}}
		}
		if path := paths["ServiceExport"]; path != "" && a.config.Follow == followExports {
			kinds = append(a.services(), source{path: path, kind: "ServiceExport"})
		}
	default:
		kinds = a.services()
	}
	var all []source
	for _, ns := range a.config.namespaces() {
		for _, s := range kinds {
			s.path = strings.Replace(s.path, "%s", ns, 1)
			all = append(all, s)
		}
	}
	return all, nil
}

// services are the sources of Services and what belongs to them.
func (a *Adapter) services() []source {
	all := []source{{path: pathServices, labels: a.config.Labels, kind: "Service"}, {path: pathSlices, kind: "EndpointSlice"}}
	if a.config.Pods.watched() {
		// Those that have ended are no endpoints.
		all = append(all, source{path: pathPods, fields: "status.phase!=Succeeded,status.phase!=Failed", kind: "Pod"})
	}
	return all
}

// served adds the paths of a group's kinds, in the best version of each, with
// %s for the namespace, under the name that a kind is wanted by, "" for not at
// all.
func (c *client) served(ctx context.Context, group string, paths map[string]string, name func(version, kind string) string) error {
	for _, version := range versions {
		base := "/apis/" + group + "/" + version
		var list metav1.APIResourceList
		err := c.read(ctx, base, nil, &list)
		if apierrors.IsNotFound(err) {
			continue
		}
		if err != nil {
			return fmt.Errorf("which kinds there are: %w", err)
		}
		if list.Kind != "APIResourceList" {
			return fmt.Errorf("the answer to %s is not a list of kinds, but of kind %q", base, plugin.Excerpt(list.Kind))
		}
		for _, r := range list.APIResources {
			name := name(version, r.Kind)
			if name != "" && paths[name] == "" && r.Namespaced && !strings.Contains(r.Name, "/") && slices.Contains(r.Verbs, "watch") {
				paths[name] = base + "%s/" + r.Name
			}
		}
	}
	return nil
}
