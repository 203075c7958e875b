package testwait

import (
	"runtime/debug"
	"slices"
)

// Raced reports whether the test has the race detector, with which everything
// takes several times as long and as much memory.
func Raced() bool {
	info, ok := debug.ReadBuildInfo()
	return ok && slices.Contains(info.Settings, debug.BuildSetting{Key: "-race", Value: "true"})
}
