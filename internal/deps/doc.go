// Package deps holds the test of how the packages of the module may depend on each other.
package deps
