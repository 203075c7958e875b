// Package kubernetes is the adapter that follows Kubernetes clusters.
//
// # What it follows
//
// Either Services with their EndpointSlices, all or those that are exported,
// or ServiceImports with theirs, which become services and instances, or
// Istio's own kinds, which are published as they are. Of Pods it keeps what
// their endpoints get.
//
// Each context is a cluster of its own, with a session and retention of its
// own; plugin.Union combines what they say.
//
// # How it watches
//
// A reflector of client-go lists and watches each resource: by one request if
// the server can (sendInitialEvents), in pages otherwise. A watch that ends, in
// whatever way, goes on at its revision. A resource is listed again if its
// revision has expired, or after a request failed, as the server may have been
// restored from a backup meanwhile; the others go on. What counts of an object
// is kept, and the object itself dropped.
//
// # What is believed
//
// A change that a watch reports applies at once. What a new listing lacks is
// retained for remove_grace after an outage, if the revision went back, if
// another cluster answers, and if less than min_share is left. A listing
// without any instance removes nothing.
package kubernetes
