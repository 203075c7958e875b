// Package testconsul runs Consul servers for tests.
//
// The server is Consul itself, built from the module pinned in tools/consul
// (four minutes on two cores, once per version). Start runs one with a catalog
// in memory, leader in a fifth of a second; a persistent one takes some
// seconds.
package testconsul
