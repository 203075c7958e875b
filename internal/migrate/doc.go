// Package migrate supports the migration from another bridge: it converts that
// bridge's configuration and compares the output of two bridges.
package migrate
