//go:build !linux

package plugin

import "errors"

// enforce does nothing: only Linux lets a process confine itself.
func (*confinement) enforce(Access) (version int, seccomp, err error) {
	return 0, errors.New("this system cannot"), nil
}
