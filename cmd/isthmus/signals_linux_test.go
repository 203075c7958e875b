package main

import (
	"fmt"
	"os"
	"testing"

	"golang.org/x/sys/unix"
)

// A bridge whose terminal is closed ends in good order.
func TestClosedTerminal(t *testing.T) {
	t.Parallel()
	master, err := os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	number, err := unix.IoctlGetInt(int(master.Fd()), unix.TIOCGPTN)
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.IoctlSetPointerInt(int(master.Fd()), unix.TIOCSPTLCK, 0); err != nil {
		t.Fatal(err)
	}
	// Fd made it blocking; a reader must not keep it open.
	if err := unix.SetNonblock(int(master.Fd()), true); err != nil {
		t.Fatal(err)
	}
	terminal, err := os.OpenFile(fmt.Sprintf("/dev/pts/%d", number), os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	b := startBridge(t, surroundings{out: terminal, read: master, terminal: true})
	if err := master.Close(); err != nil {
		t.Fatal(err)
	}
	b.awaitEnd(exitFailed)
}
