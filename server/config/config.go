package config

import (
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/isthmus-mesh/isthmus/internal/conf"
	"github.com/isthmus-mesh/isthmus/plugin/shard"
)

// PluginPrefix is the prefix of the file names of adapters in plugin_dir. The
// registry's type follows.
const PluginPrefix = "isthmus-adapter-"

// MaxSize bounds the configuration file, in bytes.
const MaxSize = 4 << 20

// Config is the whole configuration. Use [Load] or [Parse]; the zero value is
// not usable.
type Config struct {
	Listen     Listen     `json:"listen" doc:"Where the bridge listens."`
	Registries []Registry `json:"registries" doc:"The registries that are followed, at least one. Each has a plugin process of its own."`
	Conflicts  []Conflict `json:"conflicts" doc:"What to do with hosts that several registries, or several services of one registry, have. The first rule that matches a host applies. Without one the policy is priority."`
	Addresses  Addresses  `json:"addresses" doc:"The virtual addresses of hosts, by which proxies tell apart hosts that speak raw TCP on one port, and answer DNS."`
	Mesh       Mesh       `json:"mesh" doc:"What the bridge has to know of the mesh, to keep registries from publishing what is not theirs."`
	PluginDir  string     `json:"plugin_dir" doc:"Directory of executables named isthmus-adapter-TYPE, for registries whose type is not built in. A relative path starts at the working directory of the bridge."`
	Profile    string     `json:"profile" doc:"Name of the profile that every sink gets. Empty: the profile is found by what a sink asks for, which is right unless a sink was built from changed sources; for istiod 1.23 name istio-1.23, see istiod.md."`
	Log        Log        `json:"log" doc:"The log, which goes to standard error."`
	State      State      `json:"state" doc:"The last good state, which is kept on disk and served after a restart until the registries are followed again; see docs/operate/state.md."`
	Audit      Audit      `json:"audit" doc:"The record of who changed something by listen.admin, and of who was refused at a listener."`
	Admin      Admin      `json:"admin" doc:"The admin pages and API."`
	Limits     Limits     `json:"limits" doc:"Limits that keep a runaway registry from using up the machine."`
	Telemetry  Telemetry  `json:"telemetry" doc:"Export of traces and metrics to an OpenTelemetry collector. Off without an address."`
	MCP        MCP        `json:"mcp" doc:"The legacy Mesh Configuration Protocol of Istio 1.1 to 1.8."`
	Sinks      []Sink     `json:"sinks" doc:"Sinks of the legacy protocol that the bridge dials (reverse mode)."`
	Consumers  Consumers  `json:"consumers" doc:"Who is written to, as programs that do not ask the bridge. Nobody by default."`
	Drain      Duration   `json:"drain" doc:"How long a bridge that stops takes to end the streams of its sinks, 0s to 10m: one after the other, spread over that time. It exits up to 10 seconds later, and Kubernetes ends a pod after 30 by default."`

	file     string
	text     []byte
	adapters []string // built-in types
	doc      *conf.Document
	problems Problems // found by Parse
}

// Listen configures the addresses of the bridge. Port 0 selects a free port,
// which is logged.
type Listen struct {
	XDS   Listeners `json:"xds" doc:"The xDS server (SotW and delta): an address as host:port or unix:PATH, a block with one, or a list of either. Port 0 means any free one."`
	Admin Listener  `json:"admin" doc:"Health checks, metrics, API and pages: an address, or a block with one."`
	MCP   Listener  `json:"mcp" doc:"A port of its own for the legacy Mesh Configuration Protocol: an address, or a block with one. Empty: it is served on the ports of xds."`
}

