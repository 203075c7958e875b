package consul

import (
	"cmp"
	"errors"
	"fmt"
	"net"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/hashicorp/consul/api"

	"github.com/isthmus-mesh/isthmus/plugin"
)

// Config is the config block of a registry of type consul. Missing fields
// default to DefaultConfig.
type Config struct {
	Address   string        `json:"address,omitempty" jsonschema_description:"Consul agent or server: http://host:port, https://host:port, host:port (see scheme) or unix:///path/to/socket. A path after the port is a prefix of every request."`
	Addresses []string      `json:"addresses,omitempty" jsonschema_description:"Several agents or servers of one datacenter, instead of address and in its syntax. The first is used until it fails, then the next; the reasons are in the registry's detail. They differ in host and port alone."`
	Scheme    string        `json:"scheme,omitempty" jsonschema:"enum=http,enum=https" jsonschema_description:"Scheme of an address that names none. Default: http."`
	Mode      string        `json:"mode,omitempty" jsonschema:"enum=auto,enum=address,enum=peering" jsonschema_description:"auto: where address is plain HTTP and the same agent has an https port with a certificate that tls or the system trusts, use that port. address: use address and nothing else. peering (experimental): be a cluster peer, told of every change over one connection; see peering. A tls block beside a plain address needs mode: auto in writing. Default: auto."`
	Peering   PeeringConfig `json:"peering,omitempty" jsonschema_description:"For mode: peering."`
	Token     plugin.Secret `json:"token,omitempty" jsonschema_description:"ACL token, usually as ${NAME} from the environment. It needs service_prefix \"\" read and node_prefix \"\" read."`
	TokenFile string        `json:"token_file,omitempty" jsonschema_description:"File that holds the ACL token. It must be there at the start, and is read again for every request, so a rotated token is picked up."`
	TLS       plugin.TLS    `json:"tls,omitempty" jsonschema_description:"TLS towards Consul, for https."`
	Insecure  bool          `json:"insecure,omitempty" jsonschema_description:"Permit plain HTTP although tls is set, or although a token travels over it to another machine. Whoever is on the way can then read the token and change what Consul says. Default: false."`

	Datacenters []string `json:"datacenters,omitempty" jsonschema_description:"Datacenters to follow. Empty: the agent's own, whose services then carry no datacenter in their key and host."`
	Namespaces  []string `json:"namespaces,omitempty" jsonschema_description:"Namespaces to follow (Consul Enterprise). \"*\" alone stands for all that the token may see, which are asked for every 30 s. Empty: the token's own; then keys carry no namespace."`
	Partitions  []string `json:"partitions,omitempty" jsonschema_description:"Admin partitions to follow, instead of partition (Consul Enterprise). \"*\" alone stands for all that the token may see, which are asked for every 30 s."`
	Partition   string   `json:"partition,omitempty" jsonschema_description:"Admin partition to follow (Consul Enterprise). Empty: the agent's own; then keys carry no partition."`

	Peers []string `json:"peers,omitempty" jsonschema_description:"Cluster peers whose services, as imported by the agent's cluster, are followed too, by the names of the peerings. Their hosts name the peer: web.service.PEER.peer.consul. The token then needs peering = \"read\" as well. Default: none."`

	Connect bool `json:"connect,omitempty" jsonschema_description:"Publish each service at the addresses of its sidecars in Consul's own mesh, with the SPIFFE name of their certificates as the subjectAltNames of its ServiceEntry, for gateways that have a certificate of that mesh. Services without a sidecar are left out. Default: false."`

	Services plugin.Selection  `json:"services,omitempty" jsonschema_description:"Which services to follow, by name. The servers' own service, consul, is left out unless exclude says otherwise."`
	Kinds    []string          `json:"kinds,omitempty" jsonschema_description:"Kinds of instances to take: typical, connect-proxy, mesh-gateway, terminating-gateway, ingress-gateway, api-gateway. Default: [typical], which leaves out the proxies and gateways of Consul's own mesh."`
	Tags     []string          `json:"tags,omitempty" jsonschema_description:"Tags that an instance must have, all of them."`
	Meta     map[string]string `json:"meta,omitempty" jsonschema_description:"Service metadata that an instance must have, all of it, with exactly these values."`
	Filter   string            `json:"filter,omitempty" jsonschema_description:"Filter expression in Consul's language for /v1/health/service, evaluated by Consul. Example: Node.Meta.rack == \"r1\"."`

	TaggedAddress string       `json:"tagged_address,omitempty" jsonschema_description:"Tagged address to prefer (lan, wan, lan_ipv4, wan_ipv4, ... or your own). An instance without it is reached at its usual address."`
	NodeMeta      plugin.Globs `json:"node_meta,omitempty" jsonschema_description:"Metadata keys of nodes, as globs (* any run, ? one character), that are added to the metadata of the node's instances. The service's own metadata wins. Default: none."`

	Stale    bool            `json:"stale,omitempty" jsonschema_description:"Let any server answer blocking queries, not only the leader. What an answer lacks is removed only after the leader was asked. Default: false."`
	MaxStale plugin.Duration `json:"max_stale,omitempty" jsonschema_description:"With stale: how far behind the leader a server may be. If it is further behind, another address is used or the leader is asked. Default: 10s."`

	Wait           plugin.Duration `json:"wait,omitempty" jsonschema_description:"How long one blocking query waits for a change, 10s to 10m. Default: 5m."`
	MaxConnections int             `json:"max_connections,omitempty" jsonschema:"minimum=16" jsonschema_description:"Highest number of connections to Consul over plain HTTP, where each blocking query occupies one. Further services share connections: see the registry's page. Keep it well below limits.http_max_conns_per_client of the agent, which are 200 from one address for all programs there together. Over https (HTTP/2) a few connections carry everything. Default: 128."`
	RemoveGrace    plugin.Duration `json:"remove_grace,omitempty" jsonschema_description:"How long missing instances are kept after an outage, or after the agent was replaced, so that agents can register again. 0s removes at once. Default: 30s."`
	AcceptFiltered bool            `json:"accept_filtered,omitempty" jsonschema_description:"Set this for a token that may see only a part of the registry on purpose: that part then counts as everything. By default an answer that Consul filtered by ACL removes nothing and leaves the registry degraded."`
}

