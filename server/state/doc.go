// Package state holds the resources of all registries.
//
// A [DB] has one [Record] for each resource of each registry: the ServiceEntry
// of a service, the WorkloadEntry of an instance, or any other resource. A
// record is an immutable buffer (metadata, spec) with a hash of its content and
// its place in the log of its collection. Shapes, forms, versions and frames
// are computed from it when they are sent.
//
// # Following
//
// Each collection has a log, see package changelog. A reader keeps a [Cursor]
// and calls [DB.Changes] for what follows it: each name once, removed ones
// included.
//
// ServiceEntries and WorkloadEntries have a log per shape: a change of an
// instance is a change of its ServiceEntry in the shape inline, and of its
// WorkloadEntry in the shape workload. Both logs hold the same records.
//
// # What removes a resource
//
// Only its own registry removes a resource: by an explicit removal, by a
// complete new listing that does not mention it, or by leaving the
// configuration. A listing begins with [Registry.Begin] and is complete with
// the plugin's "synced"; resources that it does not mention are then removed. A
// plugin that exits, hangs or sends invalid data removes nothing.
//
// A removal that would leave less than a share of a registry's services is
// treated as an accident and paused: the resources remain claims of their
// registry, marked and listed by [DB.Removals], until the registry reports them
// again, [Registry.Allow] removes them or their time expires. [Protect] has
// the rules.
//
// # Ownership
//
// A name belongs to the first registry, in the order of the configuration, that
// has it. The same name in a later one is shadowed and listed there as a
// problem; it is served when the first one removes its own. The owner does not
// depend on time, and is the same on every replica.
//
// [DB.SetRegistries] changes the set of registries and their order. A record
// belongs to a registry, not to its position: a new order is a new decision on
// the names that several registries claim, and changes nothing else.
//
// An instance has the name of its WorkloadEntry. If its service is shadowed,
// the instance is too, and claims no name. If only the name of the instance
// belongs to another registry, sinks of the shape workload do not receive it;
// inline it is an endpoint of its service, which needs no name.
//
// A host belongs to registries in the same way: an index finds the
// ServiceEntries of a host, whatever their names, and [ConflictRule] sets
// whether a later registry's is shadowed (the default), served beside the
// first, or merged into it. Decisions depend only on the resources of the
// registries and their order. They are made at the end of a batch that changes
// the entries of a host; a changed instance causes none. Endpoints of a merged
// service are derived records, a cost of merged hosts only.
//
// # Readiness
//
// A collection is open when every registry that may publish to it has completed
// a first listing, or is optional and cannot be reached; readers ask
// [DB.Initialized]. A registry that is added while a collection is open does
// not close it: no sink has resources of that registry yet.
//
// # Costs
//
// The cost of a change is proportional to the change, not to the state. Writers
// run one at a time; readers wait only while a batch is written to the logs,
// and readers by name not even then: a batch changes a draft of the claims, and
// what they get is as it was committed last. Decoding, composing, hashing and
// logging happen before or after that.
package state
