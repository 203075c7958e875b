// Package testenv runs the real servers that Isthmus is tested against.
//
// The servers are Consul and two versions of istiod, built from modules of their own below tools/ and kept in the user's
// cache directory by version, and Envoy from PyPI. Each Start function runs one server on free loopback ports, waits
// until it answers, and ends it with the test; what it printed is in the test's artifact directory and, if the test
// failed, in the test's log. Nothing here skips a test unless -short is given, and never when CI=true: a server that
// cannot be had fails the test with what was missing.
//
// Every wait has a deadline, and says at the deadline what it saw instead of what it waited for.
package testenv
