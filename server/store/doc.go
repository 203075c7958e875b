// Package store keeps the current resources of every collection in the order in which they last changed.
//
// # The idea
//
// A collection is a map from name to value plus a log. The log has exactly one entry per name, ordered by the revision at which
// that name last changed; a change moves the entry to the tail. Who wants to follow a collection keeps one number, the
// revision up to which it has seen everything, and asks [Store.Since] for what lies behind it. Nothing is queued for anybody: a
// reader that comes late finds fewer, newer entries instead of more.
//
// A removed name leaves a tombstone in the log, so that a removal is data like any other change. Tombstones are bounded; when
// the oldest is dropped its revision becomes the collection's horizon, and a reader whose cursor lies before it is told so
// (ok = false) and must start again from [Store.All].
//
// # Costs
//
// [Store.Apply] costs O(1) per change whatever the size of the collection, [Store.Since] costs what changed, [Store.All] costs
// one pointer per resource. Waking is closing a channel ([Store.Changed]): a reader takes the channel first and looks second,
// so no change is missed.
//
// # Concurrency
//
// All methods may be called from any goroutine. Values are immutable once applied: the store hands the same value to every reader.
package store
