// Package testisthmus runs the program of this repository for tests.
//
// The program is built from the working tree, with the race detector if the
// test has it, and kept in the cache until a source changes. Start runs
// `isthmus serve` with a configuration of the test's registries, and waits for
// its ports: a fraction of a second.
package testisthmus
