package zookeeper

import (
	"errors"
	"fmt"
	"net"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/isthmus-mesh/isthmus/plugin"
)

// Config is the config block of a registry of type zookeeper. Missing fields
// default to DefaultConfig.
type Config struct {
	Servers  []string         `json:"servers,omitempty" jsonschema:"minItems=1" jsonschema_description:"Servers of one ZooKeeper, as host:port. One is used at a time. Required."`
	Chroot   string           `json:"chroot,omitempty" jsonschema_description:"Path below which everything is, as in the connection strings of ZooKeeper's own clients. Default: /."`
	Hosts    []string         `json:"hosts,omitempty" jsonschema:"uniqueItems=true" jsonschema_description:"What gets a host: interfaces, those of Dubbo; applications, those of Dubbo's application level, Spring Cloud and Curator. Default: both."`
	Dubbo    string           `json:"dubbo,omitempty" jsonschema_description:"Path of Dubbo's registry, which is its group. Default: /dubbo."`
	Apps     string           `json:"applications,omitempty" jsonschema_description:"Path of the applications: the base path of Curator's service discovery, spring.cloud.zookeeper.discovery.root. Default: /services."`
	Services plugin.Selection `json:"services,omitempty" jsonschema_description:"Which interfaces and applications to follow, by name."`

	Auth         string        `json:"auth,omitempty" jsonschema:"enum=digest,enum=sasl" jsonschema_description:"How to authenticate: digest, the scheme of ACLs; sasl, SASL with DIGEST-MD5. Default: digest."`
	Username     string        `json:"username,omitempty" jsonschema_description:"User of ZooKeeper."`
	Password     plugin.Secret `json:"password,omitempty" jsonschema_description:"The user's password, usually as ${NAME} from the environment."`
	UsernameFile string        `json:"username_file,omitempty" jsonschema_description:"File that holds the user's name, read again for every connection."`
	PasswordFile string        `json:"password_file,omitempty" jsonschema_description:"File that holds the password, read again for every connection."`
	TLS          TLSConfig     `json:"tls,omitempty" jsonschema_description:"TLS towards the servers (their secureClientPort)."`

	Timeout     plugin.Duration `json:"timeout,omitempty" jsonschema_description:"How long a connection may take, how long nothing may be heard of a server, and the timeout of the session, 1s to 10m. Default: 10s."`
	RemoveGrace plugin.Duration `json:"remove_grace,omitempty" jsonschema_description:"How long missing instances are kept after an outage or a sudden loss, so that providers can register again. 0s removes at once. Default: 1m."`
	MinShare    float64         `json:"min_share,omitempty" jsonschema:"minimum=0,maximum=1" jsonschema_description:"Share of the known instances that must still be there after a new session to be believed at once. With less, missing ones are kept for remove_grace. 0 believes every share. Default: 0.5."`
	AcceptEmpty bool            `json:"accept_empty,omitempty" jsonschema_description:"Believe an empty registry. By default it removes nothing."`
}

// TLSConfig configures TLS to ZooKeeper.
type TLSConfig struct {
	Enabled bool `json:"enabled,omitempty" jsonschema_description:"Use TLS."`
	plugin.TLS
}

// Values of Config.Hosts.
const (
	hostsInterfaces   = "interfaces"
	hostsApplications = "applications"
)

// Values of Config.Auth.
const (
	authDigest = "digest"
	authSASL   = "sasl"
)

// DefaultConfig holds the defaults that a configuration is decoded over.
var DefaultConfig = Config{
	Hosts:       []string{hostsInterfaces, hostsApplications},
	Dubbo:       "/dubbo",
	Apps:        "/services",
	Auth:        authDigest,
	Timeout:     plugin.Duration(10 * time.Second),
	RemoveGrace: plugin.Duration(time.Minute),
	MinShare:    0.5,
}

// access returns what the adapter needs of its machine.
func (c Config) access() (a plugin.Access) {
	for _, s := range c.Servers {
		if _, port, err := net.SplitHostPort(s); err == nil { // else refused before
			if n, err := strconv.ParseUint(port, 10, 16); err == nil {
				a.Ports = append(a.Ports, uint16(n))
			}
		}
	}
	return a
}

