// Command isthmus-adapter-inventory is an adapter to start your own from: it
// follows a JSON document that a server has at /services.
package main

import "github.com/isthmus-mesh/isthmus/plugin"

func main() {
	plugin.Main("inventory", newAdapter,
		plugin.WithVersion("0.1.0"),
		plugin.WithSummary("Follows an inventory."),
		plugin.WithDefaults(defaults))
}
