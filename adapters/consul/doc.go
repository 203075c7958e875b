// Package consul is the adapter that follows a HashiCorp Consul catalog.
//
// # How it watches
//
// A scope is one datacenter and namespace, or what is imported from one cluster
// peer, whose services the peering states. Each scope has one blocking query on
// /v1/catalog/services, which lists the services, and one blocking query per
// service on /v1/health/service/NAME, which returns its instances. A change of
// one instance therefore costs one small answer, whatever the size of the
// catalog. A watched service costs one goroutine here, one stream or
// connection, and about 80 KB on the server.
//
// One more query follows the service-defaults entries of a scope, for the
// protocols of its services. Sidecars of Consul's own mesh are instances of
// services that are followed anyway; see connect.go.
//
// Over plain HTTP each query needs its own connection, so the number of
// connections is bounded (max_connections). If there are more services, each
// connection serves a group of services with a common prefix, and waits for
// changes of their checks. The adapter then queries the index of each member,
// and requests a member in full if its index differs. It queries the index of
// every service if the listing of services shows that something else has
// changed. Package plan schedules the queries.
//
// The mode peering, which is experimental, uses no queries: see peering.go.
//
// # What is believed
//
// What an answer contains is always applied. What it lacks is removed only if
// the answer is known to be complete. Consul returns 200 and an empty list to a
// token without read permission, from an empty agent that replaced another, and
// in several other cases in which no instance was removed. Therefore:
//
//   - an error removes nothing;
//   - an answer filtered by ACL adds and updates, and removes nothing;
//   - an empty answer counts once a later listing lacks the service and that
//     listing can be trusted: it is not empty, and it contains the servers' own
//     service "consul" unless something else proves that it is complete;
//   - what is missing after an outage or a replacement of the agent is retained
//     for remove_grace, by plugin.Grace, so that agents may register it again.
//
// While one of these rules retains anything, the registry is degraded and
// states the reason.
package consul
