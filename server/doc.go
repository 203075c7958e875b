// Package server assembles the bridge from its configuration: plugins, store,
// and listeners.
package server
