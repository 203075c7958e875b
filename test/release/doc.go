// Package release tests what is released: the program as a file.
package release
