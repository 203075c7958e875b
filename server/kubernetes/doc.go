// Package kubernetes makes the objects by which consumers that read nothing but
// Kubernetes learn of what is served.
//
// A [Stub] is for ambient. istiod makes its index for ztunnel and waypoints
// from Kubernetes alone, but a waypoint takes the endpoints of a service from
// every source. So one ServiceEntry without endpoints in Kubernetes, beside the
// one that istiod has of the bridge, is enough: ztunnel sends what is for its
// address to the waypoint, which knows the instances by xDS. A change of
// instances changes no object.
package kubernetes
