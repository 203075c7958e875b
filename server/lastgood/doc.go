// Package lastgood saves the last good state of the bridge to disk.
//
// # Files
//
// A directory contains a lock file and one or two generations. A generation is
// an append-only file that starts with the claims of all registries, served or
// not, followed by changes. It is a sequence of frames, each with a checksum
// and a number. A data frame contains compressed items in the format of package
// state; a commit frame lists the registries of the data and the time at which
// they were current.
//
// Reading uses the longest sequence of intact frames that ends with a commit. A
// file truncated or damaged anywhere therefore yields a complete older state or
// none, never a partial one. A generation without a complete start is ignored,
// so the previous generation is removed last.
//
// # Writing
//
// [Store.Run] reads the changes of claims with a cursor, twice a second. The
// cursor advances once a pass is on disk; failed writes are retried. No other
// component waits for the disk.
//
// When the changes outgrow the data at the start of a generation, a new
// generation is written in slices between the passes of the current one.
package lastgood
