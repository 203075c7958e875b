// Package testcoredns runs CoreDNS servers for tests.
//
// The server is built from the module pinned in tools/coredns (a minute). Start
// runs one that serves the zones that tests set; it answers in a fifth of a
// second.
package testcoredns
