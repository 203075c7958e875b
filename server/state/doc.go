// Package state is what the bridge knows.
//
// A [DB] has one [Record] for each resource of each registry: the ServiceEntry
// of a service, the WorkloadEntry of an instance, a resource that is served as
// it is. A record is an immutable buffer (metadata, spec) with a hash of its
// content and its place in the log of its collection. Everything else is a
// reading of it: shapes, forms, versions and frames are made when they are
// sent.
//
// # Following
//
// The log of a collection has each name once, ordered by the revision at which
// it changed last; a change moves the name to the end. A reader keeps a
// [Cursor] and asks [DB.Changes] for what lies behind it. Nothing is queued for
// anybody: a reader that comes late finds fewer, newer changes instead of more.
// A removed name leaves a tombstone, so that a removal is data like any other
// change. Tombstones are bounded; a reader that has not seen one which is no
// longer remembered is told so, and begins again.
//
// ServiceEntries and WorkloadEntries have a log per shape: a change of an
// instance is a change of its ServiceEntry inline and of its WorkloadEntry
// otherwise. Both logs hold the same records.
//
// # What removes a resource
//
// Only its own registry: by saying so, or by a complete new listing that does
// not mention it. A listing begins with [Registry.Begin] and is complete with
// the plugin's "synced"; what the plugin mentions in between is kept, the rest
// goes. A plugin that dies, hangs or sends garbage removes nothing.
//
// # Ownership
//
// A name belongs to the first registry, in the order of the configuration, that
// has it. The same name in a later one is kept back and listed as a problem
// there, and is served when the first one gives it up. So which one is served
// depends neither on time nor on luck, and is the same on every replica.
//
// An instance has a name as well, that of its WorkloadEntry. If its service is
// kept back, it goes with it and claims nothing. If only the name of the
// instance is another registry's, sinks of the shape workload do not get it;
// inline it is an endpoint of its service, which needs no name.
//
// # Readiness
//
// A collection is open when every registry that may publish to it has completed
// a first listing. [DB.Initialized] is data that a reader asks for.
//
// # Costs
//
// A change costs what changed, whatever the size of the state. Writers take
// turns; readers wait for none of them but for the moment in which a batch
// enters the logs. Resources are taken apart, composed and hashed, and lines
// are logged, outside of it.
package state