// Listener is one port: in the file an address or a block.
type Listener struct {
	Address     string      `json:"address" doc:"Address, as host:port, or unix:PATH for a socket that the user and the group of the bridge may use."`
	TLS         ListenerTLS `json:"tls" doc:"TLS. Its files may be renewed at any time, and are read again then. Plaintext is refused."`
	Allow       []Allow     `json:"allow" doc:"Who may use the listener: whoever matches a rule, and nobody else. Without rules everyone may read."`
	TokenReview TokenReview `json:"token_review" doc:"How tokens of peer.service_account are checked."`
	View        View        `json:"view" doc:"What the listener serves; see docs/views.md. Without it everything. Not for listen.admin."`
	Hosts       []string    `json:"hosts" doc:"For listen.admin: names, or patterns such as *.example.org, by which it is reached, as the Host of a request. Always permitted are addresses, names without a dot, those of Services of a cluster (NAME.NAMESPACE.svc), that of address, and those of the certificate. Requests for others are refused, as a foreign web page may send them."`
	MaxAge      Duration    `json:"max_age" doc:"Greatest age of a connection that was let in by a certificate, token or password: it ends then, or up to a fifth earlier, so that its credential is checked again. Streams that no credential let in, such as istiod's, have none. At least 1m. Default: 1h."`
	Insecure    bool        `json:"insecure" doc:"Accept that everyone who reaches the address may use it, or reads what is sent. An address that is not loopback needs tls, allow, or this."`
}

// OldestConnection returns max_age or its default.
func (l Listener) OldestConnection() time.Duration {
	return cmp.Or(time.Duration(l.MaxAge), time.Hour)
}

// String returns the address.
func (l Listener) String() string { return l.Address }

// ListenerTLS is the TLS of a listener.
type ListenerTLS struct {
	CertFile      string `json:"cert_file" doc:"PEM file of the certificate, with those of intermediate authorities after it."`
	KeyFile       string `json:"key_file" doc:"PEM file of its private key."`
	ClientCAFile  string `json:"client_ca_file" doc:"PEM file of the authorities that may have signed certificates of clients."`
	ClientCRLFile string `json:"client_crl_file" doc:"PEM file of lists of certificates (CRL) that authorities of client_ca_file revoked. Each list is signed by one of these."`
	ClientAuth    string `json:"client_auth" doc:"none; request: the certificate of a client that has one is verified; require: each client must have one. Default: require with client_ca_file or workload_api, else none."`
	WorkloadAPI   string `json:"workload_api" doc:"Address of a SPIFFE Workload API, such as unix:///run/spire/agent.sock, that the certificate and the authorities of clients come from, in place of the files."`
	MinVersion    string `json:"min_version" doc:"Minimum version of TLS, 1.2 or 1.3. Default: 1.2."`
}

// TokenReview configures how the tokens of service accounts are checked: by a
// TokenReview of the API server of Kubernetes.
type TokenReview struct {
	Kubeconfig string `json:"kubeconfig" doc:"Kubeconfig with the API server and what the bridge identifies itself with there: a token or a certificate. Empty: the bridge runs in a pod, and does it as its own service account."`
	Audience   string `json:"audience" doc:"Audience that a token has to be made for. One that is made for another, such as the API server, is refused. Default: isthmus."`
}

// Audit configures the record of changes and refusals.
type Audit struct {
	File string `json:"file" doc:"File that lines of JSON are appended to. It may be renamed or removed at any time, as logrotate does, and is made again. Empty: they are lines of the log with msg=audit, whatever log.level is."`
}

// DefaultAudience is the default of token_review.audience.
const DefaultAudience = "isthmus"

// Values of client_auth.
const (
	ClientAuthNone    = "none"
	ClientAuthRequest = "request"
	ClientAuthRequire = "require"
)

// Verifies reports whether certificates of clients are verified.
func (t ListenerTLS) Verifies() bool {
	return t.ClientAuth != ClientAuthNone && (t.ClientCAFile != "" || t.WorkloadAPI != "")
}

// Enabled reports whether the block says anything.
func (t ListenerTLS) Enabled() bool { return t != ListenerTLS{} }

// Allow is a rule of a listener.
type Allow struct {
	Peer Peer   `json:"peer" doc:"Whom the rule matches: whoever meets all conditions given here."`
	Role string `json:"role" doc:"With listen.admin: read, or operate, which may also change something: decide on removals, reload, set the log level. Default: operate."`
	View View   `json:"view" doc:"The part of the listener's own view that callers of this rule receive. The first rule that matches decides. Empty: all of it. Not for listen.admin."`
}

