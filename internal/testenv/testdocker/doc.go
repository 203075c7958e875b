// Package testdocker runs a Docker engine for tests.
//
// The engine is Debian's docker.io, unpacked and not installed (seconds), with
// Docker Compose from the module pinned in tools/compose (90 seconds). Start
// runs the engine as root in a network of its own; it answers in some seconds.
package testdocker
