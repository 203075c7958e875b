package nacos

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/isthmus-mesh/isthmus/internal/dubbo"
	"github.com/isthmus-mesh/isthmus/plugin"
)

// Config is the config block of a registry of type nacos. Missing fields
// default to DefaultConfig.
type Config struct {
	Servers        []string `json:"servers,omitempty" jsonschema:"minItems=1" jsonschema_description:"Servers of one Nacos cluster: host, host:port or http(s)://host:port/context, with the port of the HTTP API (default 8848). One is used at a time."`
	ContextPath    string   `json:"context_path,omitempty" jsonschema_description:"Context path of the HTTP API, of a server that names none. / for none. Default: /nacos."`
	GRPCPortOffset int      `json:"grpc_port_offset,omitempty" jsonschema:"minimum=-65535,maximum=65535" jsonschema_description:"Number that is added to a server's port for gRPC. Default: 1000."`
	Protocol       string   `json:"protocol,omitempty" jsonschema:"enum=auto,enum=grpc,enum=http" jsonschema_description:"grpc: the server pushes changes. http: polling, for 1.x. auto: grpc, or http while the servers answer only that. Default: auto."`

	Username      string        `json:"username,omitempty" jsonschema_description:"User to log in as. It needs read on the namespaces that are followed."`
	Password      plugin.Secret `json:"password,omitempty" jsonschema_description:"The user's password, usually as ${NAME} from the environment."`
	UsernameFile  string        `json:"username_file,omitempty" jsonschema_description:"File that holds the user's name, read again at every login."`
	PasswordFile  string        `json:"password_file,omitempty" jsonschema_description:"File that holds the password, read again at every login."`
	Token         plugin.Secret `json:"token,omitempty" jsonschema_description:"Access token, in place of a login. It is not renewed; prefer a user, or token_file."`
	TokenFile     string        `json:"token_file,omitempty" jsonschema_description:"File that holds the access token. It is read again when it changes, and when the server refuses it."`
	AccessKey     plugin.Secret `json:"access_key,omitempty" jsonschema_description:"Access key of a cloud's Nacos. Requests are then signed."`
	SecretKey     plugin.Secret `json:"secret_key,omitempty" jsonschema_description:"Secret key that belongs to access_key."`
	SecurityToken plugin.Secret `json:"security_token,omitempty" jsonschema_description:"Security token, if access_key is a temporary one. It expires with it and is not renewed; prefer the files."`
	// Temporary keys are replaced while the adapter runs.
	AccessKeyFile     string    `json:"access_key_file,omitempty" jsonschema_description:"File that holds the access key. This file and the next two are read again when they change, and when the server refuses a request."`
	SecretKeyFile     string    `json:"secret_key_file,omitempty" jsonschema_description:"File that holds the secret key."`
	SecurityTokenFile string    `json:"security_token_file,omitempty" jsonschema_description:"File that holds the security token."`
	Region            string    `json:"region,omitempty" jsonschema_description:"The cloud's region: requests are then signed by version 4 of its scheme. Default: version 1."`
	TLS               TLSConfig `json:"tls,omitempty" jsonschema_description:"TLS towards the servers: for gRPC if grpc is true, for the HTTP API of servers that are written with https://."`

	Namespaces []string     `json:"namespaces,omitempty" jsonschema_description:"Ids of the namespaces to follow, or [\"*\"] for all, which needs the right to list them. Default: [public]."`
	Groups     plugin.Globs `json:"groups,omitempty" jsonschema_description:"Groups to follow, by name or glob (* any run, ? one character). With names only, the server does not have to list everything. Default: [\"*\"]."`
	// Groups of the AI registry hold endpoints of tools and agents, which the
	// clients of that registry look up there.
	ExcludeGroups plugin.Globs     `json:"exclude_groups,omitempty" jsonschema_description:"Groups not to follow, by name or glob. Default: [mcp-endpoints, agent-endpoints], in which the AI registry of Nacos 3 keeps the endpoints of tools and agents; [] for none."`
	Services      plugin.Selection `json:"services,omitempty" jsonschema_description:"Which services to follow, by name."`

	Dubbo           bool            `json:"dubbo,omitempty" jsonschema_description:"Follow the services of Dubbo as those of its interfaces, with the hosts and ports that they have from ZooKeeper, and leave out what its consumers register. It needs one namespace. Default: false, services by their names in Nacos."`
	ClusterLocality string          `json:"cluster_locality,omitempty" jsonschema:"enum=none,enum=region,enum=zone,enum=sub_zone" jsonschema_description:"Part of the locality that an instance's cluster names: region; zone, which needs translate.locality.region too; sub_zone, which needs a region and a zone too (translate.locality.zone_key). The cluster DEFAULT names none. Default: none; the cluster is a label in any case."`
	Ports           plugin.PortKeys `json:"ports,omitempty" jsonschema_description:"More ports of an instance, from its metadata. A value that is not a port number is listed as a problem."`

	ListInterval plugin.Duration `json:"list_interval,omitempty" jsonschema_description:"How often services are listed if the server does not announce them, 500ms to 10m. Sooner after a change, less often if a list takes long. Default: 5s."`
	PollInterval plugin.Duration `json:"poll_interval,omitempty" jsonschema_description:"How often each service is asked for over HTTP, 1s to 10m. Default: 10s."`
	InFlight     int             `json:"in_flight,omitempty" jsonschema:"minimum=1,maximum=256" jsonschema_description:"How many subscriptions or queries may be under way at once. Default: 16."`
	RemoveGrace  plugin.Duration `json:"remove_grace,omitempty" jsonschema_description:"How long missing instances are kept after an outage, or a move to another server, so that clients can register again. 0s removes at once. Default: 1m."`
	AcceptEmpty  bool            `json:"accept_empty,omitempty" jsonschema_description:"Believe a namespace without any service. By default an empty list counts only if the server says that the namespace exists, which not every user may ask."`
}