// View selects what is served. A field that is not given selects everything.
type View struct {
	Registries  []string `json:"registries" doc:"Names of registries. A host that is merged from several belongs to the first of them."`
	Namespaces  []string `json:"namespaces" doc:"Namespaces of the resources."`
	Hosts       []string `json:"hosts" doc:"Patterns of hosts: * stands for any run of characters, as in *.service.consul. They select the ServiceEntries, VirtualServices and DestinationRules of these hosts and their instances, and nothing else."`
	Collections []string `json:"collections" doc:"Kinds of resources, such as networking.istio.io/ServiceEntry."`
	Shard       string   `json:"shard" doc:"A part of the services by a hash of their host: 3/16 is the fourth of sixteen, 0-3/16 the first four."`
}

// IsZero reports whether the view is everything.
func (v View) IsZero() bool { return reflect.DeepEqual(v, View{}) }

// Shards returns the shards of the view.
func (v View) Shards() shard.Set {
	s, _ := shard.Parse(v.Shard) // validated by Parse
	return s
}

// Roles at the admin address.
const (
	RoleRead    = "read"
	RoleOperate = "operate"
)

// Peer is a set of conditions for a caller.
type Peer struct {
	CIDR           string `json:"cidr" doc:"The address it calls from is in this block, such as 10.1.0.0/16, or is this one."`
	SPIFFE         string `json:"spiffe" doc:"The SPIFFE ID in its certificate fits this pattern: * stands for one segment of the path or a part of it, as in spiffe://cluster.local/ns/istio-system/sa/*. Needs client_ca_file or workload_api."`
	SAN            string `json:"san" doc:"A name in its certificate fits this pattern, such as *.example.org. Needs client_ca_file or workload_api."`
	SNI            string `json:"sni" doc:"The server name that it asks for in the TLS handshake fits this pattern. Needs tls. It distinguishes clients and proves nothing."`
	TokenFile      string `json:"token_file" doc:"It sends one of the bearer tokens of this file, one per line. The file may be renewed at any time."`
	ServiceAccount string `json:"service_account" doc:"It sends a token of a service account of Kubernetes that fits this pattern, NAMESPACE/NAME, such as tools/* for all of a namespace; see token_review."`
	PasswordFile   string `json:"password_file" doc:"With listen.admin: it sends the name and password of a user of this file, which htpasswd -B writes. The file may be renewed at any time."`
}

// Socket returns the path of a socket for an address of the form unix:PATH.
func (l Listener) Socket() (path string, ok bool) { return strings.CutPrefix(l.Address, "unix:") }

// Listeners are several ports: in the file one item or a list.
type Listeners []Listener

// Registry is one registry to follow.
type Registry struct {
	Name      string          `json:"name" doc:"Name of the registry, unique: lower-case letters, digits and dashes, at most 63. It is the namespace of the registry's resources unless translate.namespace says otherwise."`
	Type      string          `json:"type" doc:"The adapter: {adapters}, or the TYPE of an executable isthmus-adapter-TYPE in plugin_dir."`
	Config    json.RawMessage `json:"config" doc:"The adapter's own configuration; see the section of the adapter."`
	Translate json.RawMessage `json:"translate" doc:"How services of the registry become resources; see the section on translate."`
	Plugin    Plugin          `json:"plugin" doc:"The process of the adapter: what is started, and what it may do."`

	Required    bool     `json:"required" doc:"Whether the types of the registry wait until its first listing is complete, however long that takes. With false they are served without it once it is shown that it cannot be reached, or sync_timeout has passed; what it lists later is added."`
	SyncTimeout Duration `json:"sync_timeout" doc:"How long a first listing may take, counted from the start of the bridge. After it a registry that is not required is no longer waited for; for a required one the log says that its types wait, and nothing else changes."`
	Protect     Protect  `json:"protect" doc:"Which removals look like an accident and are paused; see docs/operate/removals.md."`
	Owns        Owns     `json:"owns" doc:"What the registry may publish. Everything else is rejected and listed; see docs/security.md."`
}

