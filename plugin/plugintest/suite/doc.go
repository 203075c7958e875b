// Package suite holds the checks of package plugintest without package testing,
// so that a program may run them too.
//
// Each [Check] runs the plugin as processes of its own, over the real wire.
package suite
