package supervisor

import (
	"context"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"regexp"
	"time"

	"aead.dev/minisign"

	pluginv1 "github.com/isthmus-mesh/isthmus/plugin/proto/isthmus/plugin/v1"
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
	// Env is added to the plugin's environment, as "KEY=VALUE".
	Env []string
	// EnvNames are variables of the bridge's environment that the plugin gets,
	// besides those that every plugin gets.
	EnvNames []string
	// User is the name or number of the user that the process runs as, if the
	// bridge runs as root. Empty: the bridge's own.
	User string
	// SHA256 is the required checksum of the executable, in hexadecimal digits.
	// Empty: any.
	SHA256 string
	// PublicKey is the minisign key that the executable must be signed with;
	// the signature is in a file beside it, with SignatureSuffix. Empty: none.
	PublicKey string
	// Unconfined asks the plugin to keep rights that it does not need.
	Unconfined bool
	// Confinement is ConfinementRequired to refuse a plugin that cannot give up
	// these rights, or empty.
	Confinement string
	// Config is the registry's config block as a JSON object. Empty: {}.
	Config json.RawMessage
	// Translate is the registry's translate block as a JSON object. Empty: {}.
	Translate json.RawMessage
	// Labels are patterns of the labels with a meaning to Istio that the
	// registry may set.
	Labels []string
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
	// OpenFiles bounds the files that the process may have open, sockets
	// included. 0: no bound. Linux only.
	OpenFiles int
	// Open, if set, returns the plugin, and no process is started: a simulation
	// has its plugins in its own process.
	Open func(ctx context.Context) (pluginv1.AdapterServiceClient, error)
	// Pace is how often the time that a message took passes before the next one
	// is read, so that a registry that changes without end leaves time to
	// others: it has a share of 1/(1+Pace). A plugin sends what changed
	// meanwhile at once. 0 means [DefaultPace], a negative number no pause. A
	// listing has none, while it is within Resources.
	Pace int
	// Jitter returns a duration from 0 up to the given one, by which a pause is
	// shortened. Nil is at random.
	Jitter func(most time.Duration) time.Duration
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
	if s.Open == nil && (len(s.Command) == 0 || s.Command[0] == "") {
		all = append(all, errors.New("there is no command"))
	}
	if _, err := s.checksum(); err != nil {
		all = append(all, err)
	}
	if _, err := s.key(); err != nil {
		all = append(all, err)
	}
	return errors.Join(all...)
}

// key returns the key of PublicKey.
func (s Spec) key() (key minisign.PublicKey, err error) {
	if s.PublicKey != "" {
		err = key.UnmarshalText([]byte(s.PublicKey))
	}
	return key, err
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