// Owns configures what a registry may say.
type Owns struct {
	Collections []string `json:"collections" doc:"Kinds of its resources, such as networking.istio.io/VirtualService; * stands for any run of characters but /, as in security.istio.io/*, and alone for every kind. Default: networking.istio.io/ServiceEntry and networking.istio.io/WorkloadEntry, and networking.istio.io/DestinationRule with translate.subsets.destination_rule."`
	Hosts       []string `json:"hosts" doc:"Patterns of its hosts: * stands for any run of characters, as in *.service.consul. Without one any host but those of the cluster. The host * and those of mesh.cluster_domain need a pattern of their own, such as *.shop.svc.cluster.local."`
	Namespaces  []string `json:"namespaces" doc:"Its namespaces; * stands for any run of characters. Without one any namespace for what is about hosts, and none for what is about workloads, such as an AuthorizationPolicy. mesh.root_namespace needs its full name there."`
	Addresses   []string `json:"addresses" doc:"Blocks of the addresses of its instances and hosts, such as 10.1.0.0/16. Without one any address. Loopback and link-local addresses, metadata services of clouds, multicast and IPv4 addresses in forms of IPv6 need a block within theirs, such as 127.0.0.0/8."`
	Labels      []string `json:"labels" doc:"Labels and annotations with a meaning to Istio (istio-locality, and what begins with istio.io/ or a domain below it) that its metadata may set, such as security.istio.io/tlsMode; * stands for any run of characters but /. Default: none. Those that translate sets need no permission."`
}

// Mesh describes the mesh.
type Mesh struct {
	ClusterDomain string `json:"cluster_domain" doc:"The domain of the cluster's own services, whose hosts are no registry's unless owns.hosts names them."`
	RootNamespace string `json:"root_namespace" doc:"The root namespace of the mesh, rootNamespace in its configuration: what is about workloads is about those of the whole mesh there, and no registry's unless owns.namespaces names it."`
}

// Protect configures which removals look accidental.
type Protect struct {
	MinShare    float64        `json:"min_share" doc:"A complete listing, or a run of removals within ten minutes, that would leave less than this share of the registry's services, or of their endpoints (half at most), is paused, with what the run removed before. A service that loses its last endpoint counts as lost, one that loses some as a part. 0 turns it off."`
	MinServices int            `json:"min_services" doc:"Number of services from which min_share applies. A complete listing without a single service is paused below it too."`
	Hold        Duration       `json:"hold" doc:"How long removals are paused, unless an operator decides before (isthmus removals)."`
	Service     ProtectService `json:"service" doc:"The same for the endpoints of one service."`
}

// ProtectService configures which removals of one service's endpoints look
// accidental.
type ProtectService struct {
	MinShare     float64 `json:"min_share" jsonschema:"default=0" doc:"Removals within ten minutes that would leave less than this share of a service's endpoints are paused. 0 turns it off: a service that has no endpoint in its registry has none in the mesh."`
	MinEndpoints int     `json:"min_endpoints" doc:"Number of endpoints of a service from which min_share applies."`
}

// Conflict is a rule for hosts that exist in several registries, or several
// times in one.
type Conflict struct {
	Hosts    []string       `json:"hosts" doc:"The hosts, as patterns: * stands for any run of characters, dots included, ? for one, and [a-c] for one of several; *.example.org fits every host of that domain, * every host."`
	Registry string         `json:"registry" doc:"A registry: the rule is for hosts that several of its own services have. Empty: it is for hosts that several registries have."`
	Policy   string         `json:"policy" doc:"priority: the first registry of the configuration that has the host serves it, the services of the others are shadowed and listed, and the next one takes over when the first has it no longer. isolate: each service is served in its own namespace. merge: the first service is served with the endpoints of all. Of the services of one registry, the first is that by name (namespace/name)."`
	Weights  map[string]int `json:"weights" doc:"With merge, the share of traffic by registry, 0 to 1000, at least one above 0: {old: 90, new: 10}. None of the endpoints of a registry with 0 is served; one that is not named is shadowed. Without weights every endpoint has its own weight."`
}

// Addresses configures the addresses of hosts.
type Addresses struct {
	CIDR string `json:"cidr" doc:"The network that they are taken from, by a hash of the host: IPv4 or IPv6, used by nothing else, of 256 addresses or more. With 100 times as many addresses as hosts, one host in some 10,000 has none, which is listed. Another network gives every host another address. Empty: 241.0.0.0 to 250.255.255.255, which is reserved and routed nowhere."`
}

// Network returns the network, the zero value if none is configured.
func (a Addresses) Network() netip.Prefix {
	p, _ := netip.ParsePrefix(a.CIDR) // validated by Parse
	return p
}

