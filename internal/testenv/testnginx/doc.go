// Package testnginx runs nginx as a proxy before the servers of tests.
//
// It is Debian's, unpacked and not installed (seconds), and starts at once.
package testnginx
