// Package hangup receives SIGHUP from the first moments of a process.
//
// Go initializes packages in the order of their paths where imports do not
// decide, so this one comes before the large ones, and long before main: until
// a signal is asked for, it ends the process.
package hangup

import (
	"os"
	"os/signal"
	"slices"
	"syscall"
)

// Signals has a SIGHUP that came since the start of a process that serves; one
// that is pending stands for many. Other commands get none.
var Signals = func() chan os.Signal {
	c := make(chan os.Signal, 1)
	if slices.Contains(os.Args[1:], "serve") {
		signal.Notify(c, syscall.SIGHUP)
	}
	return c
}()
