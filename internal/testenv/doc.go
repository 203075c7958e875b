// Package testenv starts, waits for and ends the real servers that Isthmus is
// tested against.
//
// A [Tool] is a program that is pinned in tools/, fetched by whichever test
// asks first, and kept by version in the user's cache directory. A [Process]
// runs it on free loopback ports in a temporary folder and ends with the test;
// its output is in the test's artifact directory and, if the test failed, in
// its log. Each server has a package of its own below this one, which says
// where it comes from, what starts it and how long that takes.
//
// Tests are skipped with -short, never when CI=true; those that need a server
// which is not on the main paths are skipped by make test and run by make ci.
// If a server cannot be had the test fails with the reason. Every wait has a
// deadline, and reports at the deadline what it observed instead.
package testenv
