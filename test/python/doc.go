// Package python shows that the contract speaks other languages than Go: the
// Python example, through a real bridge.
package python
