// Package xds serves a view to sinks over the aggregated discovery service of
// xDS.
//
// # Protocols
//
// One port serves both variants of
// envoy.service.discovery.v3.AggregatedDiscoveryService: state of the world
// (SotW), in which a response is all of a type, and delta, in which it is the
// changes. The config sources of istiod use SotW; tools and relays do better
// with delta.
//
// The rules, with their sections in the xDS protocol document
// (https://www.envoyproxy.io/docs/envoy/latest/api-docs/xds_protocol):
//
//   - The first request of a type on a stream subscribes, whatever its nonce:
//     istiod sends a timestamp there. Later requests with a stale nonce are
//     ignored ("ACK and resource type instance version").
//   - Every type is answered at least once. A type that no adapter can publish,
//     and MeshConfig, is answered at once, empty. A type whose registries have
//     not completed a first listing is held, so "not yet" never looks like
//     "empty".
//   - The response repeats the requested type URL, whatever its API version.
//     One collection requested under two URLs is two subscriptions.
//   - One response per subscription is in flight. Changes in the meantime form
//     one next response.
//   - SotW: a response holds all of the collection even if names were requested
//     ("The client will silently ignore any supplied resources that were not
//     explicitly requested"), so that all sinks share its bytes. An additional
//     name causes another response. After names, a request without any
//     unsubscribes ("Unsubscribing From Resources").
//   - Delta: a first request without names, or the name "*", subscribes to
//     everything ("How the client specifies what resources to return"); any
//     other subscribes to names. Subscribing to a name answers it, even if it
//     was subscribed to before; so does unsubscribing from a name that "*"
//     still covers. Resources of initial_resource_versions are sent only if
//     they differ, and removed if they no longer exist.
//   - Delta: responses above [view.MaxDelta], removed names included, are
//     split, and each part waits for the ACK of the one before. A client with
//     gRPC's default limit of 4 MiB receives them, unless a single resource is
//     larger.
//   - The node is that of the first request that has one.
//   - Only requests beyond [MaxTypes] or [MaxNames] end a stream, and messages
//     that gRPC cannot decode. The stream of a delta sink that fell too far
//     behind ends with Unavailable; the sink reconnects with the versions that
//     it holds.
//
// # Profiles
//
// Only the set of types that an istiod requests identifies its version.
// [Profiles] is the table. istiod requests all types at its start, MeshConfig
// first and the others in the order of their kinds' names. So after MeshConfig
// a stream holds its other responses until the set is complete: with a type
// that only the newest versions request, with the last type of that order, or
// when no new type arrived for [Settle]. Streams that begin with another type
// are those of tools and are answered at once. If the set grows later and
// another profile fits, everything is resent in the form of that profile.
//
// istiods up to 1.11 receive at most 4 MiB: a larger response makes them
// disconnect and reconnect at once. SotW cannot split a response, so it is sent
// all the same, and counted and logged with the cure.
//
// # Bytes
//
// A response is a header of about 60 bytes and encoded segments, which a codec
// passes to gRPC as they are. Resources are encoded when they are sent, except
// for those of full responses: all sinks of a form share their pages, and the
// encoded endpoints of a service larger than a page.
package xds
