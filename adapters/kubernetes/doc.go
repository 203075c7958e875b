// Package kubernetes is the adapter that follows a Kubernetes cluster.
//
// # What it follows
//
// Either Services with their EndpointSlices, which become services and
// instances, or Istio's own kinds, which are published as they are.
//
// # How it watches
//
// A session lists each resource in pages, and continues each listing with a
// watch from its revision on, with bookmarks. The server ends a watch after
// some minutes; it continues at the last revision then. A session ends with
// the first failure, for an expired revision too, and is followed by a new one
// with new listings; what is known stays until they are complete.
//
// # What is believed
//
// A change that a watch reports applies at once. What a new listing lacks is
// retained for remove_grace after an outage, if the revision went back, if
// another cluster answers, and if less than min_share is left. A listing
// without any instance removes nothing.
package kubernetes
