// Package testbrowser gets a browser for tests of pages.
//
// Chromium is Debian's, installed with apt-get where it is absent (a minute, as
// root); axe comes from npm (seconds).
package testbrowser