// TLSConfig configures TLS to Nacos.
type TLSConfig struct {
	GRPC bool `json:"grpc,omitempty" jsonschema_description:"Use TLS for gRPC (nacos.remote.server.rpc.tls at the server)."`
	plugin.TLS
}

// Values of Config.Protocol.
const (
	protocolAuto = "auto"
	protocolGRPC = "grpc"
	protocolHTTP = "http"
)

// publicNamespace is the default namespace of every Nacos. Clients also write
// it as the empty name.
const publicNamespace = "public"

// DefaultConfig holds the defaults that a configuration is decoded over.
var DefaultConfig = Config{
	Servers:         []string{"127.0.0.1:8848"},
	ContextPath:     defaultContextPath,
	GRPCPortOffset:  grpcOffset,
	Protocol:        protocolAuto,
	Namespaces:      []string{publicNamespace},
	Groups:          plugin.Globs{"*"},
	ExcludeGroups:   plugin.Globs{"mcp-endpoints", "agent-endpoints"},
	ClusterLocality: "none",
	ListInterval:    plugin.Duration(5 * time.Second),
	PollInterval:    plugin.Duration(10 * time.Second),
	InFlight:        16,
	RemoveGrace:     plugin.Duration(time.Minute),
}

// Validate returns all errors of the configuration, as *plugin.FieldError
// joined.
func (c Config) Validate() error {
	var errs []error
	bad := func(field, format string, args ...any) {
		errs = append(errs, &plugin.FieldError{Field: field, Reason: fmt.Sprintf(format, args...)})
	}

	if len(c.Servers) == 0 {
		bad("servers", "is empty; write host:port of at least one server")
	}
	https := false
	for i, address := range c.Servers {
		s, err := parseServer(address, c.ContextPath, c.GRPCPortOffset)
		if err != nil {
			bad(fmt.Sprintf("servers[%d]", i), "%v", err)
		}
		if slices.Contains(c.Servers[:i], address) {
			bad(fmt.Sprintf("servers[%d]", i), "%q is listed twice", address)
		}
		https = https || s.scheme == "https"
	}
	switch c.Protocol {
	case "", protocolAuto, protocolGRPC, protocolHTTP:
	default:
		bad("protocol", "%q is none of auto, grpc, http", c.Protocol)
	}

	c.validateAccess(bad)
	errs = append(errs, c.TLS.Check("tls")...)
	if c.TLS != (TLSConfig{}) && !c.TLS.GRPC && !https {
		bad("tls", "neither is tls.grpc true nor a server written with https://, so TLS would not be used")
	}

	for i, n := range c.Namespaces {
		at := fmt.Sprintf("namespaces[%d]", i)
		switch {
		case n == "*" && len(c.Namespaces) > 1:
			bad(at, "* means all; list names or *, not both")
		case n != "*" && strings.ContainsAny(n, "*?["):
			bad(at, "globs are not supported here; list ids, or * for all")
		case slices.ContainsFunc(c.Namespaces[:i], func(o string) bool { return canonicalNamespace(o) == canonicalNamespace(n) }):
			bad(at, "%q is listed twice", canonicalNamespace(n))
		}
	}
	errs = append(errs, c.Groups.Check("groups")...)
	errs = append(errs, c.ExcludeGroups.Check("exclude_groups")...)
	if named, ok := c.namedGroups(); ok {
		for i, g := range named {
			if c.ExcludeGroups.Match(g) {
				bad(fmt.Sprintf("groups[%d]", i), "%q is excluded by exclude_groups; take it out there", g)
			}
		}
	}
	errs = append(errs, c.Services.Check("services")...)

	switch c.ClusterLocality {
	case "", "none", "region", "zone", "sub_zone":
	default:
		bad("cluster_locality", "%q is none of none, region, zone, sub_zone", c.ClusterLocality)
	}
	if c.Dubbo && (len(c.Namespaces) > 1 || c.allNamespaces()) {
		bad("dubbo", "needs one namespace, since hosts of interfaces do not name it; write a registry for each")
	}
	errs = append(errs, c.Ports.Check("ports")...)
	errs = append(errs, c.ListInterval.Check("list_interval", 500*time.Millisecond, 10*time.Minute)...)
	errs = append(errs, c.PollInterval.Check("poll_interval", time.Second, 10*time.Minute)...)
	errs = append(errs, c.RemoveGrace.Check("remove_grace", 0, time.Hour)...)
	if c.InFlight < 0 || c.InFlight > 256 {
		bad("in_flight", "%d is outside 1 to 256", c.InFlight)
	}
	return errors.Join(errs...)
}

