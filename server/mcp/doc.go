// Package mcp serves a view to Pilots of Istio 1.1 to 1.8 over the legacy Mesh
// Configuration Protocol.
//
// # The protocol
//
// A sink requests collections on one stream, with one request each, and answers
// every response with an ACK (a request with its nonce) or a NACK (with
// error_detail). Either side may dial: the sink dials [SourceMethod]; in
// reverse mode the source, this server, dials [SinkMethod] and begins with a
// trigger (see [Server.Dial]). The rules:
//
//   - Every collection is answered, unknown ones at once, empty: a Pilot serves
//     no proxy before it has received them all. A collection whose registries
//     have not completed a first listing is held.
//   - One response per collection is in flight. Changes in the meantime form
//     one next response.
//   - incremental in a request permits the next response to be incremental;
//     each ACK has to renew it. A NACK permits nothing: a full response follows
//     with the next change, or after a back-off ([RetryMin] to [RetryMax]), so
//     that a sink with a temporary problem does not stay behind. A collection
//     that the sink does not support (code Unimplemented) is resent only when
//     it changes.
//   - The first response of a collection is full, unless the request permits
//     incremental ones and states the versions that the sink holds: then it is
//     exactly what the sink lacks, removals included. So a sink that reconnects
//     receives the changes only.
//   - A response above [view.MaxDelta] is split for sinks that permit
//     incremental ones; a part exceeds it only if it is a single resource.
//     Other sinks receive it whole. Above [view.MaxMessage], the default limit
//     of a Pilot, a warning is logged. If a sink disconnects before the ACK of
//     such a response, the collection is delayed on its next stream, longer
//     each time.
//   - A request with a stale nonce is ignored. A request without nonce for a
//     collection that was requested before requests it anew.
//   - A stream that ends with an error stays open for [ErrorDelay], as Pilot
//     1.6 to 1.8 reconnect at once.
//
// # Profiles
//
// The set of collections identifies the version of a sink; [Profiles] is the
// table. A sink requests all of them at once in no order. So a stream holds its
// responses until no other version requests that set, or until no new
// collection arrived for [Settle].
//
// A profile of 1.7 and 1.8 has a barrier: serviceentries go first, and one
// other collection is held until all of them are acknowledged. The first load
// takes these Pilots seconds to minutes, and they report readiness as soon as
// every collection was received.
//
// # Bytes
//
// A response is a header and encoded segments; the bytes of a body are those
// that the plugin sent. All sinks of a form share the pages of full responses.
package mcp
