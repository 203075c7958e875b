// Package plugintest checks that an adapter's executable fulfills the contract
// between a bridge and its plugins.
//
// [Conformance] tests any executable, in any language, over the real wire:
//
//	func TestConformance(t *testing.T) {
//		plugintest.Conformance(t, plugintest.Config{
//			Command: []string{"./isthmus-adapter-example"},
//			Config:  json.RawMessage(`{"address": "http://127.0.0.1:8500"}`),
//		})
//	}
//
// With an [Outage], for registries that the test can stop, the suite checks
// that the adapter retains its state. [Self] makes the test binary the plugin.
// [Catalog] tests an adapter's Run without the wire.
//
// The checks themselves are in package suite, and `isthmus plugin check` runs
// them without Go. The contract is in plugin/proto, and docs/plugin-protocol.md
// explains it.
package plugintest
