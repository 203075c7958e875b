package config

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/invopop/jsonschema"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/isthmus-mesh/isthmus/internal/conf"
)

// Consumers configures who is written to.
type Consumers struct {
	Kubernetes []Kubernetes `json:"kubernetes" doc:"API servers of Kubernetes that get objects of what is served, for programs that read nothing else; see docs/ambient.md and docs/gateways.md."`
}

// Kubernetes is an API server of Kubernetes that is written to.
type Kubernetes struct {
	Name            string            `json:"name" doc:"Name of the consumer, in the label isthmus.io/consumer of its objects and in the name of its Lease: lower-case letters, digits and dashes, at most 40. One that no other bridge of the cluster has; replicas of one bridge share it."`
	Publish         string            `json:"publish" doc:"What is written. stubs: a ServiceEntry without endpoints for each service, with which ztunnel and waypoints have it while the instances come by xDS. services: a Service with EndpointSlices, for gateways and other programs that know nothing of Istio. workloads: a ServiceEntry with a WorkloadEntry for each instance, for ztunnel without a waypoint."`
	ClusterIP       bool              `json:"cluster_ip" doc:"With publish: services, give each Service an address of the cluster. Otherwise it is headless."`
	View            View              `json:"view" doc:"The services that are written; see docs/views.md. Without it all. With namespaces the bridge needs its permissions in these only."`
	Kubeconfig      string            `json:"kubeconfig" doc:"Kubeconfig with the API server and what the bridge identifies itself with there: a token or a certificate. Empty: the bridge runs in a pod, and writes to its cluster as its own service account."`
	Waypoint        Waypoint          `json:"waypoint" doc:"With publish: stubs, the waypoint of the services."`
	Labels          map[string]string `json:"labels" doc:"Labels of the objects, besides their own."`
	Annotations     map[string]string `json:"annotations" doc:"Annotations of the objects, besides their own."`
	LeaseNamespace  string            `json:"lease_namespace" doc:"Namespace of the Lease that keeps all but one replica from writing. Empty: that of the pod, or of the kubeconfig's context."`
	WritesPerSecond int               `json:"writes_per_second" doc:"How many objects are written or removed a second, 1 to 1000. Of an object that changes faster the newest state is written."`
}

// Waypoint is a waypoint of ambient.
type Waypoint struct {
	Name      string `json:"name" doc:"Name of its Gateway."`
	Namespace string `json:"namespace" doc:"Its namespace. Empty: that of each service."`
}

// Values of [Kubernetes.Publish].
const (
	PublishStubs    = "stubs"
	PublishServices = "services"
	// PublishWorkloads is for ambient without a waypoint.
	PublishWorkloads = "workloads"
)

// DefaultKubernetes holds the values of missing fields of an API server that is
// written to.
var DefaultKubernetes = Kubernetes{Publish: PublishStubs, Waypoint: Waypoint{Name: "waypoint"}, WritesPerSecond: 20}

// UnmarshalJSON decodes a consumer over [DefaultKubernetes].
func (k *Kubernetes) UnmarshalJSON(b []byte) error {
	type plain Kubernetes // without this method
	*k = DefaultKubernetes
	return json.Unmarshal(b, (*plain)(k))
}

// JSONSchemaExtend documents the defaults.
func (Kubernetes) JSONSchemaExtend(s *jsonschema.Schema) {
	if err := conf.NoteDefaults(s, DefaultKubernetes); err != nil {
		panic("BUG: config: " + err.Error())
	}
}

// maxConsumer bounds the length of a consumer's name, which is a part of the
// name of a Lease, with shards of a process.
const maxConsumer = 40

// maxWrites bounds writes_per_second.
const maxWrites = 1000

// consumers checks who is written to.
func (d *decoder) consumers() {
	names := make(map[string]int)
	for i := range d.config.Consumers.Kubernetes {
		k, at := &d.config.Consumers.Kubernetes[i], fmt.Sprintf("consumers.kubernetes[%d]", i)
		name := at + ".name"
		switch {
		case len(k.Name) > maxConsumer || !label.MatchString(k.Name):
			d.check(false, name, "must be lower-case letters, digits and dashes, at most %d, such as ambient", maxConsumer)
		case names[k.Name] != 0:
			d.check(false, name, "another consumer has the name %s already, on line %d; names are unique", k.Name, names[k.Name])
		default:
			names[k.Name] = d.config.Position(name).Line
		}
		d.check(slices.Contains([]string{PublishStubs, PublishServices, PublishWorkloads}, k.Publish), at+".publish", "must be %s, %s or %s", PublishStubs, PublishServices, PublishWorkloads)
		d.check(!k.ClusterIP || k.Publish == PublishServices, at+".cluster_ip", "is for publish: %s", PublishServices)
		d.check(k.Waypoint == DefaultKubernetes.Waypoint || k.Publish != PublishServices && k.Publish != PublishWorkloads, at+".waypoint", "is for publish: %s", PublishStubs)
		d.view(at+".view", false, &k.View, nil)
		d.check(len(k.View.Collections) == 0, at+".view.collections", "is for sinks; services are written")
		d.check(len(k.Waypoint.Name) <= maxName && label.MatchString(k.Waypoint.Name), at+".waypoint.name", "must be the name of a Gateway, such as waypoint")
		for field, namespace := range map[string]string{".waypoint.namespace": k.Waypoint.Namespace, ".lease_namespace": k.LeaseNamespace} {
			d.check(namespace == "" || len(namespace) <= maxName && label.MatchString(namespace), at+field, "must be a namespace such as istio-ingress")
		}
		d.check(k.WritesPerSecond >= 1 && k.WritesPerSecond <= maxWrites, at+".writes_per_second", "must be 1 to %d", maxWrites)
		for field, pairs := range map[string]map[string]string{".labels": k.Labels, ".annotations": k.Annotations} {
			for _, key := range slices.Sorted(maps.Keys(pairs)) {
				d.check(len(validation.IsQualifiedName(key)) == 0, at+field, "%s is no key, such as example.org/team", key)
				d.check(!strings.HasPrefix(key, "isthmus.io/") && !strings.HasPrefix(key, "istio.io/use-waypoint"), at+field, "%s is the consumer's own", key)
				d.check(field != ".labels" || len(validation.IsValidLabelValue(pairs[key])) == 0, at+field, "the value of %s must be at most 63 letters, digits, dashes, dots and underscores", key)
			}
		}
	}
}
