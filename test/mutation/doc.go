// Package mutation plants defects in the bridge and looks whether the
// simulation, or the tests of the package, find them.
package mutation
