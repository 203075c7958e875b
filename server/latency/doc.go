// Package latency measures how long a change takes from its registry to the
// acknowledgement of each sink.
//
// The state reports each batch of changes of a registry, and a stream each
// response that was acknowledged, with the revisions that it brought. The
// tracker joins the two: the oldest change of each registry in a response is
// what is measured. There are four hops:
//
//   - plugin: from the call by which the adapter made the change to the arrival
//     of its message at the bridge
//   - apply: until the change is part of the state
//   - wait: until a response with it is handed to gRPC
//   - ack: until the sink acknowledges that response
package latency
