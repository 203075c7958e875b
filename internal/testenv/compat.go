package testenv

import "os"

// Compat reports whether the tests run for the wide matrix of servers, as make
// compat has them: those of every version run against the versions that make
// ci leaves out, and only those.
func Compat() bool { return os.Getenv("ISTHMUS_COMPAT") != "" }

// Main reports whether only the main paths are tested, as make test has them,
// against one version of each server: see [Tool.Main]. What needs another one
// is skipped, and runs in make ci.
func Main() bool { return os.Getenv("ISTHMUS_MAIN") != "" }
