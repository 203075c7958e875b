// Package access decides who may use a listener: it terminates TLS with files
// that may be renewed, refuses plaintext where TLS is configured, and checks
// callers against the rules of the listener.
package access
