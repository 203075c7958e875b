// Package hostile shows what attacks on each port do to a sink beside them: it
// gets every change, memory stays bounded, and nothing crashes.
package hostile
