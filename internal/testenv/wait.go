package testenv

import (
	"time"

	"github.com/isthmus-mesh/isthmus/internal/testwait"
)

const (
	// Patience bounds waits for what takes a second on an idle machine. It
	// detects a hang and states nothing about performance.
	Patience = 3 * time.Minute
	// AdminTime bounds one request of a test to the HTTP API. Some requests,
	// such as the creation of a user, hash a password, which is slow on a busy
	// machine.
	AdminTime = time.Minute
	// CallTime bounds one call of a client to a backend.
	CallTime = 5 * time.Second
)

// Eventually is [testwait.Eventually].
var Eventually = testwait.Eventually