// PeeringConfig configures the mode peering.
type PeeringConfig struct {
	TokenFile  string `json:"token_file,omitempty" jsonschema_description:"File with the peering token that consul peering generate-token printed, for this registry of this bridge alone. It must stay there: it names the servers and their authority. A new token is picked up when the connection is made again."`
	SecretFile string `json:"secret_file,omitempty" jsonschema_description:"File that the adapter keeps the lasting secret in, for which it exchanges the token at the first start. Its folder must be writable, and kept over restarts: a token can be exchanged once."`
}

// Values of Config.Mode.
const (
	modeAuto    = "auto"
	modeAddress = "address"
	modePeering = "peering"
)

// kindTypical is the configuration's name of the kind that Consul leaves empty.
const kindTypical = "typical"

// DefaultConfig holds the defaults that a configuration is decoded over.
var DefaultConfig = Config{
	Address:  "http://127.0.0.1:8500",
	Scheme:   "http",
	Services: plugin.Selection{Exclude: plugin.Globs{"consul"}},
	Kinds:    []string{kindTypical},
	Wait:     plugin.Duration(5 * time.Minute),
	// Less than two thirds of what an agent accepts from one address.
	MaxConnections: 128,
	RemoveGrace:    plugin.Duration(30 * time.Second),
	MaxStale:       plugin.Duration(10 * time.Second),
}

