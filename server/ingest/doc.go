// Package ingest turns what plugins send into the content of the store.
//
// Each registry has a [Registry], which keeps all that its plugin said: ServiceEntries with their instances, and resources that are
// served as they are. From a batch it makes the operations on the store, for both shapes at once.
//
// # What removes a resource
//
// Only its own registry: by saying so, or by a complete new listing that does not mention it. A listing begins with
// [Registry.Begin] and is complete with the plugin's "synced"; whatever the plugin mentions in between is kept, the rest goes. A plugin that
// dies, hangs or sends garbage removes nothing.
//
// # Ownership
//
// A resource name belongs to the first registry, in the order of the configuration, that has it. The same name in a later one is
// kept back and listed as a problem there, and is served when the first one gives it up. So which one is served depends neither on
// time nor on luck, and is the same on every replica.
//
// An instance of a service has a name as well, that of its WorkloadEntry. If its service is kept back, it goes with it and claims
// nothing. If only the name of the instance is another registry's, sinks of the shape workload do not get it; inline it is an
// endpoint of its service, which needs no name.
//
// # Held collections
//
// [Ingest.Ready] is the gate of package push: a collection is open when every registry that may publish to it has completed a
// first listing.
package ingest
