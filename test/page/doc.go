// Package page tests the admin pages in a real browser.
package page