// validateAccess checks that at most one kind of credentials is configured, and
// completely.
func (c Config) validateAccess(bad func(field, format string, args ...any)) {
	user := c.Username != "" || c.UsernameFile != ""
	password := c.Password != "" || c.PasswordFile != ""
	if user != password {
		bad("username", "user name and password go together; set both or none")
	}
	if c.Username != "" && c.UsernameFile != "" {
		bad("username_file", "username is set too; keep one of them")
	}
	if c.Password != "" && c.PasswordFile != "" {
		bad("password_file", "password is set too; keep one of them")
	}
	if c.Token != "" && c.TokenFile != "" {
		bad("token_file", "token is set too; keep one of them")
	}
	if token := c.Token != "" || c.TokenFile != ""; token && (user || password) {
		bad("token", "a user is set too; keep the user, who is logged in again in time, or the token")
	}
	for _, k := range []struct {
		field string
		value plugin.Secret
		file  string
	}{
		{"access_key_file", c.AccessKey, c.AccessKeyFile},
		{"secret_key_file", c.SecretKey, c.SecretKeyFile},
		{"security_token_file", c.SecurityToken, c.SecurityTokenFile},
	} {
		if k.value != "" && k.file != "" {
			bad(k.field, "%s is set too; keep one of them", strings.TrimSuffix(k.field, "_file"))
		}
	}
	signs := c.AccessKey != "" || c.AccessKeyFile != ""
	if signs != (c.SecretKey != "" || c.SecretKeyFile != "") {
		bad("access_key", "access_key and secret_key go together; set both or none")
	}
	if !signs && (c.SecurityToken != "" || c.SecurityTokenFile != "" || c.Region != "") {
		bad("access_key", "is missing; security_token and region are for signed requests only")
	}
}

// withDefaults returns the configuration with required values filled in.
func (c Config) withDefaults() Config {
	d := DefaultConfig
	c.ContextPath = cmp.Or(c.ContextPath, d.ContextPath)
	c.GRPCPortOffset = cmp.Or(c.GRPCPortOffset, d.GRPCPortOffset)
	c.Protocol = cmp.Or(c.Protocol, d.Protocol)
	c.ListInterval = cmp.Or(c.ListInterval, d.ListInterval)
	c.PollInterval = cmp.Or(c.PollInterval, d.PollInterval)
	c.InFlight = cmp.Or(c.InFlight, d.InFlight)
	if len(c.Servers) == 0 {
		c.Servers = d.Servers
	}
	if len(c.Namespaces) == 0 {
		c.Namespaces = d.Namespaces
	}
	if len(c.Groups) == 0 {
		c.Groups = d.Groups
	}
	return c
}

// canonicalNamespace returns the canonical name of a namespace: the empty name
// is the public one.
func canonicalNamespace(name string) string { return cmp.Or(name, publicNamespace) }

// allNamespaces reports whether all namespaces are followed.
func (c Config) allNamespaces() bool { return len(c.Namespaces) == 1 && c.Namespaces[0] == "*" }

// namedGroups returns the groups if none of them is a glob.
func (c Config) namedGroups() (groups []string, ok bool) {
	for _, g := range c.Groups {
		if strings.ContainsAny(g, `*?[\`) {
			return nil, false
		}
	}
	return c.Groups, true
}

// access returns what the adapter needs of its machine.
func (c Config) access() (a plugin.Access) {
	c = c.withDefaults()
	for _, address := range c.Servers {
		if s, err := parseServer(address, c.ContextPath, c.GRPCPortOffset); err == nil { // else refused before
			a.Ports = append(a.Ports, uint16(s.port), uint16(s.grpcPort)) //nolint:gosec // parseServer bounds them
		}
	}
	return a
}

// selectedBy returns the name by which services selects a service: that of the
// interface for one of Dubbo. followed is false for what Dubbo's consumers
// register.
func (c Config) selectedBy(name string) (by string, followed bool) {
	if c.Dubbo {
		if n, offered, ok := dubbo.ParseName(name); ok {
			return n.Interface, offered
		}
	}
	return name, true
}
