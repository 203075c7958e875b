// Package server wires the bridge: from a configuration to plugins, store, and listeners.
package server
