// Package problems lists what cannot be served, or is not meant to be, and
// bounds what is stored and logged of it.
//
// A [List] has what a plugin reports, by id. [Kinds] counts its reasons by the
// field of the configuration that would change them. [Lines] limits how many
// lines are logged, and counts the others. The package has no lock.
package problems
