// Package etcd is the adapter that follows services registered in etcd.
//
// # How it watches
//
// One server is used at a time. A session with it begins with a listing, in
// pages at one revision, and continues with one watch of the prefix from the
// next revision on. The messages of the watch are read as they are handled, so
// that a burst waits at the server and not in memory. The server is asked for
// progress a few times per timeout: a watch of which nothing is heard is over.
// A session that ends, for compaction too, is followed by a new one with a new
// listing; known services stay until it is complete.
//
// # What is believed
//
// A change that the watch reports applies at once. What a new listing lacks is
// retained for remove_grace after an outage, if the revision went back, if
// another cluster answers, and if less than min_share is left: clients whose
// leases ended meanwhile register again. A listing without any instance removes
// nothing.
package etcd
