// Package zookeeper is the adapter that follows services registered in
// ZooKeeper by Dubbo, Spring Cloud and Curator.
//
// # How it watches
//
// One server is used at a time, in a session that ends with its connection. A
// session begins with one watch for everything below a path, or, at servers
// before 3.6, with one for each node that is read. Then everything is read, a
// bounded number of nodes at once, and afterwards what an event names. As the
// watch is there first, no change is missed; a session that ends is followed by
// a new one, which reads everything again, and known services stay until it
// has.
//
// # What is believed
//
// A change that is watched applies at once. What is missing after an outage is
// retained for remove_grace: providers whose own sessions ended meanwhile
// register again. The same holds if less than min_share is left, and if the
// server's transaction id went back. A registry without any instance removes
// nothing.
//
// The protocol is implemented here because go-zookeeper v1.0.4 panics at a
// short message, allocates a gigabyte for the answer of a web server, has no
// SASL, and none of the watches that stay.
package zookeeper
