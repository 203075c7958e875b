// Package testenv runs the real servers that Isthmus is tested against.
//
// The servers are Consul and two versions of istiod, built from their own
// modules in tools/ and cached by version in the user's cache directory, and
// Envoy from PyPI. Each Start function runs one server on free loopback ports,
// waits until it answers, and stops it with the test. Its output is in the
// test's artifact directory and, if the test failed, in the test's log. Tests
// are skipped only with -short, and never when CI=true: if a server is
// unavailable the test fails with the reason.
//
// Every wait has a deadline, and reports at the deadline what it observed
// instead.
package testenv
