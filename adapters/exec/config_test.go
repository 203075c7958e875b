package exec

import (
	"strings"
	"testing"
	"time"

	"github.com/isthmus-mesh/isthmus/plugin"
)

// A command is enough.
func TestMinimalConfig(t *testing.T) {
	a, err := New(Config{Command: []string{"follow"}}, plugin.Env{})
	if err != nil {
		t.Fatal(err)
	}
	if got := a.(*Adapter).config.Timeout; got != DefaultConfig.Timeout {
		t.Errorf("timeout %v", got)
	}
}

// Everything that is wrong is found, at its place.
func TestValidate(t *testing.T) {
	c := Config{
		Command: []string{"", "a\x00"}, Env: map[string]plugin.Secret{"A=B": "c"}, Interval: 1, Timeout: plugin.Duration(2 * time.Hour),
		Silence: 1, RemoveGrace: plugin.Duration(2 * time.Hour), MinShare: 2,
	}
	err := c.Validate()
	for _, field := range []string{"command[0]", "command[1]", "env", "interval", "timeout", "silence", "remove_grace", "min_share"} {
		if err == nil || !strings.Contains(err.Error(), field+":") {
			t.Errorf("nothing about %s in %v", field, err)
		}
	}
	if err := (Config{MinShare: 0.5}).Validate(); err == nil || !strings.Contains(err.Error(), "command: is missing") || !strings.Contains(err.Error(), "min_share: is for") {
		t.Errorf("%v", err)
	}
}
