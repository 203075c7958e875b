package supervisor

import (
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"regexp"

	"github.com/isthmus-mesh/isthmus/plugin/shard"
)

// Spec describes the plugin of one registry.
type Spec struct {
	// Registry is the configured name of the registry. Required.
	Registry string
	// Adapter is the required adapter name. Empty: any.
	Adapter string
	// Command is the executable and its arguments. Required.
	Command []string
	// Env is added to the bridge's environment, as "KEY=VALUE".
	Env []string
	// SHA256 is the required checksum of the executable, in hexadecimal digits.
	// Empty: any.
	SHA256 string
	// Config is the registry's config block as a JSON object. Empty: {}.
	Config json.RawMessage
	// Translate is the registry's translate block as a JSON object. Empty: {}.
	Translate json.RawMessage
	// Resources, Services and Bytes are the sink's limits for the registry, so
	// that the plugin can omit the excess. 0: not sent.
	Resources, Services, Bytes int
	// Shards are the shards of the hosts that the plugin is asked for.
	Shards shard.Set
	// Memory bounds the private writable memory of the process, in bytes
	// (getrlimit(2), RLIMIT_DATA); for a Go program that is the memory obtained
	// from the system. A Go plugin collects garbage before it reaches the limit
	// (GOMEMLIMIT). 0: no bound. Linux only.
	Memory int
	// Successor marks a registry that already has a supervisor. That one keeps
	// the registry's metrics until [Supervisor.Run], and must step aside and
	// end before it.
	Successor bool
}

// Validate returns all errors of the spec, joined.
func (s Spec) Validate() error {
	var all []error
	if s.Registry == "" {
		all = append(all, errors.New("the registry has no name"))
	}
	if len(s.Command) == 0 || s.Command[0] == "" {
		all = append(all, errors.New("there is no command"))
	}
	if _, err := s.checksum(); err != nil {
		all = append(all, err)
	}
	return errors.Join(all...)
}

func (s Spec) checksum() ([]byte, error) {
	if s.SHA256 == "" {
		return nil, nil
	}
	sum, err := hex.DecodeString(s.SHA256)
	if err != nil || len(sum) != 32 {
		return nil, fmt.Errorf("sha256 %q: must be 64 hexadecimal digits", s.SHA256)
	}
	return sum, nil
}

var adapterName = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]*[a-z0-9])?$`)
