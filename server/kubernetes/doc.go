// Package kubernetes writes objects for programs that read nothing but
// Kubernetes and are to know of what is served.
//
// A [Consumer] has a cursor in a view, as sinks have. It writes while it holds
// a Lease, each object as it has to be when its turn comes, and touches none
// that is not its own: an object is changed or removed only as it was seen, by
// uid and resourceVersion, with the consumer's label. What the API server
// answers leads to another attempt, never to a removal.
//
// A [Stub] is for ambient. istiod makes its index for ztunnel and waypoints
// from Kubernetes alone, but a waypoint takes the endpoints of a service from
// every source. So one ServiceEntry without endpoints in Kubernetes, beside the
// one that istiod has of the bridge, is enough: ztunnel sends what is for its
// address to the waypoint, which knows the instances by xDS. A change of
// instances changes no object.
//
// [Services] are for programs that know nothing of Istio: a Service and
// EndpointSlices. Which slice an instance is in depends on the names of the
// service's instances alone, so all replicas have the same slices, and a
// changed instance changes one.
//
// [Workloads] are for ambient without a waypoint: a ServiceEntry, and a
// WorkloadEntry for each instance that is no pod of the cluster.
package kubernetes
