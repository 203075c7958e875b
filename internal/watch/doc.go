// Package watch is a sink that prints what it gets.
//
// It speaks either variant of the aggregated discovery service, acknowledges every response, keeps the versions of what it has,
// and writes each change as one line. A stream that ends is opened again; what changed meanwhile is then printed,
// nothing else.
package watch
