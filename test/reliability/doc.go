// Package reliability judges a whole bridge, with real registries and sinks,
// against the guarantees while things fail, or for a long time.
package reliability
