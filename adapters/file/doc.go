// Package file is an adapter for a registry that is a directory of YAML files.
package file
