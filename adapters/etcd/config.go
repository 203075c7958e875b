package etcd

import (
	"errors"
	"fmt"
	"net/url"
	"strings"
	"time"

	"github.com/isthmus-mesh/isthmus/plugin"
)

// Config is the config block of a registry of type etcd. Missing fields default
// to DefaultConfig.
type Config struct {
	Endpoints []string         `json:"endpoints,omitempty" jsonschema:"minItems=1" jsonschema_description:"URLs of the servers of one etcd: http://host:2379 or https://host:2379. One is used at a time. Required."`
	Layout    string           `json:"layout,omitempty" jsonschema:"enum=json,enum=kratos,enum=go-micro,enum=grpc" jsonschema_description:"Who writes the keys: json, the layout that the adapter's page describes; kratos; go-micro; grpc, endpoints.Manager of etcd's own client. Default: json."`
	Prefix    string           `json:"prefix,omitempty" jsonschema_description:"What the keys of all services begin with, up to a slash. Default: /services/ for json, /microservices/ for kratos, /micro/registry/ for go-micro, every key for grpc."`
	Services  plugin.Selection `json:"services,omitempty" jsonschema_description:"Which services to follow, by name."`

	Username     string        `json:"username,omitempty" jsonschema_description:"User of etcd."`
	Password     plugin.Secret `json:"password,omitempty" jsonschema_description:"The user's password, usually as ${NAME} from the environment."`
	UsernameFile string        `json:"username_file,omitempty" jsonschema_description:"File that holds the user's name, read again for every connection."`
	PasswordFile string        `json:"password_file,omitempty" jsonschema_description:"File that holds the password, read again for every connection."`
	TLS          plugin.TLS    `json:"tls,omitempty" jsonschema_description:"TLS towards the servers, for those that are written with https://."`

	Timeout     plugin.Duration `json:"timeout,omitempty" jsonschema_description:"How long a request may take, and how long a watch may be silent, 1s to 10m. Default: 10s."`
	RemoveGrace plugin.Duration `json:"remove_grace,omitempty" jsonschema_description:"How long missing instances are kept after an outage or a sudden loss, so that clients can register again. 0s removes at once. Default: 1m."`
	MinShare    float64         `json:"min_share,omitempty" jsonschema:"minimum=0,maximum=1" jsonschema_description:"Share of the known instances that a new listing must still have to be believed at once. With less, missing ones are kept for remove_grace. 0 believes every share. Default: 0.5."`
	AcceptEmpty bool            `json:"accept_empty,omitempty" jsonschema_description:"Believe an empty listing. By default it removes nothing."`
}

// Values of Config.Layout.
const (
	layoutJSON    = "json"
	layoutKratos  = "kratos"
	layoutGoMicro = "go-micro"
	layoutGRPC    = "grpc"
)

// DefaultConfig holds the defaults that a configuration is decoded over.
var DefaultConfig = Config{
	Layout:      layoutJSON,
	Timeout:     plugin.Duration(10 * time.Second),
	RemoveGrace: plugin.Duration(time.Minute),
	MinShare:    0.5,
}

// Validate returns all errors of the configuration, as *plugin.FieldError
// joined.
func (c Config) Validate() error {
	var errs []error
	bad := func(field, format string, args ...any) {
		errs = append(errs, &plugin.FieldError{Field: field, Reason: fmt.Sprintf(format, args...)})
	}
	errs = append(errs, plugin.CheckServers("endpoints", c.Endpoints)...)
	https := false
	for i, e := range c.Endpoints {
		u, err := url.Parse(e)
		if err != nil {
			continue // reported above
		}
		https = https || u.Scheme == "https"
		if u.Path != "" && u.Path != "/" {
			bad(fmt.Sprintf("endpoints[%d]", i), "a path has no place here; for keys use prefix")
		}
	}
	if c.TLS != (plugin.TLS{}) && !https {
		bad("tls", "no server is written with https://, so TLS would not be used")
	}
	errs = append(errs, c.TLS.Check("tls")...)
	if c.Layout != "" && layouts[c.Layout].parse == nil {
		bad("layout", "%q is none of json, kratos, go-micro, grpc", c.Layout)
	}
	errs = append(errs, c.Services.Check("services")...)

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
	if user && !password {
		bad("password_file", "is missing; the user needs a password, and a client certificate (tls.cert_file) names its user itself")
	}

	within := func(field string, d plugin.Duration, least, most time.Duration) {
		if d != 0 && (time.Duration(d) < least || time.Duration(d) > most) {
			bad(field, "%v is outside %v to %v", d, least, most)
		}
	}
	within("timeout", c.Timeout, time.Second, 10*time.Minute)
	within("remove_grace", c.RemoveGrace, 0, time.Hour)
	if !(c.MinShare >= 0 && c.MinShare <= 1) {
		bad("min_share", "%v is outside 0 to 1", c.MinShare)
	}
	return errors.Join(errs...)
}

// credentials returns the user and the password, read from their files.
func (c Config) credentials() (user, password string, err error) {
	read := func(field, value, file string) string {
		if file == "" || err != nil {
			return value
		}
		s, failed := plugin.ReadSecret(file)
		if failed != nil {
			err = &plugin.FieldError{Field: field, Reason: failed.Error()}
		}
		return s
	}
	user = read("username_file", c.Username, c.UsernameFile)
	password = read("password_file", string(c.Password), c.PasswordFile)
	return user, password, err
}

// prefix returns what all keys begin with: nothing, or a text that ends in a
// slash.
func (c Config) prefix() string {
	p := c.Prefix
	if p == "" {
		p = layouts[c.Layout].prefix
	}
	if p != "" && !strings.HasSuffix(p, "/") {
		p += "/"
	}
	return p
}

// usesTLS reports whether the endpoint is to be reached over TLS.
func usesTLS(endpoint string) bool { return strings.HasPrefix(endpoint, "https://") }

// access returns what the adapter needs of its machine.
func (c Config) access() plugin.Access { return plugin.Access{Ports: plugin.URLPorts(c.Endpoints)} }
