// Package watch implements a sink that prints what it receives.
//
// It uses either variant of the aggregated discovery service or the legacy
// protocol, acknowledges every response, keeps the versions of resources, and
// prints each change as one line. It reopens streams that end; then only what
// changed in between is printed.
package watch
