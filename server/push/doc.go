// Package push works out what a sink lacks.
//
// A [Subscription] is one sink's interest in one collection: a state machine without goroutine, lock or clock, driven by the
// stream that owns it. [Subscription.Next] compares a cursor with the store and yields the next response, or nothing;
// after a response it yields nothing until [Subscription.Ack] or [Subscription.Nack]. What changes in between makes the next response
// larger and is never queued, so a slow sink costs one cursor.
//
// Responses are not messages but lists of encoded segments, which the protocol's package puts behind a small header:
//
//   - Incremental subscriptions frame each changed resource's own segments.
//   - State-of-the-world subscriptions of one collection, form and framing share pages: runs of framed resources of some
//     [PageSize] bytes. A change re-encodes its own page; a response lists all pages. However many sinks there are and however
//     large the collection, one change costs one page and one pointer per page.
package push