// Validate returns all errors of the configuration, as *plugin.FieldError
// joined.
func (c Config) Validate() error {
	var errs []error
	bad := func(field, format string, args ...any) {
		errs = append(errs, &plugin.FieldError{Field: field, Reason: fmt.Sprintf(format, args...)})
	}
	if len(c.Servers) == 0 {
		bad("servers", "is empty; name at least one server, as host:port")
	}
	for i, s := range c.Servers {
		at := fmt.Sprintf("servers[%d]", i)
		host, port, err := net.SplitHostPort(s)
		n, notNumber := strconv.Atoi(port)
		switch {
		case strings.Contains(s, "/"):
			bad(at, "%q is not host:port; a path has its place in chroot", s)
		case strings.Contains(s, ","):
			bad(at, "%q is more than one server; write each as an entry of its own", s)
		case err != nil || host == "" || notNumber != nil || n < 1 || n > 65535:
			bad(at, "%q is not host:port, such as zookeeper.example.org:2181", s)
		case slices.Contains(c.Servers[:i], s):
			bad(at, "%q is listed twice", s)
		}
	}
	for _, p := range []struct{ field, path string }{{"chroot", c.Chroot}, {"dubbo", c.Dubbo}, {"applications", c.Apps}} {
		if p.path != "" && badPath(p.path) {
			bad(p.field, "%q is no path of ZooKeeper; write it as /one or /one/two", p.path)
		}
	}
	for i, h := range c.Hosts {
		if h != hostsInterfaces && h != hostsApplications {
			bad(fmt.Sprintf("hosts[%d]", i), "%q is neither interfaces nor applications", h)
		}
	}
	if within(c.Dubbo, c.Apps) || within(c.Apps, c.Dubbo) {
		bad("applications", "must be outside of dubbo, and dubbo outside of it: they are %q and %q", c.Apps, c.Dubbo)
	}
	errs = append(errs, c.Services.Check("services")...)

	switch c.Auth {
	case "", authDigest, authSASL:
	default:
		bad("auth", "%q is neither digest nor sasl", c.Auth)
	}
	user := c.Username != "" || c.UsernameFile != ""
	password := c.Password != "" || c.PasswordFile != ""
	if c.Username != "" && c.UsernameFile != "" {
		bad("username_file", "username is set too; keep one of them")
	}
	if c.Password != "" && c.PasswordFile != "" {
		bad("password_file", "password is set too; keep one of them")
	}
	if password && !user {
		bad("username", "is missing; the password needs it")
	}
	if !password && user {
		bad("password_file", "is missing; the user needs a password")
	}
	if c.Auth == authSASL && !user {
		bad("username", "is missing; SASL needs a user and a password")
	}
	if c.TLS.TLS != (plugin.TLS{}) && !c.TLS.Enabled {
		bad("tls.enabled", "is false, so TLS would not be used")
	}
	errs = append(errs, c.TLS.Check("tls")...)

	errs = append(errs, c.Timeout.Check("timeout", time.Second, 10*time.Minute)...)
	errs = append(errs, c.RemoveGrace.Check("remove_grace", 0, time.Hour)...)
	if !(c.MinShare >= 0 && c.MinShare <= 1) {
		bad("min_share", "%v is outside 0 to 1", c.MinShare)
	}
	return errors.Join(errs...)
}

// badPath reports whether a text is not an absolute path. "/" alone is one.
func badPath(p string) bool {
	if p == "/" {
		return false
	}
	if !strings.HasPrefix(p, "/") {
		return true
	}
	for part := range strings.SplitSeq(strings.TrimSuffix(p[1:], "/"), "/") {
		if part == "" || part == "." || part == ".." || strings.ContainsRune(part, 0) {
			return true
		}
	}
	return false
}

// within reports whether a path is the other one or below it.
func within(path, above string) bool {
	path, above = clean(path), clean(above)
	return path == above || strings.HasPrefix(path, above+"/")
}

// clean returns a path without the slash at its end: "" is the root.
func clean(path string) string { return strings.TrimSuffix(path, "/") }

// has reports whether something gets hosts.
func (c Config) has(what string) bool { return slices.Contains(c.Hosts, what) }
