// Package record holds resources as they are sent.
//
// A [Content] is one immutable buffer (metadata, spec) with a hash. A
// [Composition] has the endpoints of a service in ordered blocks; a change
// makes a new one, which shares the blocks that it leaves as they are. Shapes,
// forms, versions and frames are computed when a [Resource] is encoded.
//
//	composition   [a b c] [d e f] [g h]
//	c goes:       [a b]   [d e f] [g h]   the second and the third are the same
//
// Who owns a resource, and whether it is served, is a matter of its holder. The
// package has no lock.
package record
