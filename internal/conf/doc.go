// Package conf decodes configuration: the YAML file of the bridge, and the
// block of an adapter, which arrives as JSON over the wire.
//
// A [Type] holds the schema of a Go type, derived from its tags, and decodes
// JSON over defaults. It reports all errors at once, each with its path, reason
// and cure. [Type.ReadYAML] converts a YAML document to JSON and records the
// position of each value.
package conf
