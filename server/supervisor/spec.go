package supervisor

import (
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
)

// Spec says what to run for one registry.
type Spec struct {
	// Registry is the configured name of the registry. Required.
	Registry string
	// Adapter is the name that the plugin must give itself. Empty: any.
	Adapter string
	// Command is the executable and its arguments. Required.
	Command []string
	// Env is added to the environment of the bridge, as "KEY=VALUE".
	Env []string
	// SHA256 is the checksum that the executable must have, in hexadecimal digits. Empty: any.
	SHA256 string
	// Config is the registry's config block as a JSON object. Empty: {}.
	Config json.RawMessage
	// Translate is the registry's translate block as a JSON object. Empty: {}.
	Translate json.RawMessage
	// Resources and Bytes bound what the sink keeps of the registry, for the plugin to leave out what is beyond. 0: not told.
	Resources, Bytes int
}

// Validate returns everything that is wrong with the spec, joined.
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

// ExecutablePrefix begins the file names of adapters in a plugin directory.
const ExecutablePrefix = "isthmus-adapter-"

var adapterName = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]*[a-z0-9])?$`)

// Discover returns the path of each adapter in a plugin directory, by the adapter's name: the executable files that are called
// isthmus-adapter-NAME.
func Discover(dir string) (map[string]string, error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, fmt.Errorf("plugin directory: %w", err)
	}
	found := make(map[string]string)
	for _, e := range entries {
		name, ok := strings.CutPrefix(e.Name(), ExecutablePrefix)
		if !ok || !adapterName.MatchString(name) {
			continue
		}
		path := filepath.Join(dir, e.Name())
		info, err := os.Stat(path) // follows a link
		if err != nil || !info.Mode().IsRegular() || info.Mode()&0o111 == 0 {
			continue
		}
		if path, err = filepath.Abs(path); err != nil {
			return nil, fmt.Errorf("plugin directory: %w", err)
		}
		found[name] = path
	}
	return found, nil
}