// Plugin configures the process of a registry's plugin.
type Plugin struct {
	SHA256      string   `json:"sha256" doc:"SHA-256 of the executable, 64 hexadecimal digits, for a type that is not built in. If given, another file is not started."`
	PublicKey   string   `json:"public_key" doc:"Key that minisign -G has written, for a type that is not built in. If given, only an executable is started whose signature of that key is beside it, in a file of its name and .minisig, as minisign -S writes it."`
	Env         []string `json:"env" doc:"Names of variables of the bridge's environment that the process gets, besides those by which a program finds its surroundings; see docs/security.md. Values for config are written there as ${NAME} and need none."`
	User        string   `json:"user" doc:"Name or number of the user that the process runs as; only a bridge that runs as root can do that. The program and the files of config must be readable for it. Default: that of the bridge."`
	Confinement string   `json:"confinement" doc:"required: the registry is not followed, and the bridge does not start, where the process cannot give up what it does not need: without Landlock or seccomp in the kernel, or with an adapter that does not do that. Empty: what is not in force is shown."`
	Confine     bool     `json:"confine" doc:"Whether the process gives up, once it is configured, what it does not need: other files, other TCP ports, programs. Every built-in adapter but exec does so, where the kernel lets it; see docs/security.md."`
}

// AutoDir is the value of state.dir that selects the default directory: see
// [Config.StateDir].
const AutoDir = "auto"

// State configures where the last good state is stored.
type State struct {
	Dir string `json:"dir" doc:"Directory of the last good state, of this bridge alone. auto: one for this configuration file, in isthmus of STATE_DIRECTORY, XDG_STATE_HOME or ~/.local/state. Empty: none is kept. A relative path starts at the working directory of the bridge."`
}

// Log configures the log.
type Log struct {
	Level  string `json:"level" doc:"Lowest level that is logged: debug, info, warn or error."`
	Format string `json:"format" doc:"text or json."`
}

// Admin configures the admin pages and API.
type Admin struct {
	Pprof       bool `json:"pprof" doc:"Whether /debug/pprof is there."`
	GuardProbes bool `json:"guard_probes" doc:"Whether the rules of listen.admin apply to /healthz and /readyz, too. /readyz names registries and what is wrong with them."`
}

// Telemetry configures the export to an OpenTelemetry collector.
type Telemetry struct {
	Address  string            `json:"address" doc:"Address of the collector, host:port, for OTLP over gRPC, such as 127.0.0.1:4317. Empty: nothing is exported."`
	TLS      SinkTLS           `json:"tls" doc:"TLS towards the collector. Files are in PEM."`
	Headers  map[string]string `json:"headers" doc:"Headers that go with each call, such as the key of a service."`
	Traces   float64           `json:"traces" doc:"The share of changes that are traced from the registry to the ACK of each sink, 0 to 1."`
	Interval Duration          `json:"interval" doc:"The time between two exports of the metrics. 0s: metrics are not exported."`
}

