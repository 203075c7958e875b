// Package simulation runs the bridge against model registries and model sinks
// in one process, on fake time, from a seed.
package simulation
