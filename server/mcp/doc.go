// Package mcp serves the store to Pilots of Istio 1.1 to 1.8 over the legacy Mesh Configuration Protocol.
//
// # The protocol
//
// A sink asks for collections on one stream, one request each, and answers every response with an ACK (a request with its nonce) or a
// NACK (with error_detail as well). Who dials does not matter: the sink dials [SourceMethod], or in reverse mode the source, which is
// us, dials [SinkMethod] and begins with a trigger (see [Server.Dial]). The rules that are kept:
//
//   - Every collection is answered, unknown ones empty at once: a Pilot serves nobody before it has them all. A collection whose
//     registries have not completed a first listing is held.
//   - One response is under way per collection. What changes meanwhile becomes one next response.
//   - incremental in a request is permission for the next response, and each ACK has to renew it. A NACK carries none: what follows a NACK is
//     all of the collection, when something changes, or else after a back-off ([RetryMin] to [RetryMax]), because a sink that had a
//     passing reason must not stay behind for ever. A collection that the sink does not support at all (code Unimplemented) is sent again
//     only when something in it changes.
//   - The first response of a collection is all of it, unless the request permits incremental ones and says which versions the sink
//     holds: then it is exactly what the sink lacks, removals included. So a sink that reconnects gets what changed and nothing else.
//   - A response that would be larger than push.MaxDelta goes to a sink that permits incremental ones in parts, of which one is larger only
//     if it is a single resource. To any other sink it goes whole. Above push.MaxMessage, which is what a Pilot accepts unless it is told
//     otherwise, there is a warning; and if a sink of either kind is gone before the ACK of such a response, the collection waits on its
//     next stream, longer each time.
//   - A request with a nonce that is not that of the newest response is ignored. One without nonce for a collection that was asked for
//     already asks anew.
//   - Before an error ends a stream there is a delay ([ErrorDelay]): Pilot 1.6 to 1.8 open the next one at once.
//
// # Profiles
//
// The set of collections tells the sink's version; [Profiles] is the table. All are asked for up front in no order, so a stream waits for its
// answers until the set is one that no older or newer version asks for, or nothing new came for [Settle].
//
// A profile of 1.7 and 1.8 has a barrier: serviceentries go first, and one other collection waits until they are acknowledged in full. These
// Pilots take seconds to minutes for a first load and call themselves ready as soon as each collection has been received.
//
// # Bytes
//
// A response is a header and segments that the store keeps encoded; bodies go out as they came in. All sinks of a form share the bytes.
package mcp
