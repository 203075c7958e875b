// Package plugintest checks that an adapter's executable keeps the contract between a bridge and its plugins.
//
// [Conformance] runs any executable, written in any language, and speaks to it over the real wire:
//
//	func TestConformance(t *testing.T) {
//		plugintest.Conformance(t, plugintest.Config{
//			Command: []string{"./isthmus-adapter-example"},
//			Config:  json.RawMessage(`{"address": "http://127.0.0.1:8500"}`),
//		})
//	}
//
// The contract itself is in plugin/proto.
package plugintest
