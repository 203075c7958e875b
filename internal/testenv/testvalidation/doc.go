// Package testvalidation gets the programs of this repository that are modules
// of their own: Istio's validation, and servers to compare with.
//
// They are built from test/validity and tools/peers (minutes, once).
package testvalidation
