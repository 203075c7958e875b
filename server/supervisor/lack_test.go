//go:build !linux

package supervisor_test

func lack(string) {}
