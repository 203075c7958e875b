// Package consul is the adapter that follows a HashiCorp Consul catalog.
//
// # How it watches
//
// A scope is one datacenter and namespace. Each scope has one blocking query on /v1/catalog/services, which says what
// services there are, and one blocking query per service on /v1/health/service/NAME, which says everything about its
// instances. A change of one instance therefore costs one small answer, whatever the size of the catalog. A watched service costs one
// goroutine here, one stream or connection, and about 80 KB on the server.
//
// Where each query takes a connection of its own, which is so over plain HTTP,
// connections are bounded (max_connections). Where there are more services, each
// connection goes to a group of services whose names begin alike and waits for
// changes of their checks; the members are then asked for their index alone, and
// those whose index differs in full. Every service is asked for its index when the
// listing of services says that something else has changed. See plan.go, which
// decides which service is asked for when.
//
// # What is believed
//
// What an answer holds is always believed. What it lacks is believed only of an answer that can be trusted to be whole, since Consul
// says nothing (200 and an empty list) where a token may not read, where an agent was replaced by an empty one, and in
// several other cases that have nothing to do with instances that went away:
//
//   - an error of any kind removes nothing;
//   - an answer that Consul filtered by ACL adds and updates, and removes nothing;
//   - an empty answer counts once a listing asked for afterwards has the service no more, and that listing can be trusted itself: it
//     is not empty, and it holds the servers' own service "consul" where nothing else proves that the view is whole;
//   - for a while after an outage or a replaced agent (remove_grace) what is missing is kept, so that agents may register
//     again what they run.
//
// While any of this holds the registry is degraded, with the reason in words.
package consul
