package kubernetes

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/dynamic"

	"github.com/isthmus-mesh/isthmus/internal/clip"
	"github.com/isthmus-mesh/isthmus/internal/wait"
)

var (
	accessReviews = schema.GroupVersionResource{Group: "authorization.k8s.io", Version: "v1", Resource: "selfsubjectaccessreviews"}
	gateways      = schema.GroupVersionResource{Group: "gateway.networking.k8s.io", Version: "v1", Resource: "gateways"}
)

// The condition with which istiod says what became of the label of a waypoint.
const waypointBound = "istio.io/WaypointBound"

const (
	// settleObjects is how long objects may differ that a bridge writes.
	settleObjects = 10 * time.Second
	// maxWaypoints bounds the namespaces whose waypoint is looked at.
	maxWaypoints = 50
)

// Finding is what an inspection finds.
type Finding struct {
	// Check identifies the check: unreached, rights, crds, stubs, waypoint or
	// istiod.
	Check string
	// Note reports that nothing is known to be wrong.
	Note          bool
	Problem, Cure string
}

// inspection is one look at a cluster.
type inspection struct {
	o     Options
	stub  *Stub
	want  map[key]*unstructured.Unstructured
	found []Finding
}

// Inspect looks for what keeps the objects of a consumer from being written,
// and calls by their addresses from reaching the waypoint: whether the API
// server can be used, its rights, the stubs, which are compared with what is
// served, and the waypoints. It changes nothing. Look is a kubeconfig of
// somebody who may read more than the consumer, "" for the consumer's own.
func Inspect(ctx context.Context, o Options, look string, want []*unstructured.Unstructured) []Finding {
	i := &inspection{o: o, want: make(map[key]*unstructured.Unstructured, len(want))}
	for _, w := range want {
		i.want[keyOf(w)] = w
	}
	own, closeOwn, namespace, err := connect(o.Kubeconfig)
	switch {
	case err == nil:
		defer closeOwn()
		if i.rights(ctx, own, cmp.Or(o.LeaseNamespace, namespace)); len(i.found) > 0 {
			return i.found // nothing is written
		}
	case o.Kubeconfig != "":
		i.add("unreached", "its kubeconfig cannot be used: "+err.Error(), "kubeconfig")
		return i.found
	case look == "":
		i.note("unreached", "it writes to the cluster of its pod, which this is not, so nothing there is looked at",
			"kubectl exec deploy/isthmus -- /isthmus doctor --config /etc/isthmus/isthmus.yaml, or --kubeconfig FILE with what you may read there")
		return i.found
	default:
		i.note("rights", "the rights of the bridge are not looked at, which has those of its pod", "kubectl exec deploy/isthmus -- /isthmus doctor --config /etc/isthmus/isthmus.yaml")
	}
	reader := own
	if look != "" {
		other, closeOther, _, err := connect(look)
		if err != nil {
			i.add("unreached", "--kubeconfig cannot be used: "+err.Error(), "--kubeconfig")
			return i.found
		}
		defer closeOther()
		reader = other
	}
	stub, ok := o.Make.(*Stub)
	if !ok {
		return i.found // there is no more to look at than the rights
	}
	if i.stub = stub; i.stubs(ctx, reader) {
		i.waypoints(ctx, reader)
	}
	return i.found
}

func (i *inspection) add(check, problem, cure string) {
	i.found = append(i.found, Finding{check, false, clip.Text(problem, maxReason), cure})
}

func (i *inspection) note(check, problem, cure string) {
	i.found = append(i.found, Finding{check, true, clip.Text(problem, maxReason), cure})
}

// rights reports what the consumer may not do.
func (i *inspection) rights(ctx context.Context, own dynamic.Interface, leaseNamespace string) {
	may := func(of schema.GroupVersionResource, namespace, verb string) (bool, error) {
		attributes := map[string]any{"group": of.Group, "resource": of.Resource, "verb": verb}
		if namespace != "" {
			attributes["namespace"] = namespace
		}
		review := &unstructured.Unstructured{Object: map[string]any{
			"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview", "spec": map[string]any{"resourceAttributes": attributes},
		}}
		answer, err := own.Resource(accessReviews).Create(ctx, review, metav1.CreateOptions{})
		if err != nil {
			return false, err
		}
		allowed, _, err := unstructured.NestedBool(answer.Object, "status", "allowed")
		return allowed, err
	}
	var lacks []string
	namespaces := i.o.Namespaces
	if len(namespaces) == 0 {
		namespaces = []string{""}
	}
	for _, namespace := range namespaces {
		for _, k := range i.o.Make.kinds() {
			for _, verb := range []string{"get", "list", "patch", "create", "delete"} {
				ok, err := may(k.GroupVersionResource, namespace, verb)
				if err != nil {
					i.add("unreached", "the API server cannot be asked: "+err.Error(), "the server and the user of kubeconfig, or the token of the pod's service account")
					return
				}
				if !ok {
					lacks = append(lacks, fmt.Sprintf("%s %s in %s", verb, k.Resource, cmp.Or(namespace, "all namespaces")))
				}
			}
		}
	}
	// Which of them a process of shards renews is not known here.
	if ok, err := may(leases, leaseNamespace, "create"); err == nil && !ok {
		lacks = append(lacks, "create leases in "+leaseNamespace)
	}
	if len(lacks) > 0 {
		i.add("rights", "it may not "+strings.Join(lacks, ", "), "a Role for each namespace of view.namespaces, or a ClusterRole without, as in docs/ambient.md#rights; the chart makes them")
	}
}

