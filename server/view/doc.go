// Package view works out what a sink lacks.
//
// A [View] is what all sinks of one form share: the state and what was encoded
// of it. A [Subscription] is one sink's interest in one collection: a state
// machine without goroutine, lock or clock, driven by the stream that owns it,
// the same for the state of the world, delta xDS and MCP in both its ways.
// [Subscription.Next] compares a cursor with the state and yields the next
// response, or nothing; after a response it yields nothing until
// [Subscription.Ack] or [Subscription.Nack]. What changes in between makes the
// next response larger and is never queued, so a slow sink costs one cursor.
//
// Responses are not messages but lists of encoded segments, which the
// protocol's package puts behind a small header:
//
//   - A response of changes is encoded when it is sent, and not kept.
//   - Responses of everything of one collection, form and framing share pages:
//     runs of framed resources of some [PageSize] bytes. A change encodes its
//     own resource and copies its page; a response lists all pages. However
//     many sinks there are and however large the collection, one change costs
//     one page and one pointer per page.
//
// A subscription to names costs the changes of these names only: the view
// follows the log once for all of them and knows who asked for what.
package view
