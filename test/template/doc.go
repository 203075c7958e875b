// Package template tests that the adapter template works in a module of its
// own.
package template
