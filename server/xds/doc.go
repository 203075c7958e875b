// Package xds serves the store to sinks that speak the aggregated discovery service of xDS.
//
// # Protocols
//
// Both variants of envoy.service.discovery.v3.AggregatedDiscoveryService are served on one port: the state of the world, in which a
// response is all of a type, and delta, in which it is what changed. istiod's config sources use the first; tools and relays get
// more out of the second.
//
// The rules kept, with their places in the xDS protocol document (https://www.envoyproxy.io/docs/envoy/latest/api-docs/xds_protocol)
// where they come from there:
//
//   - The first request of a type on a stream is its subscription, whatever its nonce: istiod puts a clock reading there. Any later
//     request with a nonce that is not that of the newest response is ignored ("ACK and resource type instance version").
//   - Any type is answered at least once. A type that nobody can publish, and MeshConfig, is answered at once, empty. A type whose
//     registries have not completed a first listing is held: "not yet" never looks like "empty".
//   - The answer repeats the type URL that was asked, whichever API version it states. One collection asked for under two URLs is two
//     subscriptions.
//   - One response is under way per subscription. What changes meanwhile becomes one next response.
//   - State of the world: a response holds all of the collection even if names were asked for ("The client will silently ignore any
//     supplied resources that were not explicitly requested"), so that all sinks share its bytes. A name that was not asked for before
//     makes another response. Once names were asked for, a request without any ends the interest ("Unsubscribing From
//     Resources").
//   - Delta: a first request without names, or the name "*", asks for everything ("How the client specifies what resources to return");
//     any other asks for names. Subscribing to a name answers it although it was subscribed to before; dropping a name that "*" still covers answers it
//     too. initial_resource_versions leaves out what the client has and removes what is gone.
//   - Delta: what is more than [push.MaxDelta], names of removed resources included, goes in several responses, each after the ACK of the one
//     before. So a client with gRPC's default limit of 4 MiB receives them, unless a single resource is larger.
//   - The node is taken from the first request that has one.
//   - No request ends a stream but one that goes beyond [MaxTypes] or [MaxNames]; a message that does not decode ends it in gRPC. A delta sink
//     that fell too far behind is sent away with Unavailable; it comes back with what it holds.
//
// # Profiles
//
// The set of types that an istiod asks for tells its version, and nothing else does. [Profiles] is the table. istiod asks for all types up
// front, MeshConfig first and the others in the order of their kinds' names, so a stream that begins with MeshConfig waits for its
// other answers until the set is complete: a type came that only the newest versions ask for, or the last one in that order, or nothing new for
// [Settle]. A stream that begins otherwise is a tool's and waits for nothing. Should the set grow later so that another profile fits,
// everything is sent again in that profile's form.
//
// Up to 1.11 an istiod receives 4 MiB at most. It ends its stream over a larger response and comes back for the same one at once. The
// state of the world cannot be sent in parts, so the response goes out all the same, is counted and logged with the cure.
//
// # Bytes
//
// A response is a header of some 60 bytes and segments that the store keeps encoded; a codec hands them to gRPC as they are. All sinks
// of a form share them.
package xds
