// Package encode converts between bytes and resources.
//
// All functions are pure: no type has state, no call modifies its arguments,
// and equal arguments give equal bytes.
//
// # Reading
//
// A plugin sends encoded istio.mcp.v1alpha1.Resource messages. [Parse] splits
// one into metadata and body, checks it and hashes it. The bytes of the body
// are never encoded again.
//
// # Writing
//
// [Head] writes the part of a resource that precedes the spec; the append
// functions write further fields. ServiceEntry.endpoints is field 6, repeated
// WorkloadEntry. So an endpoint is a tag, a length and an encoded
// WorkloadEntry, and composing decodes nothing.
//
// # Versions
//
// A version is a [Hash] of content, equal on every replica and after every
// restart. Hashes add up modulo 2^64: the hash of a composed resource is the
// sum of the hashes of its parts in any order, plus the hash of the [Form], as
// forms differ in content.
package encode
