// Package bench shows that isthmus bench measures what it says, on the servers
// that it is compared with.
package bench