// Limits are bounds. Each is positive, unless it says what 0 means.
type Limits struct {
	ResourcesPerRegistry int `json:"resources_per_registry" doc:"How many resources one registry may have. What exceeds that is left out and listed. By default at most one for each 10240 bytes of memory that the registry has a share of."`
	ServicesPerRegistry  int `json:"services_per_registry" doc:"How many services, which are ServiceEntries, are among these. A service takes several times as much as an instance, and a mesh much more. What exceeds that is left out and listed, with its instances. By default at most one for each 24576 bytes of memory that the registry has a share of."`
	BytesPerRegistry     int `json:"bytes_per_registry" doc:"How many bytes the resources of one registry may have together, as its plugin encodes them; one instance has some 300. What exceeds that is left out and listed; nothing that is served is removed for it. The bridge takes about three times as much memory, besides 1 kB for each resource. By default at most a 24th of the memory that the registry has a share of."`
	ConnectionsPerPeer   int `json:"connections_per_peer" doc:"How many connections one IP address may have, on all ports together. More are closed at once."`
	Streams              int `json:"streams" doc:"How many streams all sinks may have together. More are refused with ResourceExhausted. One that asks for twenty names takes some 20 kB. By default at most a sixteenth of the memory, at 20 KiB each."`
	RequestBytes         int `json:"request_bytes" doc:"How many bytes of requests may be in memory before they are handled, on all ports together. Beyond it connections of the IP address that takes most are closed. One request may have 67108864 (64 MiB). By default at most a sixteenth of the memory."`
	RetainedBytes        int `json:"retained_bytes" doc:"How many bytes of names, versions and types of resources the bridge keeps for all streams together, as it counts them: 200 and more for each name besides its length. A stream may have a quarter, an IP address or a verified identity half. Beyond it streams of whoever has most are ended with ResourceExhausted. By default at most a sixteenth of the memory."`
	ResponseBytes        int `json:"response_bytes" doc:"How many bytes of responses may be in memory until they are sent. Half is for pages that sinks share; of the rest first responses may take half, and an IP address or a verified identity half of that. Others wait for their turn, and connections that do not read what others wait for are closed. By default at most a sixteenth of the memory."`
	PluginMemory         int `json:"plugin_memory" jsonschema_extras:"x-zero=true" doc:"How many bytes of memory one plugin process may take, on Linux. One that needs more ends, is started again after a pause, and is shown with the reason; what it had listed stays. It holds 1,000,000 instances in some 1 GB. 0: no bound. By default at most half of the memory that the registry has a share of, and at least 134217728 (128 MiB)."`
	PluginFiles          int `json:"plugin_files" jsonschema_extras:"x-zero=true" doc:"How many files, sockets among them, one plugin process may have open, on Linux. 0: no bound but that of the bridge."`
	Tombstones           int `json:"tombstones" doc:"How many removed names each collection remembers, so that a delta sink that reconnects in time gets exactly what it lacks. One costs some 150 bytes."`
}

