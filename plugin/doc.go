// Package plugin is what the author of an adapter meets.
//
// An adapter follows one registry and says what it sees, in snapshots: "these are the instances of this service now". It
// implements [Adapter], is handed a [Catalog], and calls [Main] from its main function:
//
//	func main() {
//		plugin.Main("example", newAdapter, plugin.WithDefaults(Config{Address: "http://localhost:8500"}))
//	}
//
// Everything else is done here: the handshake with the bridge, the configuration (strict, with the path of what is wrong),
// translation to ServiceEntry and WorkloadEntry in the plugin's own process, the difference to what the bridge was told
// before, logging, and the end of the process when the bridge ends.
//
// # State and a cursor
//
// The catalog keeps the registry's present state, and for the stream to the bridge the set of names whose state the bridge does not have
// yet. There is no queue of events: when the bridge is slow, a resource that changes ten times is sent once, and only the
// next batch is larger. A new stream begins with everything.
//
// # What adapters share
//
// An adapter that follows a registry by many requests finds the parts for it here too: [Faults] and [FirstListing] make one state out of what is known
// of each part, [Backoff], [Jitter] and [Pause] wait between two tries, [EqualInstances] and [UnionInstances] compare and complete answers, and
// [Globs] and [Selection] are configuration that selects names.
//
// # Names
//
// Two services may come out under one resource name (my_svc and my-svc). Then one of them is served, always the same one: a
// published resource before a service, a service whose name needed no change before one whose name did, a smaller key before a larger one. The
// other is listed as a problem with the cure, and is served when the name becomes free.
package plugin
