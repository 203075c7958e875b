package config

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"syscall"
)

// BuiltIn are the adapters that are part of the program, in alphabetical order. `isthmus adapter NAME` runs each of them.
var BuiltIn = []string{"consul", "file", "nacos", "sim"}

// PluginPrefix begins the file name of every executable in plugin_dir that is an adapter. What follows is the registry's type.
const PluginPrefix = "isthmus-adapter-"

// MaxSize is the largest configuration file that is read, in bytes.
const MaxSize = 4 << 20

// Config is the whole configuration. Get one from [Load] or [Parse]; the zero value is not usable.
type Config struct {
	Listen     Listen     `json:"listen" doc:"Where the bridge listens."`
	Registries []Registry `json:"registries" doc:"The registries that are followed, at least one. Each has a plugin process of its own."`
	PluginDir  string     `json:"plugin_dir" doc:"Directory of executables named isthmus-adapter-TYPE, for registries whose type is not built in. A relative path starts at the working directory of the bridge."`
	Profile    string     `json:"profile" doc:"Name of the profile that every sink gets. Empty: the profile is found by what a sink asks for, which is right unless a sink was built from changed sources; for istiod 1.23 name istio-1.23, see istiod.md."`
	Log        Log        `json:"log" doc:"The log, which goes to standard error."`
	Admin      Admin      `json:"admin" doc:"The admin pages and API."`
	Limits     Limits     `json:"limits" doc:"Bounds that keep a registry run wild from using up the machine."`
	MCP        MCP        `json:"mcp" doc:"The legacy Mesh Configuration Protocol of Istio 1.1 to 1.8."`
	Sinks      []Sink     `json:"sinks" doc:"Sinks of the legacy protocol that the bridge dials (reverse mode)."`

	file      string
	positions map[string]Position
	problems  Problems // that Parse found
}

// Listen says where the bridge listens. Port 0 takes any free port, which the
// log then tells.
type Listen struct {
	XDS   Listeners `json:"xds" doc:"The xDS server (SotW and delta, plaintext): an address as host:port, a block with one, or a list of either. Port 0 takes any free one."`
	Admin Listener  `json:"admin" doc:"Health checks, metrics, API and pages: an address as host:port, or a block with one. It has no access control: leave it on loopback or guard it."`
	MCP   Listener  `json:"mcp" doc:"A port of its own for the legacy Mesh Configuration Protocol, plaintext: an address as host:port, or a block with one. Empty: it is served on the ports of xds."`
}

// Listener is one port. In the file it is an address, or a block.
type Listener struct {
	Address string `json:"address" doc:"Address, as host:port."`
}

// String returns the address.
func (l Listener) String() string { return l.Address }

// Listeners are several ports. In the file they are one, or a list.
type Listeners []Listener

// Registry is one registry to follow.
type Registry struct {
	Name      string          `json:"name" doc:"Name of the registry, unique: lower-case letters, digits and dashes, at most 63. It is the namespace of the registry's resources unless translate.namespace says otherwise."`
	Type      string          `json:"type" doc:"The adapter: consul, file, nacos, sim, or the TYPE of an executable isthmus-adapter-TYPE in plugin_dir."`
	Config    json.RawMessage `json:"config" doc:"The adapter's own configuration; see the section of the adapter."`
	Translate json.RawMessage `json:"translate" doc:"How services of the registry become resources; see the section on translate."`
	Plugin    Plugin          `json:"plugin" doc:"The executable, for a type that is not built in."`
}

// Plugin pins the executable of a registry whose type is not built in.
type Plugin struct {
	SHA256 string `json:"sha256" doc:"SHA-256 of the executable, 64 hexadecimal digits. If given, another file is not started."`
}

// Log says what is logged, and how.
type Log struct {
	Level  string `json:"level" doc:"Least level that is logged: debug, info, warn or error."`
	Format string `json:"format" doc:"text or json."`
}

// Admin configures the admin pages and API.
type Admin struct {
	Pprof bool `json:"pprof" doc:"Whether /debug/pprof is there."`
}

// Limits are bounds. Each must be positive.
type Limits struct {
	ResourcesPerRegistry int `json:"resources_per_registry" doc:"How many resources one registry may have. What comes above is left out and listed."`
	BytesPerRegistry     int `json:"bytes_per_registry" doc:"How many bytes the resources of one registry may have together, as its plugin encodes them; one instance has some 300. What comes above is left out and listed; nothing that is served is removed for it. The bridge takes about three times as much memory, besides 1 kB for each resource."`
	Tombstones           int `json:"tombstones" doc:"How many removed names each collection remembers, so that a delta sink that comes back within them gets exactly what it lacks. One costs some 150 bytes."`
}

