// Package plugin is the SDK for registry adapters.
//
// An adapter follows one registry and reports snapshots: the present instances
// of a service. It implements [Adapter], receives a [Catalog], and calls [Main]
// from its main function:
//
//	func main() {
//		plugin.Main("example", newAdapter, plugin.WithDefaults(Config{Address: "http://localhost:8500"}))
//	}
//
// The package does the rest: the handshake with the bridge, strict
// configuration with the path of each error, translation to ServiceEntry and
// WorkloadEntry within the plugin's process, incremental updates to the bridge,
// logging, and exit when the bridge ends.
//
// # State and a cursor
//
// The catalog holds the present state of the registry and, for the stream to
// the bridge, the set of names whose state is unsent. There is no queue of
// events: if the bridge is slow, a resource that changes ten times is sent
// once, and only the next batch grows. A new stream begins with everything.
//
// # What adapters share
//
// The package also has parts for adapters that follow a registry by many
// requests: [Faults] and [FirstListing] combine the states of the parts,
// [Backoff], [Jitter] and [Pause] wait between attempts, [EqualInstances],
// [UnionInstances] and [SortInstances] compare, complete and sort answers,
// [Grace] retains instances after an outage, [HTTP] is the configuration of an
// [HTTPClient], [Servers] handles several addresses, [Globs] and [Selection]
// configure which names to follow, [Unselected] lists the others. [Poll] is a
// complete Run for registries that can only be polled, [Watch] one for
// registries that are listed once and report changes from there on.
//
// # Names
//
// Two services may translate to one resource name (my_svc and my-svc). Then one
// of them is served, in this order: a published resource before a service, a
// service whose name is unchanged before one whose name was changed, a smaller
// key before a larger one. The other is listed as a problem with a remedy, and
// is served when the name becomes free.
package plugin