// Validate returns all errors of the configuration, as *plugin.FieldError
// joined.
func (c Config) Validate() error {
	var errs []error
	bad := func(field, format string, args ...any) {
		errs = append(errs, &plugin.FieldError{Field: field, Reason: fmt.Sprintf(format, args...)})
	}

	switch c.Scheme {
	case "", "http", "https":
	default:
		bad("scheme", "%q is neither http nor https", c.Scheme)
	}
	target, err := parseAddress(c.Address, c.Scheme)
	switch {
	case len(c.Addresses) == 0 && err != nil:
		bad("address", "%v", err)
	case len(c.Addresses) > 0 && c.Address != "" && c.Address != DefaultConfig.Address:
		bad("addresses", "address is set too; keep one of them")
	case len(c.Addresses) > 0:
		target, err = c.validateAddresses(bad)
	}
	if c.Token != "" && c.TokenFile != "" {
		bad("token_file", "token is set too; keep one of them")
	}

	errs = append(errs, c.TLS.Check("tls")...)
	switch c.Mode {
	case "", modeAuto, modeAddress:
		if c.Peering != (PeeringConfig{}) {
			bad("peering", "is used with mode: peering only; set that, or remove the block")
		}
	case modePeering:
		c.validatePeering(bad)
	default:
		bad("mode", "%q is none of auto, address, peering", c.Mode)
	}
	if err == nil && target.scheme != "https" && c.TLS != (plugin.TLS{}) && (c.Mode != modeAuto || len(c.Addresses) > 0) && c.Mode != modePeering {
		bad("tls", "address %q is not https, so TLS would not be used; write https://, or mode: auto if it is one agent with an https port, or remove the tls block", target)
	}

	if err == nil && !c.Insecure && c.Mode != modePeering && (c.Token != "" || c.TokenFile != "") && len(c.Addresses) == 0 && !target.private() {
		bad("address", "%q is plain HTTP to another machine, where the token could be read on the way; write https://, or insecure: true if you trust the network", c.Address)
	}

	names := func(field string, names []string) {
		for i, n := range names {
			at := fmt.Sprintf("%s[%d]", field, i)
			switch {
			case n == "":
				bad(at, "is empty")
			case n == "*" && len(names) == 1 && (field == "namespaces" || field == "partitions"):
			case n == "*":
				bad(at, "wildcards are not supported here; list the names")
			case slices.Contains(names[:i], n):
				bad(at, "%q is listed twice", n)
			}
		}
	}
	names("datacenters", c.Datacenters)
	names("namespaces", c.Namespaces)
	names("partitions", c.Partitions)
	if len(c.Partitions) > 0 && c.Partition != "" {
		bad("partitions", "partition is set too; keep one of them")
	}
	if len(c.Partitions) > 0 && len(c.Peers) > 0 {
		bad("peers", "are of one partition; follow them in a registry with partition")
	}
	names("peers", c.Peers)
	if len(c.Peers) > 0 && len(c.Namespaces) > 0 {
		bad("peers", "are of the default namespace; follow them in a registry without namespaces")
	}
	if c.Connect && len(c.Peers) > 0 {
		bad("connect", "the sidecars of imported services are behind mesh gateways; follow peers in a registry without connect")
	}
	if c.Connect && len(c.Kinds) > 0 && !slices.Equal(c.Kinds, DefaultConfig.Kinds) {
		bad("kinds", "is not used with connect; remove one of them")
	}
	if c.Partition == "*" {
		bad("partition", "name one, or write partitions: [\"*\"]")
	}

	errs = append(errs, c.Services.Check("services")...)
	errs = append(errs, c.NodeMeta.Check("node_meta")...)

	known := []string{
		kindTypical, string(api.ServiceKindConnectProxy), string(api.ServiceKindMeshGateway),
		string(api.ServiceKindTerminatingGateway), string(api.ServiceKindIngressGateway), string(api.ServiceKindAPIGateway),
	}
	for i, k := range c.Kinds {
		if !slices.Contains(known, k) {
			bad(fmt.Sprintf("kinds[%d]", i), "%q is none of %s", k, strings.Join(known, ", "))
		}
	}
	if s := time.Duration(c.MaxStale); s < 0 || s > 0 && s < time.Second {
		bad("max_stale", "%v is less than a second", s)
	}
	if w := time.Duration(c.Wait); w != 0 && (w < 10*time.Second || w > 10*time.Minute) {
		bad("wait", "%v is outside 10s to 10m, which is what Consul allows and servers can bear", w)
	}
	switch n := needed(c.scopes()); {
	case c.MaxConnections == 0:
	case c.MaxConnections < leastConnections:
		bad("max_connections", "%d are too few; %d are the least", c.MaxConnections, leastConnections)
	case c.MaxConnections < n && err == nil && target.scheme != "https":
		bad("max_connections", "%d are too few for so many datacenters and namespaces, which need %d over plain HTTP; raise it, or use an https address", c.MaxConnections, n)
	}
	return errors.Join(errs...)
}