// stubs compares the stubs with what is served. False means that they cannot be
// read.
func (i *inspection) stubs(ctx context.Context, reader dynamic.Interface) bool {
	var have map[key]*unstructured.Unstructured
	var differ []string
	for end := time.Now().Add(settleObjects); ; {
		var err error
		have, err = i.list(ctx, reader)
		switch {
		case apierrors.IsNotFound(err):
			i.add("crds", "the API server has no ServiceEntry of networking.istio.io/v1: "+err.Error(), "install Istio there, 1.22 or newer, or at least its chart base; or another cluster: kubeconfig")
			return false
		case apierrors.IsForbidden(err):
			i.add("rights", err.Error(), "the rights of the user of --kubeconfig")
			return false
		case err != nil:
			i.add("unreached", "the stubs cannot be read: "+err.Error(), "the server of kubeconfig")
			return false
		}
		differ = i.differences(have)
		// A bridge that runs may be about to write them.
		if len(differ) == 0 || time.Now().After(end) || !wait.Pause(ctx, time.Second, nil) {
			break
		}
	}
	if len(differ) > 0 {
		i.add("stubs", fmt.Sprintf("%d of %d stubs are not as what is served by xDS, so that calls fail or time out, the first: %s", len(differ), len(i.want), differ[0]),
			"isthmus explain HOST, or the page Consumers, say why the bridge does not write one; a stub that somebody has changed is written again once it is deleted")
	}
	left := 0
	for k := range have {
		if i.want[k] == nil {
			left++
		}
	}
	if left > 0 {
		i.note("stubs", fmt.Sprintf("there are %d stubs of services that are not there; the bridge removes them once every registry has been listed", left), "")
	}
	var unbound []string
	silent := 0
	for _, k := range slices.SortedFunc(maps.Keys(have), func(a, b key) int { return strings.Compare(a.namespace+"/"+a.name, b.namespace+"/"+b.name) }) {
		switch status, message := condition(have[k], waypointBound); {
		case status == "":
			silent++
		case status != "True":
			unbound = append(unbound, k.namespace+"/"+k.name+": "+message)
		}
	}
	if len(unbound) > 0 {
		i.add("waypoint", fmt.Sprintf("istiod binds %d of %d stubs to no waypoint, so that connections to their addresses are reset; the first: %s", len(unbound), len(have), unbound[0]), "waypoint")
	}
	if silent > 0 && silent == len(have) {
		i.note("istiod", "istiod has told of no stub whether it is bound to its waypoint: it is older than 1.24, does not follow this cluster, or ambient is off there", "isthmus doctor --istiod ADDRESS")
	}
	return true
}

// list reads all objects of the consumer.
func (i *inspection) list(ctx context.Context, reader dynamic.Interface) (map[key]*unstructured.Unstructured, error) {
	namespaces := i.o.Namespaces
	if len(namespaces) == 0 {
		namespaces = []string{metav1.NamespaceAll}
	}
	have := make(map[key]*unstructured.Unstructured)
	for _, namespace := range namespaces {
		var all []unstructured.Unstructured
		if err := listed(ctx, reader.Resource(serviceEntries.GroupVersionResource).Namespace(namespace), ConsumerLabel+"="+i.stub.Consumer, &all); err != nil {
			return nil, err
		}
		for n := range all {
			have[keyOf(&all[n])] = &all[n]
		}
	}
	return have, nil
}

