package testenv

import "os"

// Compat reports whether the tests run for the wide matrix of servers, as make
// compat has them: those of every version run against the versions that make
// test leaves out, and only those.
func Compat() bool { return os.Getenv("ISTHMUS_COMPAT") != "" }
