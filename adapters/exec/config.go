package exec

import (
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/isthmus-mesh/isthmus/plugin"
)

// Config is the config block of a registry of type exec. Missing fields default
// to DefaultConfig.
type Config struct {
	Command []string                 `json:"command,omitempty" jsonschema:"minItems=1" jsonschema_description:"The program and its arguments, without a shell. A name without a slash is looked up in PATH of env, or in the system's usual directories. Required."`
	Env     map[string]plugin.Secret `json:"env,omitempty" jsonschema_description:"The whole environment of the program, by name: it gets no variable of the bridge's own. A value may contain ${NAME}."`
	Dir     string                   `json:"dir,omitempty" jsonschema_description:"Working directory of the program. Default: that of the bridge."`

	Interval plugin.Duration `json:"interval,omitempty" jsonschema_description:"Start the program this often, 100ms to 24h; each run prints everything and exits. Without it the program keeps running and prints changes as they happen."`
	Timeout  plugin.Duration `json:"timeout,omitempty" jsonschema_description:"How long one run of a program with an interval may take, 100ms to 1h. Default: 1m."`
	Silence  plugin.Duration `json:"silence,omitempty" jsonschema_description:"How long a program without an interval may print nothing before it counts as hung and is started again, 1s to 24h. Default: without end."`

	RemoveGrace plugin.Duration `json:"remove_grace,omitempty" jsonschema_description:"How long missing instances are kept after an outage, at most 1h. Default: not at all."`
	MinShare    float64         `json:"min_share,omitempty" jsonschema:"minimum=0,maximum=1" jsonschema_description:"With an interval: share of the known instances that a run must still print to be believed at once. With less, missing ones are kept for remove_grace. 0 believes every share."`
	AcceptEmpty bool            `json:"accept_empty,omitempty" jsonschema_description:"Believe an empty listing. By default it removes nothing."`
}

// DefaultConfig holds the defaults that a configuration is decoded over.
var DefaultConfig = Config{Timeout: plugin.Duration(time.Minute)}

// Validate returns all errors of the configuration, as *plugin.FieldError
// joined.
func (c Config) Validate() error {
	var errs []error
	bad := func(field, format string, args ...any) {
		errs = append(errs, &plugin.FieldError{Field: field, Reason: fmt.Sprintf(format, args...)})
	}
	switch {
	case len(c.Command) == 0:
		bad("command", "is missing; give a list of the program and its arguments, such as [python3, -u, follow.py]")
	case c.Command[0] == "":
		bad("command[0]", "is empty; it is the program")
	}
	for i, arg := range c.Command {
		if strings.ContainsRune(arg, 0) {
			bad(fmt.Sprintf("command[%d]", i), "has a zero byte")
		}
	}
	for _, name := range slices.Sorted(maps.Keys(c.Env)) {
		if name == "" || strings.ContainsAny(name, "=\x00") || strings.ContainsRune(string(c.Env[name]), 0) {
			bad("env", "%q is not a name of a variable, or its value has a zero byte", name)
		}
	}
	within := func(field string, d plugin.Duration, least, most time.Duration) {
		if d != 0 && (time.Duration(d) < least || time.Duration(d) > most) {
			bad(field, "%v is outside %v to %v", d, least, most)
		}
	}
	within("interval", c.Interval, 100*time.Millisecond, 24*time.Hour)
	within("timeout", c.Timeout, 100*time.Millisecond, time.Hour)
	within("silence", c.Silence, time.Second, 24*time.Hour)
	within("remove_grace", c.RemoveGrace, 0, time.Hour)
	if !(c.MinShare >= 0 && c.MinShare <= 1) {
		bad("min_share", "%v is outside 0 to 1", c.MinShare)
	}
	if c.Interval != 0 && c.Silence != 0 {
		bad("silence", "is for a program without an interval; timeout bounds one with an interval")
	}
	if c.Interval == 0 && c.MinShare != 0 {
		bad("min_share", "is for a program with an interval; one that stays says itself what is complete")
	}
	return errors.Join(errs...)
}

// usualPath is where programs are looked up without a PATH in env.
const usualPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// name returns the name of the program, for display. Arguments may be secret.
func (c Config) name() string { return filepath.Base(c.Command[0]) }
