// Package encode converts between bytes and resources.
//
// Everything here is a pure function: no type keeps state, no call changes its
// arguments, and equal arguments give equal bytes.
//
// # Reading
//
// A plugin sends encoded istio.mcp.v1alpha1.Resource messages. [Parse] takes
// one apart at its seams (metadata, body), checks it and hashes it. The body's
// bytes are never encoded again.
//
// # Writing
//
// [Head] writes what precedes the spec in an encoded resource, the append
// functions write fields behind it. ServiceEntry.endpoints is field 6, repeated
// WorkloadEntry, so an endpoint is a tag, a length and the WorkloadEntry's
// bytes: composing decodes nothing.
//
// # Versions
//
// A version is a [Hash] of content. Hashes add up modulo 2^64: the hash of a
// composed resource is the sum of those of its parts, whatever their order,
// plus the hash of the [Form], as forms differ in content. So a version is
// equal on every replica and after every restart.
package encode
