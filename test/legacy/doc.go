// Package legacy holds the tests with real sinks of the legacy Mesh
// Configuration Protocol.
package legacy