// MCP configures the legacy Mesh Configuration Protocol.
type MCP struct {
	Profile          string `json:"profile" doc:"Name of the profile that every sink of the legacy protocol gets. Empty: the profile is found by what a sink asks for."`
	SyntheticEntries bool   `json:"synthetic_entries" doc:"Whether Pilot 1.4 and 1.5 get ServiceEntries on their stream for synthetic ones, and not on their main stream."`
	FullState        bool   `json:"full_state" doc:"Whether every response contains all of a collection, even if a sink permits incremental ones."`
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

// Default holds the values of missing fields.
var Default = Config{
	Listen: Listen{XDS: Listeners{{Address: "127.0.0.1:15051"}}, Admin: Listener{Address: "127.0.0.1:15080"}},
	Mesh:   Mesh{ClusterDomain: "cluster.local", RootNamespace: "istio-system"},
	State:  State{Dir: AutoDir},
	Log:    Log{Level: "info", Format: "text"},
	Drain:  Duration(5 * time.Second),

	Telemetry: Telemetry{Traces: 0.01, Interval: Duration(time.Minute)},

	Limits: Limits{ResourcesPerRegistry: 1_000_000, ServicesPerRegistry: 250_000, BytesPerRegistry: 512 << 20, ConnectionsPerPeer: 1000, Streams: 20_000, RequestBytes: 256 << 20, RetainedBytes: 256 << 20, ResponseBytes: 256 << 20, PluginMemory: 4 << 30, PluginFiles: 4096, Tombstones: 100_000},
}

// DefaultRegistry holds the values of missing fields of a registry.
var DefaultRegistry = Registry{
	Required:    true,
	SyncTimeout: Duration(time.Minute),
	Plugin:      Plugin{Confine: true},
	Protect:     Protect{MinShare: 0.5, MinServices: 10, Hold: Duration(10 * time.Minute), Service: ProtectService{MinEndpoints: 10}},
}

// Options describe the environment of the file. The zero value is usable.
type Options struct {
	// Adapters are the built-in types of registries, in alphabetical order.
	Adapters []string
	// LookupEnv looks up an environment variable; nil means [os.LookupEnv].
	LookupEnv func(name string) (string, bool)
	// Profiles are the valid values of profile; nil disables the check.
	Profiles []string
	// MCPProfiles are the valid values of mcp.profile; nil disables the check.
	MCPProfiles []string
	// Unexpanded retains variables unexpanded and checks only what
	// [Config.Diff] requires, to compare two files without their secrets.
	Unexpanded bool
}

// Load reads the configuration from a file. Errors in its content are those of
// [Parse]; any other is an error of reading.
func Load(file string, o Options) (Config, error) {
	data, err := Read(file)
	if err != nil {
		return Config{}, err
	}
	return Parse(file, data, o)
}

// Read returns the content of a configuration file, at most a byte more than
// [MaxSize].
func Read(file string) ([]byte, error) {
	f, err := os.Open(file)
	if err != nil {
		return nil, readError(err)
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, MaxSize+1))
	if err != nil {
		return nil, readError(err)
	}
	return data, nil
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

// File returns the file name as it was passed to Load or Parse.
func (c *Config) File() string { return c.file }

// StateDir returns the absolute path of the directory of the last good state,
// "" if it is disabled.
func (c *Config) StateDir() (string, error) {
	if c.State.Dir == "" {
		return "", nil
	}
	if c.State.Dir != AutoDir {
		return filepath.Abs(c.State.Dir)
	}
	base, err := stateHome()
	if err != nil {
		return "", err
	}
	file, err := filepath.Abs(c.file)
	if err != nil {
		return "", err
	}
	// Links are not resolved: an orchestrator changes their targets with each
	// version of the file.
	sum := sha256.Sum256([]byte(file))
	name := filepath.Base(file)
	return filepath.Join(base, fmt.Sprintf("%s-%x", strings.TrimSuffix(name, filepath.Ext(name)), sum[:6])), nil
}

// stateHome returns the parent of the user's state directories.
func stateHome() (string, error) {
	// Set by systemd for StateDirectory=.
	if dir, _, _ := strings.Cut(os.Getenv("STATE_DIRECTORY"), ":"); filepath.IsAbs(dir) {
		return dir, nil
	}
	if dir := os.Getenv("XDG_STATE_HOME"); filepath.IsAbs(dir) {
		return filepath.Join(dir, "isthmus"), nil
	}
	home, err := os.UserHomeDir()
	if err != nil {
		return "", err
	}
	return filepath.Join(home, ".local", "state", "isthmus"), nil
}

// Hash returns the SHA-256 of the configuration file in hexadecimal digits, as
// sha256sum prints it.
func (c *Config) Hash() string {
	sum := sha256.Sum256(c.text)
	return hex.EncodeToString(sum[:])
}

// Text returns the content of the configuration file, which may contain
// secrets.
func (c *Config) Text() []byte { return c.text }

// Unexpanded returns the configuration with the names of variables instead of
// their values.
func (c *Config) Unexpanded() (Config, error) {
	return Parse(c.file, c.text, Options{Adapters: c.adapters, Unexpanded: true})
}

// Adapters returns the built-in types of registries, as set in Options.
func (c *Config) Adapters() []string { return c.adapters }

// Built reports whether the registry's adapter is built in.
func (c *Config) Built(r *Registry) bool { return slices.Contains(c.adapters, r.Type) }

// Executable returns the path of a plugin that is not built in.
func (c *Config) Executable(r *Registry) string {
	return filepath.Join(c.PluginDir, PluginPrefix+r.Type)
}

// Command returns the command of the registry's plugin: this program with the
// arguments "adapter TYPE", or the absolute path of an executable in
// plugin_dir, without arguments.
func (c *Config) Command(r *Registry) (path string, args []string, err error) {
	if c.Built(r) {
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

// Levels returns the values of log.level, the most detailed first.
func Levels() []string { return []string{"debug", "info", "warn", "error"} }

// SlogLevel returns the level as a slog.Level.
func (l Log) SlogLevel() slog.Level {
	var level slog.Level
	_ = level.UnmarshalText([]byte(l.Level)) // validated by Parse; Info otherwise
	return level
}

// Logger returns a logger that writes to w as configured.
func (l Log) Logger(w io.Writer) *slog.Logger { return l.LoggerAt(w, l.SlogLevel()) }

// LoggerAt returns a logger that writes to w as configured, except for the
// level.
func (l Log) LoggerAt(w io.Writer, level slog.Leveler) *slog.Logger {
	o := &slog.HandlerOptions{Level: level}
	if l.Format == "json" {
		return slog.New(slog.NewJSONHandler(w, o))
	}
	return slog.New(slog.NewTextHandler(w, o))
}
