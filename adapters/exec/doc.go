// Package exec is the adapter that follows what any program prints.
//
// # How it watches
//
// The program writes JSON, one object per line, in the words of
// plugin/registry. It either stays, lists everything, says "synced" and goes on
// with changes, or it is started again and again, as plugin.Poll does, and
// prints everything each time.
//
// # What is believed
//
// The end of a program that is to stay, and a run that fails, are outages and
// remove nothing. A listing removes what it does not mention only if every line
// of it could be read.
package exec
