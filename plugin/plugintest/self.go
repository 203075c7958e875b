package plugintest

import (
	"errors"
	"fmt"
	"os"
)

// selfKey is the environment variable that makes a test binary the plugin.
const selfKey = "ISTHMUS_PLUGINTEST_SELF"

var selfCalled bool

// Self makes the test binary serve as the plugin, for [Conformance] without a
// command. Call it first in TestMain, with the adapter's main function, which
// does not return:
//
//	func TestMain(m *testing.M) {
//		plugintest.Self(func() { Main("test") })
//		goleak.VerifyTestMain(m)
//	}
func Self(main func()) {
	selfCalled = true
	if os.Getenv(selfKey) != "" {
		main()
		panic("BUG: the adapter's main function has returned")
	}
}

// self makes the test binary the command.
func self(c *Config) error {
	if !selfCalled {
		return errors.New("no command is given, and TestMain does not call plugintest.Self")
	}
	path, err := os.Executable()
	if err != nil {
		return fmt.Errorf("find the test binary: %w", err)
	}
	c.Command = []string{path}
	c.Env = append(append([]string{}, c.Env...), selfKey+"=1")
	return nil
}
