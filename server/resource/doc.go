// Package resource composes what a sink gets out of parts that were encoded once.
//
// # Parts
//
// A plugin sends encoded istio.mcp.v1alpha1.Resource messages: a ServiceEntry without endpoints, and one WorkloadEntry per
// instance. [Parse] takes such a message apart at its seams (metadata, body), checks it and hashes it; the body's bytes are never encoded
// again. A [Part] is immutable.
//
// # Shapes
//
// A [Service] holds a ServiceEntry's part and those of its instances, and yields a [Resource] in either shape:
//
//   - [Workload]: the ServiceEntry with a workloadSelector appended; its instances are resources of their own.
//   - [Inline]: the ServiceEntry with its instances appended as endpoints. ServiceEntry.endpoints is field 6, repeated
//     WorkloadEntry, so an encoded endpoint is tag, length and the WorkloadEntry's bytes. Nothing is decoded.
//
// Endpoints are ordered by address, port and name, and kept in blocks of encoded bytes; a change re-encodes its own
// block, and everything else is shared with the service's resource before the change.
//
// # Versions
//
// The version of a resource is a hash of its content. That of a composed one is a sum (modulo 2^128) of the hashes of its parts, which
// does not depend on their order and costs what changed, plus the hash of the form's name, since forms differ in content. So it is
// equal on every replica and after every restart.
//
// # Forms
//
// A [Form] says how a profile wants a resource: its shape and the workarounds for the sink's version. A resource is
// encoded for a form when the first sink asks; all sinks of that form share the bytes.
package resource