// validateAddresses checks the addresses, and returns the first of them.
func (c Config) validateAddresses(bad func(field, format string, args ...any)) (first target, err error) {
	for i, address := range c.Addresses {
		field := fmt.Sprintf("addresses[%d]", i)
		t, parseErr := parseAddress(address, c.Scheme)
		if i == 0 {
			first, err = t, parseErr
		}
		switch {
		case parseErr != nil:
			bad(field, "%v", parseErr)
		case t.socket != "" && len(c.Addresses) > 1:
			bad(field, "a socket is one machine's; name it as address")
		case t.scheme != first.scheme || t.prefix != first.prefix:
			bad(field, "%q has another scheme or path than the first; use one registry for each", address)
		case slices.Contains(c.Addresses[:i], address):
			bad(field, "%q is listed twice", address)
		case !c.Insecure && c.Mode != modePeering && (c.Token != "" || c.TokenFile != "") && !t.private():
			bad(field, "%q is plain HTTP to another machine, where the token could be read on the way; write https://, or insecure: true if you trust the network", address)
		}
	}
	return first, err
}

// validatePeering checks the fields that a peering requires, and those that it
// cannot use: a peering delivers everything exported to it, of one datacenter.
func (c Config) validatePeering(bad func(field, format string, args ...any)) {
	if c.Peering.TokenFile == "" {
		bad("peering.token_file", "is needed with mode: peering; consul peering generate-token -name NAME prints what belongs in it")
	}
	if c.Peering.SecretFile == "" || c.Peering.SecretFile == c.Peering.TokenFile {
		bad("peering.secret_file", "is needed with mode: peering; name a file of its own that the adapter may write")
	}
	for _, unused := range []struct {
		field string
		set   bool
	}{
		{"address", c.Address != "" && c.Address != DefaultConfig.Address},
		{"addresses", len(c.Addresses) > 0},
		{"stale", c.Stale},
		{"token", c.Token != ""},
		{"token_file", c.TokenFile != ""},
		{"insecure", c.Insecure},
		{"tls", c.TLS != (plugin.TLS{})},
		{"datacenters", len(c.Datacenters) > 0},
		{"namespaces", len(c.Namespaces) > 0},
		{"partition", c.Partition != ""},
		{"partitions", len(c.Partitions) > 0},
		{"peers", len(c.Peers) > 0},
		{"connect", c.Connect},
		{"filter", c.Filter != ""},
		{"accept_filtered", c.AcceptFiltered},
	} {
		if unused.set {
			bad(unused.field, "is not used with mode: peering; remove it, or the mode")
		}
	}
	if len(c.Kinds) > 0 && !slices.Equal(c.Kinds, DefaultConfig.Kinds) {
		bad("kinds", "a peering tells of %s instances only; remove it, or the mode", kindTypical)
	}
}

// scopes returns the number of followed datacenters, partitions and namespaces,
// and peers. All partitions and all namespaces count as one.
func (c Config) scopes() int {
	return max(len(c.Datacenters), 1)*max(len(c.Partitions), 1)*max(len(c.Namespaces), 1) + len(c.Peers)
}

// withDefaults returns the configuration with required values filled in. Empty
// lists stay empty: an empty exclude list excludes nothing.
func (c Config) withDefaults() Config {
	if c.Address = cmp.Or(c.Address, DefaultConfig.Address); len(c.Addresses) > 0 {
		c.Address = DefaultConfig.Address
	}
	c.Scheme = cmp.Or(c.Scheme, DefaultConfig.Scheme)
	c.Wait = cmp.Or(c.Wait, DefaultConfig.Wait)
	c.MaxStale = cmp.Or(c.MaxStale, DefaultConfig.MaxStale)
	c.MaxConnections = cmp.Or(c.MaxConnections, DefaultConfig.MaxConnections)
	if len(c.Kinds) == 0 {
		c.Kinds = DefaultConfig.Kinds
	}
	return c
}

