//go:build unix

package testenv

import (
	"testing"
	"time"

	"github.com/isthmus-mesh/isthmus/internal/testwait"
)

// Patience bounds waits for what takes a second on an idle machine. It detects
// a hang and states nothing about performance.
const Patience = 3 * time.Minute

// Eventually is [testwait.Eventually].
func Eventually(t testing.TB, deadline time.Duration, what string, check func() (seen string, ok bool)) {
	t.Helper()
	testwait.Eventually(t, deadline, what, check)
}
