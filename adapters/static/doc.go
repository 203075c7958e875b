// Package static is the adapter whose services are written in its
// configuration.
//
// It follows nothing: what is configured is the listing, complete at once. A
// changed configuration starts the adapter anew with another listing, and the
// bridge removes what that lacks.
package static