// differences returns how stubs differ from those that are to be.
func (i *inspection) differences(have map[key]*unstructured.Unstructured) (all []string) {
	for _, k := range slices.SortedFunc(maps.Keys(i.want), func(a, b key) int { return strings.Compare(a.namespace+"/"+a.name, b.namespace+"/"+b.name) }) {
		name := k.namespace + "/" + k.name
		u := have[k]
		if u == nil {
			all = append(all, name+" is missing")
			continue
		}
		for _, field := range []string{"hosts", "addresses", "ports", "location", "resolution"} {
			is, _, _ := unstructured.NestedFieldNoCopy(u.Object, "spec", field)
			be, _, _ := unstructured.NestedFieldNoCopy(i.want[k].Object, "spec", field)
			if !reflect.DeepEqual(is, be) {
				all = append(all, fmt.Sprintf("%s has the %s %v, and what is served by xDS %v", name, field, is, be))
				break
			}
		}
		for _, label := range []string{WaypointLabel, WaypointNamespaceLabel} {
			if is, be := u.GetLabels()[label], i.want[k].GetLabels()[label]; is != be {
				all = append(all, fmt.Sprintf("%s has the label %s: %q, and should have %q", name, label, is, be))
			}
		}
	}
	return all
}

// waypoints looks at the waypoint of each namespace with stubs.
func (i *inspection) waypoints(ctx context.Context, reader dynamic.Interface) {
	namespaces := make(map[string]bool)
	for k := range i.want {
		namespaces[cmp.Or(i.stub.WaypointNamespace, k.namespace)] = true
	}
	for n, namespace := range slices.Sorted(maps.Keys(namespaces)) {
		if n == maxWaypoints {
			i.note("waypoint", fmt.Sprintf("of %d waypoints %d are looked at", len(namespaces), maxWaypoints), "")
			return
		}
		if !i.waypoint(ctx, reader, namespace) {
			return
		}
	}
}

// waypoint looks at the waypoint of a namespace. False means that others cannot
// be looked at either.
func (i *inspection) waypoint(ctx context.Context, reader dynamic.Interface, namespace string) bool {
	name := i.stub.Waypoint
	apply := fmt.Sprintf("istioctl waypoint apply --namespace %s --name %s", namespace, name)
	who := fmt.Sprintf("the waypoint %s/%s", namespace, name)
	g, err := reader.Resource(gateways).Namespace(namespace).Get(ctx, name, metav1.GetOptions{})
	switch {
	case apierrors.IsForbidden(err):
		i.note("waypoint", "the bridge may not read Gateways, and needs not to, so waypoints are not looked at", "--kubeconfig FILE with the rights of somebody who may")
		return false
	case apierrors.IsNotFound(err):
		i.add("waypoint", who+" is not there, so that connections to its services are reset: "+err.Error(), apply+", or waypoint.name and waypoint.namespace of the consumer")
		return true
	case err != nil:
		i.add("unreached", who+" cannot be read: "+err.Error(), "")
		return false
	}
	if class := field(g, "spec", "gatewayClassName"); !strings.Contains(class, "waypoint") {
		i.add("waypoint", fmt.Sprintf("%s is a Gateway of class %s and no waypoint", who, class), apply+", or another waypoint.name")
		return true
	}
	if of := g.GetLabels()["istio.io/waypoint-for"]; of != "" && of != "service" && of != "all" {
		i.add("waypoint", fmt.Sprintf("%s is for %s (label istio.io/waypoint-for), and stubs are services", who, of), apply+" --for service")
		return true
	}
	if status, message := condition(g, "Programmed"); status != "True" {
		i.add("waypoint", fmt.Sprintf("%s is not ready: %s", who, cmp.Or(message, "istiod has not said that it is programmed")), "the Deployment of that name: kubectl -n "+namespace+" get deployment,pods -l gateway.networking.k8s.io/gateway-name="+name)
		return true
	}
	slices, err := reader.Resource(endpointSlices.GroupVersionResource).Namespace(namespace).List(ctx, metav1.ListOptions{LabelSelector: "kubernetes.io/service-name=" + name})
	if err == nil && !anyReady(slices.Items) {
		i.add("waypoint", who+" has no pod that is ready, so that connections to its services are reset", "kubectl -n "+namespace+" get pods -l gateway.networking.k8s.io/gateway-name="+name)
	}
	return true
}

// anyReady reports whether EndpointSlices have an endpoint that is ready.
func anyReady(all []unstructured.Unstructured) bool {
	for n := range all {
		endpoints, _, _ := unstructured.NestedSlice(all[n].Object, "endpoints")
		for _, e := range endpoints {
			fields, _ := e.(map[string]any)
			if ready, found, _ := unstructured.NestedBool(fields, "conditions", "ready"); fields != nil && (ready || !found) {
				return true
			}
		}
	}
	return false
}

// condition returns the status of a condition of an object, "" if it has none,
// and its message.
func condition(o *unstructured.Unstructured, kind string) (status, message string) {
	all, _, _ := unstructured.NestedSlice(o.Object, "status", "conditions")
	for _, c := range all {
		fields, _ := c.(map[string]any)
		if of, _, _ := unstructured.NestedString(fields, "type"); fields == nil || of != kind {
			continue
		}
		status, _, _ = unstructured.NestedString(fields, "status")
		message, _, _ = unstructured.NestedString(fields, "message")
	}
	return status, message
}
