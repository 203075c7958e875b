// Package testpython runs the adapter in Python of examples/adapter-python.
//
// Its Python packages come from PyPI (some seconds).
package testpython
