// Package testpilot runs sinks of the legacy protocol for tests: Pilot 1.8, and
// programs made of its own sink and source libraries.
//
// They are built from the module pinned in tools/pilot-1.8 (three minutes,
// once). Start runs Pilot without Kubernetes; it is ready when every collection
// was answered, a second or two.
package testpilot