// MCP configures the legacy Mesh Configuration Protocol.
type MCP struct {
	Profile          string `json:"profile" doc:"Name of the profile that every sink of the legacy protocol gets. Empty: the profile is found by what a sink asks for."`
	SyntheticEntries bool   `json:"synthetic_entries" doc:"Whether Pilot 1.4 and 1.5 get ServiceEntries on their stream for synthetic ones, and not on their main stream."`
	FullState        bool   `json:"full_state" doc:"Whether every response holds all of a collection, even if a sink permits incremental ones."`
}

// Sink is a sink that the bridge dials.
type Sink struct {
	Address  string            `json:"address" doc:"gRPC target of the sink, such as pilot.example.org:9901 or dns:///pilot.example.org:9901."`
	TLS      SinkTLS           `json:"tls" doc:"TLS towards the sink. Files are in PEM and read for each connection."`
	Metadata map[string]string `json:"metadata" doc:"Headers that go with the call."`
}

// SinkTLS secures the connection to a sink.
type SinkTLS struct {
	Enabled    bool   `json:"enabled" doc:"Whether TLS is used at all."`
	CAFile     string `json:"ca_file" doc:"Certificates that may have signed the sink's. Empty: those of the system."`
	CertFile   string `json:"cert_file" doc:"Certificate of the bridge, for a sink that asks for one."`
	KeyFile    string `json:"key_file" doc:"Private key of that certificate."`
	ServerName string `json:"server_name" doc:"Name in the sink's certificate. Empty: the host of the address."`
}

// Default is what holds where the file says nothing.
var Default = Config{
	Listen: Listen{XDS: Listeners{{Address: "127.0.0.1:15051"}}, Admin: Listener{Address: "127.0.0.1:15080"}},
	Log:    Log{Level: "info", Format: "text"},
	Limits: Limits{ResourcesPerRegistry: 1_000_000, BytesPerRegistry: 512 << 20, Tombstones: 100_000},
}

// Options say what there is besides the file. The zero value works.
type Options struct {
	// LookupEnv finds an environment variable, [os.LookupEnv] if nil.
	LookupEnv func(name string) (string, bool)
	// Profiles are the names that profile may have; nil means that it is not checked.
	Profiles []string
	// MCPProfiles are the names that mcp.profile may have; nil means that it is not checked.
	MCPProfiles []string
}

// Load reads the configuration from a file. What is wrong with its content comes back as [Parse] has it; any other error is one of
// reading.
func Load(file string, o Options) (Config, error) {
	f, err := os.Open(file)
	if err != nil {
		return Config{}, readError(err)
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, MaxSize+1))
	if err != nil {
		return Config{}, readError(err)
	}
	return Parse(file, data, o)
}

// readError adds the cure to an error of reading the file.
func readError(err error) error {
	cure := ""
	switch {
	case errors.Is(err, fs.ErrNotExist):
		cure = "; a relative path starts at the working directory; docs/configuration.md has a configuration to begin with"
	case errors.Is(err, fs.ErrPermission):
		cure = "; make it readable for the user that runs isthmus"
	case errors.Is(err, syscall.EISDIR):
		cure = "; name the file in it"
	}
	return fmt.Errorf("read configuration: %w%s", err, cure)
}

// File returns the name of the file that c was read from, as it was given.
func (c *Config) File() string { return c.file }

// Built says whether the registry's adapter is part of the program.
func (r *Registry) Built() bool { return slices.Contains(BuiltIn, r.Type) }

// Executable returns the file of a plugin that is not built in.
func (c *Config) Executable(r *Registry) string {
	return filepath.Join(c.PluginDir, PluginPrefix+r.Type)
}

// Command returns what starts the registry's plugin: this program itself with the arguments "adapter TYPE", or an executable of
// plugin_dir without arguments, by its absolute path.
func (c *Config) Command(r *Registry) (path string, args []string, err error) {
	if r.Built() {
		if path, err = os.Executable(); err != nil {
			return "", nil, fmt.Errorf("registry %q: find the program's own file: %w", r.Name, err)
		}
		return path, []string{"adapter", r.Type}, nil
	}
	if path, err = filepath.Abs(c.Executable(r)); err != nil {
		return "", nil, fmt.Errorf("registry %q: find the plugin: %w", r.Name, err)
	}
	return path, nil, nil
}

// SlogLevel returns the level as slog has it.
func (l Log) SlogLevel() slog.Level {
	var level slog.Level
	_ = level.UnmarshalText([]byte(l.Level)) // a bad one was refused by Parse; Info otherwise
	return level
}

// Logger returns a logger that writes to w as configured.
func (l Log) Logger(w io.Writer) *slog.Logger {
	o := &slog.HandlerOptions{Level: l.SlogLevel()}
	if l.Format == "json" {
		return slog.New(slog.NewJSONHandler(w, o))
	}
	return slog.New(slog.NewTextHandler(w, o))
}
