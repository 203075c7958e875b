// Package view computes what a sink lacks.
//
// A [View] is shared by all sinks: it holds what was encoded of the state. A
// [Subscription] is one sink's interest in one collection: a state machine
// without goroutine, lock or clock that the stream drives. SotW xDS, delta xDS
// and both modes of MCP share it. [Subscription.Next] compares a cursor with
// the state and returns the next response, if any. Then it returns nothing
// until [Subscription.Ack] or [Subscription.Nack]. Changes in between enlarge
// the next response and are not queued, so a slow sink costs one cursor.
//
// A response is a list of encoded segments; the protocol adds a header.
//
//   - An incremental response is encoded when it is sent, and not retained.
//   - Full responses of one collection, form and framing share pages: runs of
//     framed resources of about [PageSize] bytes. A change encodes one resource
//     and copies one page; a response lists all pages. So the cost of a change
//     is one page and one pointer per page, for any number of sinks.
//
// A subscription to names costs only changes of these names: the view follows
// the log once for all of them, with an index from name to subscriptions.
package view
