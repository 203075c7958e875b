// Package testspire runs a SPIRE server with an agent for tests.
//
// Both are built from the module pinned in tools/spire (five minutes, once),
// and start in some seconds.
package testspire