// target is the address of requests.
type target struct {
	scheme string // http or https
	host   string // host:port; "localhost" for a unix socket
	prefix string // of every request's path: "" or "/..."
	socket string // path of a unix socket, or ""
}

// parseAddress parses an address in the syntax of Config.Address.
func parseAddress(address, scheme string) (target, error) {
	if socket, ok := strings.CutPrefix(address, "unix://"); ok {
		if !strings.HasPrefix(socket, "/") {
			return target{}, fmt.Errorf("%q names no absolute path; write unix:///path/to/socket", address)
		}
		return target{scheme: "http", host: "localhost", socket: socket}, nil
	}
	full := address
	if !strings.Contains(full, "://") {
		full = cmp.Or(scheme, "http") + "://" + full
	}
	u, err := url.Parse(full)
	if err != nil {
		return target{}, fmt.Errorf("%q is not an address; write http://host:port", address)
	}
	switch {
	case u.Scheme != "http" && u.Scheme != "https":
		return target{}, fmt.Errorf("scheme %q is none of http, https, unix", u.Scheme)
	case u.Hostname() == "":
		return target{}, fmt.Errorf("%q names no host; write http://host:port", address)
	case u.User != nil || u.RawQuery != "" || u.Fragment != "":
		return target{}, errors.New("user, query and fragment have no place in an address; for access use token or token_file")
	}
	if strings.Contains(u.Path, "//") {
		return target{}, fmt.Errorf("%q has // behind its host; write http://host:port", address)
	}
	if n, err := strconv.ParseUint(u.Port(), 10, 16); u.Port() != "" && (err != nil || n == 0) {
		return target{}, fmt.Errorf("%q: %s is not a port; there are 1 to 65535", address, u.Port())
	}
	host := u.Host
	if u.Port() == "" {
		port := "8500"
		if u.Scheme == "https" {
			port = "8501"
		}
		host = net.JoinHostPort(u.Hostname(), port)
	}
	return target{scheme: u.Scheme, host: host, prefix: strings.TrimSuffix(u.Path, "/")}, nil
}

// private reports whether nobody else can read what is sent to the target.
func (t target) private() bool {
	host, _, _ := net.SplitHostPort(t.host) // parseAddress joined it, except of a socket
	return t.scheme == "https" || t.socket != "" || host == "localhost" || net.ParseIP(host).IsLoopback()
}

// String returns the target as shown in errors.
func (t target) String() string {
	if t.socket != "" {
		return "unix://" + t.socket
	}
	return t.scheme + "://" + t.host + t.prefix
}

// access returns what the adapter needs of its machine. The ports of a peering
// are those of its servers, which change; that of an agent's HTTPS is asked of
// the agent.
func (c Config) access() (a plugin.Access) {
	c = c.withDefaults()
	if c.Mode == modePeering {
		return plugin.Access{Write: []string{c.Peering.SecretFile}, AnyPort: true}
	}
	for _, t := range c.targets() {
		if t.socket != "" {
			a.UnixSockets = true
			continue
		}
		if t.scheme == "http" && c.Mode != modeAddress && len(c.Addresses) == 0 {
			return plugin.Access{AnyPort: true}
		}
		_, port, _ := net.SplitHostPort(t.host) // parseAddress joined it
		n, _ := strconv.ParseUint(port, 10, 16)
		a.Ports = append(a.Ports, uint16(n))
	}
	return a
}

// targets returns the addresses that can be parsed.
func (c Config) targets() (all []target) {
	addresses := c.Addresses
	if len(addresses) == 0 {
		addresses = []string{c.Address}
	}
	for _, address := range addresses {
		if t, err := parseAddress(address, c.Scheme); err == nil {
			all = append(all, t)
		}
	}
	return all
}
